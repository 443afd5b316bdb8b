"""Cancellations that no caller asked for: a future that an engine or a store awaits was cancelled."""

from __future__ import annotations

import math
from asyncio import CancelledError, current_task
from collections.abc import Generator
from contextlib import contextmanager

from anyio import current_effective_deadline

from hotswap.errors import InstanceError

__all__ = ["no_stray_cancellation"]


@contextmanager
def no_stray_cancellation(what: str) -> Generator[None]:
    """Make an error of a `CancelledError` that no scope and no `Task.cancel` has asked for.

    A task that lets it pass ends its task group, and with that a fleet, without an error.

    Raises:
        InstanceError: naming `what` was cancelled.
    """
    try:
        yield
    except CancelledError as exc:
        task = current_task()
        if current_effective_deadline() == -math.inf or (task is not None and task.cancelling()):
            raise
        raise InstanceError(
            f"{what[:1].upper()}{what[1:]} ended by a cancellation that was not asked for, as of a future "
            "that it awaits; see what cancels that."
        ) from exc
