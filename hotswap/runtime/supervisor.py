"""Starts and stops the engines of a fleet: a task for each keeps it started."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Self

import anyio
from anyio import AsyncContextManagerMixin

from hotswap.engine import Engine
from hotswap.errors import ConfigError, InstanceError
from hotswap.kv_store import KVStore
from hotswap.store import WeightStore
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

    async def start_all(self, engines: Iterable[Engine]) -> None:
        """Start engines at the same time. An error or a cancellation stops all of them again."""
        first: Exception | None = None

        async def start(engine: Engine) -> None:
            nonlocal first
            try:
                await self.start(engine)
            except Exception as exc:
                first = first or exc
                starting.cancel_scope.cancel()

        async with anyio.create_task_group() as starting:
            for engine in engines:
                starting.start_soon(start, engine)
        if first is not None:
            raise first

    async def start(self, engine: Engine) -> None:
        """Start an engine; what it raises then is raised here. A cancellation stops it again."""
        assert self._tasks is not None, "only an open fleet starts engines"
        started = self._engines[engine.id] = _Started(engine)
        self._tasks.start_soon(self._keep, started, name=f"engine {engine.id}")
        try:
            await started.ready.wait()
        except BaseException:
            started.given_up = True
            started.stop.set()
            started.scope.cancel()
            with anyio.CancelScope(shield=True):
                await started.stopped.wait()
            raise
        if started.error is not None:
            raise started.error

    async def stop(self, engine: InstanceId) -> None:
        """Stop an engine that was started here; others stay as they are.

        Raises:
            InstanceError: the engine failed as it stopped; its task has ended all the same.
        """
        if (started := self._engines.get(engine)) is not None:
            started.given_up = True
            started.stop.set()
            await started.stopped.wait()
            error, started.error = started.error, None
            if error is not None:
                raise InstanceError(
                    f"Engine {engine!r} failed as it stopped and has left the fleet; see whether it still "
                    f"holds its device: {type(error).__name__}: {error}"
                ) from error

    async def _keep(self, started: _Started) -> None:
        is_ready = False
        try:
            with started.scope:
                async with AsyncExitStack() as stack:
                    await enter(stack, started.engine, f"Engine {started.engine.id!r}")
                    is_ready = True
                    started.ready.set()
                    with anyio.CancelScope(shield=True):  # requests end first, whatever ends the fleet
                        await started.stop.wait()
        except Exception as exc:
            if is_ready:
                log.warning("Engine %r failed as it stopped.", started.engine.id, exc_info=exc)
                if not started.given_up:  # the fleet closes, and raises it
                    raise
            started.error = exc
        finally:
            del self._engines[started.engine.id]
            started.ready.set()
            started.stopped.set()


class _Started:
    """An engine on its way to be started, or started."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.error: Exception | None = None
        self.given_up = False  # it is stopped alone, not with the fleet
        self.scope = anyio.CancelScope()
        self.ready, self.stop, self.stopped = anyio.Event(), anyio.Event(), anyio.Event()
