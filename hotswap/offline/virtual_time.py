"""A simulated clock for unchanged asyncio code: an hour of sleep passes in milliseconds.

The loop replaces `time`, `call_soon`, `call_at` and `call_later`, and its turn: asyncio's own looks at
sockets and at the real time, which costs a fiftieth of a simulation. Code that must run under it takes its
time from `anyio.current_time` and its sleep from `anyio`; sockets, subprocesses and threads live in real
time, so waiting for one of them is a deadlock here.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import Context
from types import FrameType
from typing import Any, NoReturn, ParamSpec, TypeVar, TypeVarTuple, Unpack

import anyio

__all__ = ["VirtualTimeDeadlock", "VirtualTimeLoop", "run", "virtual_time"]

_Args = TypeVarTuple("_Args")
_P = ParamSpec("_P")
_R = TypeVar("_R")

# So many turns of the loop at one instant count as spinning; a busy fleet of a thousand engines takes tens.
MAX_TURNS_AT_ONE_INSTANT = 200_000


class VirtualTimeDeadlock(RuntimeError):
    """No task can ever run again, or the tasks that run never let time pass; the message names them."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock starts at 0 and jumps to the next timer whenever nothing can run.

    Timers of equal time fire in the order in which they were set, so a program without other randomness runs
    the same way every time. `on_turn`, if set, is called before each turn and returns whether it made
    something runnable.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._turns = 0
        self.on_turn: Callable[[], bool] | None = None
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        super().__init__()
        self._runnable: deque[asyncio.Handle] = vars(self)["_ready"]

    def time(self) -> float:
        """Return the simulated seconds since the loop was made."""
        return self._now_s

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[_Args]], object],
        *args: *_Args,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call back at the simulated time `when`, after every timer set earlier for the same time."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def call_soon(
        self,
        callback: Callable[[Unpack[_Args]], object],
        *args: *_Args,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """Call back in the next turn."""
        handle = asyncio.Handle(callback, args, self, context)
        self._runnable.append(handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[_Args]], object],
        *args: *_Args,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call back after `delay` simulated seconds."""
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]  # narrower than the base: it never returns
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> NoReturn:
        """Refuse: a thread takes real time, which this clock does not see.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"{func!r} was sent to a thread under virtual time, which would not wait for it. "
            "Run it on the loop, or run this code in real time."
        )

    def _run_once(self) -> None:
        """Run what is runnable at the beginning of the turn; what it makes runnable has the next one."""
        runnable = self._runnable
        self._jump(idle=not runnable and not vars(self)["_stopping"])
        for _ in range(len(runnable)):
            handle = runnable.popleft()
            if not handle.cancelled():
                handle._run()

    def _jump(self, *, idle: bool) -> None:
        """Make due timers runnable; if nothing else can run, advance the clock to the next one first."""
        if self.on_turn is not None and self.on_turn():
            idle = False
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if idle and not timers:
            raise VirtualTimeDeadlock(self._why("no task can run and no timer is set"))
        if idle and timers[0][0] > self._now_s:
            self._now_s, self._turns = timers[0][0], 0
        self._turns += 1
        if self._turns > MAX_TURNS_AT_ONE_INSTANT:
            self._turns = 0  # so that the tasks can still be cancelled
            raise VirtualTimeDeadlock(self._why("its tasks run on without ever sleeping"))
        while timers and timers[0][0] <= self._now_s:
            # `call_soon` would make a handle more for each, a twentieth of a simulation's time.
            self._runnable.append(heapq.heappop(timers)[2])

    def _why(self, what: str) -> str:
        waiting = "".join(f"\n  {_where(task)}" for task in asyncio.all_tasks(self))
        return (
            f"Virtual time stands still at {self._now_s} s: {what}. Something awaits an event that "
            f"no task sets, or a thread or socket, which virtual time cannot wait for. The tasks:{waiting}"
        )


def _where(task: asyncio.Task[Any]) -> str:
    """The task's name and the innermost line, outside asyncio and anyio, at which it is suspended."""
    awaited: Any = task.get_coro()
    frame: FrameType | None = None
    while awaited is not None:
        inner = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if inner is not None and (frame is None or not _is_library(inner)):
            frame = inner
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    if frame is None:
        return repr(task.get_name())
    code = frame.f_code
    return f"{task.get_name()!r} in {code.co_qualname}, {code.co_filename}:{frame.f_lineno}"


def _is_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in {"asyncio", "anyio"}


def run(func: Callable[[Unpack[_Args]], Awaitable[_R]], *args: *_Args) -> _R:
    """Run an async function on a new `VirtualTimeLoop` and return what it returns.

    Raises:
        VirtualTimeDeadlock: nothing could run any more; the message says what each task waits for.
    """
    return anyio.run(func, *args, backend="asyncio", backend_options={"loop_factory": VirtualTimeLoop})


def virtual_time(test: Callable[_P, Awaitable[_R]]) -> Callable[_P, _R]:
    """Turn an async function into an ordinary one that runs in virtual time.

    A test so decorated is synchronous to pytest; it takes fixtures and `hypothesis.given` as before.
    """

    @functools.wraps(test)
    def in_virtual_time(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return run(functools.partial(test, *args, **kwargs))

    return in_virtual_time
