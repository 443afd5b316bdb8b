"""The life of an engine whose models live in processes of another library, which may end at any time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint_if_cancelled

from hotswap.backends.life import Life
from hotswap.backends.notifier import StatusNotifier
from hotswap.engine import Engine, StatusListener
from hotswap.errors import HotswapError, InstanceError, RequestEvicted
from hotswap.model import ModelCard
from hotswap.store import WeightStore
from hotswap.view import InstanceId, InstanceState

__all__ = ["ExternalEngine"]

_EMPTY, _LOADING, _SERVING, _DRAINING = (
    InstanceState.EMPTY,
    InstanceState.LOADING,
    InstanceState.SERVING,
    InstanceState.DRAINING,
)


class ExternalEngine(Engine):
    """Loads, unloads, evicts and is lost as `Engine` says; subclasses have the processes and the streams.

    Args:
        id: The instance's name.
    """

    def __init__(self, id: str) -> None:
        self.id = InstanceId(id)
        self._notifier = StatusNotifier()
        self._life = Life(self.id, self._notifier)
        self._tasks: TaskGroup | None = None

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            self._life.has_begun = True
            try:
                yield self
            finally:
                self._evict_all("It was stopped")
                self._life.has_begun = False
                with anyio.CancelScope(shield=True):
                    await self._release()
                    await self._close()
                self._life.state = _EMPTY
                tasks.cancel_scope.cancel()

    async def load(self, model: ModelCard, store: WeightStore) -> None:
        self._life.require(_EMPTY, "load")
        self._life.state = _LOADING
        try:
            processes = await self._life.unless_lost(self._start(model, store))
        except BaseException:
            if self._life.state is _LOADING:
                self._life.state = _EMPTY
            raise
        self._serve(model, processes)
        self._life.state = _SERVING

    async def unload(self) -> None:
        if self._life.state is _LOADING:
            raise InstanceError(f"Engine {self.id!r} is LOADING; cancel the load instead of unloading it.")
        with anyio.CancelScope(shield=True):
            if self._life.state is not _EMPTY:
                self._evict_all("The model was unloaded")
                if not self._life.is_lost:
                    self._life.state = _DRAINING
                try:
                    await self._release()
                finally:
                    self._life.state = _EMPTY
        await checkpoint_if_cancelled()

    async def evict(self, *, deadline_s: float) -> int:
        self._life.require(_SERVING, "evict")
        self._life.state = _DRAINING
        try:
            await self._life.unless_lost(self._wait_until_drained(deadline_s))
        except BaseException:
            if self._life.state is _DRAINING:
                self._life.state = _SERVING
            raise
        return self._evict_all(f"A deadline of {deadline_s} s passed")

    def lose(self, reason: str = "it was dropped on purpose") -> None:
        """Kill its processes: streams and pending verbs raise `InstanceLost`.

        Call it from the event loop. `unload` brings the engine back EMPTY.
        """
        self._kill()
        self._lose(reason)

    def watch(self, listener: StatusListener) -> bool:
        return self._notifier.watch(listener)

    # ------------------------------------------------------------------ of a subclass

    @abstractmethod
    async def _start(self, model: ModelCard, store: WeightStore) -> Any:
        """Return processes with a model; an error or a cancellation leaves none behind."""

    @abstractmethod
    def _serve(self, model: ModelCard, processes: Any) -> None:
        """Take them as those that serve."""

    @abstractmethod
    async def _release(self) -> None:
        """End what serves, or give it back; at once if there is nothing. Cannot be interrupted."""

    async def _close(self) -> None:
        """Release what outlasts a model; called last. Cannot be interrupted."""

    @abstractmethod
    def _kill(self) -> None:
        """End the processes at once, if there are any."""

    @abstractmethod
    async def _wait_until_drained(self, deadline_s: float) -> None:
        """Return when no stream is left, or the deadline has passed."""

    @abstractmethod
    def _close_streams(self, error: Callable[[], HotswapError]) -> int:
        """End every stream by an error of its own, and return how many they were."""

    # ------------------------------------------------------------------ for a subclass

    def _evict_all(self, why: str) -> int:
        return self._close_streams(
            lambda: RequestEvicted(f"Engine {self.id!r} gave its requests back. {why}; they go on elsewhere.")
        )

    def _lose(self, reason: str) -> None:
        """Become LOST, as when the processes have ended by themselves."""
        if self._life.is_lost or not self._life.has_begun:
            return
        self._life.lose(reason, None)
        self._close_streams(self._life.lost)

    @property
    def _running(self) -> TaskGroup:
        assert self._tasks is not None, "only an engine that was entered gets here"
        return self._tasks
