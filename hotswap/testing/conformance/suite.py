"""The base of the conformance suites: running a check, waiting, and watching the event loop."""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import ClassVar, TypeGuard, TypeVar

import anyio
import anyio.lowlevel

from hotswap.offline.virtual_time import VirtualTimeLoop
from hotswap.testing.conformance.turns import TurnLoop

__all__ = ["Heartbeat", "Suite", "check", "until"]

_S = TypeVar("_S", bound="Suite")


class Suite:
    """A base of test classes whose tests are async inside and synchronous outside.

    Attributes:
        virtual: whether to run in virtual time; for implementations without threads, files and sockets.
        limit_s: the seconds after which a test counts as hanging, however busy the machine is; no test waits
            for time to pass.
    """

    virtual: ClassVar[bool] = False
    limit_s: ClassVar[float] = 600.0

    def run(self, test: Callable[[], Awaitable[None]]) -> None:
        """Run one test on a new event loop; override it to choose another `TurnLoop`."""
        loop = VirtualTimeLoop if self.virtual else TurnLoop
        try:
            anyio.run(self._limited, test, backend_options={"loop_factory": loop})
        except BaseExceptionGroup as group:  # from task groups of the test or its engine
            raise _only_one(group) from None

    async def _limited(self, test: Callable[[], Awaitable[None]]) -> None:
        with anyio.fail_after(self.limit_s):
            await test()


def check(test: Callable[[_S], Awaitable[None]]) -> Callable[[_S], None]:
    """Make an async method a test that `Suite.run` runs."""

    def run_check(self: _S) -> None:
        self.run(lambda: test(self))

    run_check.__name__ = test.__name__
    run_check.__qualname__ = test.__qualname__
    run_check.__doc__ = inspect.getdoc(test)
    return run_check


def _only_one(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error inside groups of one, so that pytest sees a skip or a plain failure."""
    inner: BaseException = group.exceptions[0] if len(group.exceptions) == 1 else group
    return _only_one(inner) if _is_group(inner) and inner is not group else inner


def _is_group(error: BaseException) -> TypeGuard[BaseExceptionGroup[BaseException]]:
    return isinstance(error, BaseExceptionGroup)


async def until(condition: Callable[[], bool]) -> None:
    """Poll a condition that has no event; the time limit of the test bounds the wait."""
    while not condition():  # noqa: ASYNC110  # a view has no event
        await anyio.sleep(0.001)


class Heartbeat:
    """Measures how long the event loop is blocked, by the wall clock even in virtual time."""

    def __init__(self) -> None:
        self.longest_pause_s = 0.0
        self.total_s = 0.0

    @property
    def blocked(self) -> bool:
        """Whether one pause took more than half of a measurement of at least 0.2 s.

        A share instead of a limit in seconds: a slow machine slows both, and a short measurement says
        nothing.
        """
        return self.total_s > 0.2 and self.longest_pause_s > 0.5 * self.total_s

    def __repr__(self) -> str:
        return f"<Heartbeat [{self.longest_pause_s:.3f} s of {self.total_s:.3f} s blocked]>"

    @asynccontextmanager
    async def beating(self) -> AsyncGenerator[Heartbeat]:
        """Measure while the `async with` block runs."""
        started = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._beat)
            await anyio.lowlevel.checkpoint()
            try:
                yield self
            finally:
                tasks.cancel_scope.cancel()
                self.total_s = time.perf_counter() - started

    async def _beat(self) -> None:
        last = time.perf_counter()
        while True:
            try:
                await anyio.sleep(0.001)
            finally:
                now = time.perf_counter()
                self.longest_pause_s = max(self.longest_pause_s, now - last)
                last = now
