"""Starts and stops the engines of a fleet: a task for each keeps it started."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Self

import anyio
from anyio import AsyncContextManagerMixin

from hotswap.engine import Engine
from hotswap.errors import ConfigError, InstanceError
from hotswap.kv_store import KVStore
from hotswap.store import WeightStore
from hotswap.stray_cancellation import no_stray_cancellation
from hotswap.view import InstanceId

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

__all__ = ["EngineSupervisor", "enter"]

log = logging.getLogger("hotswap")


async def enter(stack: AsyncExitStack, part: Engine | WeightStore | KVStore, what: str) -> None:
    """Enter a part of a fleet, which is left with the stack.

    Raises:
        ConfigError: it has been entered already, and not left.
    """
    try:
        await stack.enter_async_context(part)
    except RuntimeError as exc:
        if "already been entered" not in str(exc):  # as anyio says it
            raise
        raise ConfigError(
            f"{what} is in use already, by another fleet or an `async with`; give each fleet parts of its "
            "own, which it enters itself."
        ) from exc


class EngineSupervisor(AsyncContextManagerMixin):
    """Starts and stops engines at any time; leaving it stops those that are left.

    Each engine is entered and left by a task of its own, since one task must do both.
    """

    def __init__(self) -> None:
        self._engines: dict[InstanceId, _Started] = {}
        self._tasks: TaskGroup | None = None

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with anyio.create_task_group() as self._tasks:
            try:
                yield self
            finally:
                for started in self._engines.values():
                    started.stop.set()

    async def start(self, *engines: Engine) -> None:
        """Start engines at the same time; the first error of one is raised here.

        An error or a cancellation stops all of them again.
        """
        assert self._tasks is not None, "only an open fleet starts engines"
        start = _Start(len(engines))
        all_started = [_Started(engine, start) for engine in engines]
        for started in all_started:
            self._engines[started.engine.id] = started
            self._tasks.start_soon(self._keep, started, name=f"engine {started.engine.id}")
        try:
            await start.ended.wait()
            if start.error is not None:
                raise start.error
        except BaseException:
            for started in all_started:
                started.give_up()
            with anyio.CancelScope(shield=True):
                for started in all_started:
                    await started.stopped.wait()
            raise

    async def stop(self, engine: InstanceId) -> None:
        """Stop an engine that was started here; others stay as they are.

        Raises:
            InstanceError: the engine failed as it stopped; its task has ended all the same.
        """
        if (started := self._engines.get(engine)) is not None:
            started.give_up()
            await started.stopped.wait()
            error, started.error = started.error, None
            if error is not None:
                raise InstanceError(
                    f"Engine {engine!r} failed as it stopped and has left the fleet; see whether it still "
                    f"holds its device: {type(error).__name__}: {error}"
                ) from error

    async def _keep(self, started: _Started) -> None:
        try:
            with started.scope, no_stray_cancellation(f"Engine {started.engine.id!r}"):
                async with AsyncExitStack() as stack:
                    await enter(stack, started.engine, f"Engine {started.engine.id!r}")
                    started.is_ready = True
                    started.start.one_ended()
                    with anyio.CancelScope(shield=True):  # requests end first, whatever ends the fleet
                        await started.stop.wait()
        except Exception as exc:
            started.error = exc
            if started.is_ready:
                log.warning("Engine %r failed as it stopped.", started.engine.id, exc_info=exc)
                if not started.given_up:  # the fleet closes, and raises it
                    raise
        finally:
            del self._engines[started.engine.id]
            if not started.is_ready:
                started.start.one_ended(started.error)
            started.stopped.set()


class _Start:
    """Engines that start at the same time; it has `ended` once all are ready, or one has failed."""

    def __init__(self, num_starting: int) -> None:
        self.error: Exception | None = None
        self.ended = anyio.Event()
        self._num_starting = num_starting
        if not num_starting:
            self.ended.set()

    def one_ended(self, error: Exception | None = None) -> None:
        """Note that one of them is ready, or has failed or was cancelled."""
        self._num_starting -= 1
        self.error = self.error or error
        if error is not None or not self._num_starting:
            self.ended.set()


class _Started:
    """An engine on its way to be started, or started."""

    def __init__(self, engine: Engine, start: _Start) -> None:
        self.engine, self.start = engine, start
        self.error: Exception | None = None
        self.is_ready = False
        self.given_up = False  # it is stopped alone, not with the fleet
        self.scope = anyio.CancelScope()
        self.stop, self.stopped = anyio.Event(), anyio.Event()

    def give_up(self) -> None:
        """Stop it, or its start, while the others stay as they are."""
        self.given_up = True
        self.stop.set()
        if not self.is_ready:
            self.scope.cancel()
