"""While a fleet is open: its task group, its event loop, and work of callers that ends with it."""

from __future__ import annotations

from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import Coroutine
from typing import TYPE_CHECKING, TypeVar

import anyio

from hotswap.errors import FleetClosed, HotswapError, WrongLoop
from hotswap.stray_cancellation import no_stray_cancellation

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

__all__ = ["Lifetime"]

_T = TypeVar("_T")


class Lifetime:
    """Says whether a fleet is open, and runs work that must not outlive it."""

    def __init__(self) -> None:
        self._tasks: TaskGroup | None = None
        self._loop: AbstractEventLoop | None = None

    def begin(self, tasks: TaskGroup) -> None:
        """Note that the fleet is open, on this event loop."""
        self._tasks, self._loop = tasks, get_running_loop()

    def end(self) -> None:
        """Note that it is not any more."""
        self._tasks = self._loop = None

    @property
    def is_open(self) -> bool:
        """Whether the fleet is open, on whichever event loop."""
        return self._tasks is not None

    @property
    def tasks(self) -> TaskGroup:
        """The fleet's tasks.

        Raises:
            FleetClosed: the fleet is not open.
            WrongLoop: it is open on another event loop.
        """
        if self._tasks is None:
            raise FleetClosed("The fleet is not open; use it inside `async with Fleet(...) as fleet`.")
        self.check_loop()
        return self._tasks

    def check_open(self) -> None:
        """Raise `FleetClosed` unless the fleet is open, and `WrongLoop` unless it is open here."""
        _ = self.tasks

    def check_loop(self) -> None:
        """Raise `WrongLoop` unless the fleet is closed, or open on the event loop that calls this."""
        if self._loop is not None and not _is_current(self._loop):
            raise WrongLoop(
                "The fleet is open on another event loop; call it there, from other threads by "
                "`anyio.from_thread.run` or `asyncio.run_coroutine_threadsafe`."
            )

    async def run(self, work: Coroutine[object, object, _T], what: str) -> _T:
        """Return what `work` returns; a closing fleet cancels it and waits for it to end.

        Raises:
            FleetClosed: the fleet is not open, in which case nothing has begun, or closed meanwhile.
            WrongLoop: it is open on another event loop.
        """
        try:
            tasks = self.tasks
        except HotswapError:
            work.close()  # else Python warns that it was never awaited
            raise
        ended = anyio.Event()
        with anyio.CancelScope() as scope:
            tasks.start_soon(_end_with_fleet, scope, ended, name=what)
            try:
                with no_stray_cancellation(what):
                    return await work
            finally:
                ended.set()
        raise FleetClosed(f"The fleet closed before {what} ended; nothing is lost.")


def _is_current(loop: AbstractEventLoop) -> bool:
    """Return whether a loop is the one that calls this; asked for every token of a stream."""
    try:
        return get_running_loop() is loop
    except RuntimeError:  # a thread without an event loop, or with one of another kind
        return False


async def _end_with_fleet(scope: anyio.CancelScope, ended: anyio.Event) -> None:
    """As a task of the fleet: cancel what runs outside of it when the fleet closes, and let it end first."""
    try:
        await ended.wait()
    finally:
        scope.cancel()
        with anyio.CancelScope(shield=True):
            await ended.wait()
