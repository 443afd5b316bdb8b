"""Cancelling a scenario at every point where it can be cancelled, with a check of the state after each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from typing import Any, Literal

import anyio

from hotswap.offline.virtual_time import VirtualTimeLoop

__all__ = ["cancel_at", "cancel_everywhere"]


async def cancel_everywhere(
    scenario: Callable[[], Awaitable[object]],
    check: Callable[[], Awaitable[object]],
    *,
    every: Literal["checkpoint", "turn"] = "checkpoint",
    limit: int = 10_000,
) -> int:
    """Run `scenario`, cancelled at its k-th checkpoint in the k-th run, until one run completes.

    A checkpoint is a point where the task that runs `scenario` gives up control. With `every="turn"`, which
    needs a `VirtualTimeLoop`, each turn of the event loop counts instead, so that what other tasks do on its
    behalf is interrupted too. The cancellation stays in force, as that of an anyio scope: shielded work goes
    on, and the next checkpoint outside the shield is cancelled.

    Args:
        scenario: the work; without a cancellation it must end in the state in which it began.
        check: asserts that all resources are released after each run, and restores what the next run needs.
        every: what counts as one point.
        limit: the most runs, after which the scenario is taken to be endless.

    Returns:
        The number of cancelled runs.

    Raises:
        AssertionError: no run of `scenario` completed.
        Exception: any error of `scenario` or `check`, with a note that names the cancellation.
    """
    for number in range(1, limit + 1):
        try:
            cancelled = await cancel_at(number, scenario, every=every)
        except Exception as error:
            error.add_note(f"The scenario was cancelled at {every} {number}.")
            raise
        try:
            await check()
        except Exception as error:
            error.add_note(f"This is what cancelling the scenario at {every} {number} left behind.")
            raise
        if not cancelled:
            return number - 1
    raise AssertionError(f"The scenario was cancelled at {limit} {every}s and never ran to its end.")


async def cancel_at(
    number: int,
    scenario: Callable[[], Awaitable[object]],
    *,
    every: Literal["checkpoint", "turn"] = "checkpoint",
) -> bool:
    """Run `scenario` once, cancelled at one checkpoint or turn; return whether it got that far."""
    countdown = _Countdown(number)
    with countdown.scope:
        await (_in_turns if every == "turn" else _in_checkpoints)(_called(scenario), countdown)
    return countdown.fired


class _Countdown:
    """Cancels a scope at the last of a number of ticks."""

    def __init__(self, ticks: int) -> None:
        self._ticks = ticks
        self.scope = anyio.CancelScope()

    @property
    def fired(self) -> bool:
        return self._ticks <= 0

    def tick(self) -> bool:
        """Return whether this tick cancelled the scope."""
        self._ticks -= 1
        if self._ticks == 0:
            self.scope.cancel("cancel everywhere")
        return self._ticks == 0


async def _called(scenario: Callable[[], Awaitable[object]]) -> None:
    await scenario()


async def _in_checkpoints(work: Coroutine[Any, Any, None], countdown: _Countdown) -> None:
    await _Counted(work, countdown)


async def _in_turns(work: Coroutine[Any, Any, None], countdown: _Countdown) -> None:
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualTimeLoop):
        work.close()
        raise TypeError(
            f"Turns are counted by a VirtualTimeLoop, and this is {loop!r}; use every='checkpoint'."
        )
    loop.on_turn = countdown.tick
    try:
        await work
    finally:
        loop.on_turn = None


class _Counted:
    """Awaits a coroutine and ticks each time it suspends, just before the event loop learns of it."""

    def __init__(self, work: Coroutine[Any, Any, None], countdown: _Countdown) -> None:
        self._work = work
        self._countdown = countdown

    def __await__(self) -> Generator[Any, Any, None]:
        resume: Callable[[], Any] = partial(self._work.send, None)
        try:
            while True:
                try:
                    suspended_on = resume()
                except StopIteration:
                    return
                self._countdown.tick()
                try:
                    resume = partial(self._work.send, (yield suspended_on))
                except BaseException as error:  # the work handles it
                    resume = partial(self._work.throw, error)
        finally:
            self._work.close()
