"""A request that has come and is not made yet: its prompt is being read."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import anyio

from hotswap.errors import DeadlineExceeded
from hotswap.request import ModelId, RequestId

__all__ = ["EnteringRequest"]


class EnteringRequest:
    """A request whose client has asked, and whose prompt is written and encoded; it is under way like others.

    Args:
        model: What it asks for.
        id: The id that its client gave it; `None` without one.
        deadline_at_s: The loop time at which it ends by `DeadlineExceeded`.

    Attributes:
        model: What serves it, as far as that is known: a roll may change it.
    """

    def __init__(self, model: ModelId, deadline_at_s: float, id: RequestId | None = None) -> None:
        self.model, self.id = model, id
        self._scope = anyio.CancelScope(deadline=deadline_at_s)
        self._error: Exception | None = None

    def abort(self, error: Exception) -> None:
        """End it by an error."""
        self._error = error
        self._scope.cancel()

    @contextmanager
    def reading(self) -> Generator[None]:
        """Bracket the reading of its prompt; an abort ends the block by its error, a deadline too."""
        with self._scope:
            yield
        if self._scope.cancel_called:
            raise self._error or DeadlineExceeded(
                "The request passed its deadline before its prompt was read; allow it more time."
            )
