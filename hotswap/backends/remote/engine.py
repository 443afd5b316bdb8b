"""`RemoteEngine`: an engine in another process, on this machine or another, behind a link.

    controller                                  host
    RemoteEngine("e0", open_link)               EngineHost(engine, store).serve(channel)
      load, unload, evict, ...     ->  calls      ->  the engine's verbs, with the host's own store
      stream                       ->  requests   ->  engine.stream
      tokens, status, errors       <-  frames     <-  all that came in a turn of the event loop

The engine belongs to its host and outlives its controllers. When a link ends, the host ends the streams,
takes back what is pending, and keeps the model; at the controller the engine is LOST until `unload` opens a
new link.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Self

import anyio
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus
from anyio.lowlevel import checkpoint

from hotswap.backends.remote.abilities import class_with
from hotswap.backends.remote.control import ControlLink
from hotswap.backends.remote.linked import LinkedEngine, count_read
from hotswap.backends.remote.status import RemoteStatus
from hotswap.backends.remote.values import card_fields
from hotswap.backends.transports import LinkOpener
from hotswap.backends.transports.link_errors import first_reason_in, reason_in
from hotswap.backends.transports.silence import check_silence
from hotswap.checks import check_callables, check_counts, check_positive_seconds, check_strings
from hotswap.engine import StatusListener
from hotswap.errors import ConfigError, InstanceError, InstanceLost, MigrationAborted
from hotswap.model import ModelCard
from hotswap.request import Request
from hotswap.store import WeightStore
from hotswap.stream import TokenStream
from hotswap.transport import Channel
from hotswap.view import EngineStatus, InstanceId, InstanceState

__all__ = ["RemoteEngine"]

log = logging.getLogger("hotswap")

_EMPTY, _LOADING, _SERVING, _DRAINING, _LOST = InstanceState
_GOODBYE_S = 1.0
_MOST_S = 1e15  # JSON has no infinity


class RemoteEngine(LinkedEngine):
    """An engine whose host is at the other end of a link; the host is an `EngineHost`.

    Once it is started it has the abilities of the host's engine (`SupportsAdapters`, `SupportsPreload`,
    `SupportsMigration`, `SupportsModelCheck`, `SupportsModelTrial`, `SupportsGrammars`, `SupportsKVLimit`,
    `SupportsResize`): its class is then a subclass with their methods. It starts with the model that the
    host's engine serves, if it serves one. Weights and adapters are read by the host, from its own store; the
    `store` of `load` and `preload` is told how much.

    When the link ends, or the host is silent for `silence_s`, the engine is LOST with the reason: its streams
    and calls raise `InstanceLost`. `unload` opens a new link, and empties the host's engine. If that engine
    alone is lost, and its own `unload` does not bring it back, it stays LOST until its host is restarted.

    Args:
        id: The instance's name; best the one that the host gives its engine, which errors name.
        open_link: Opens a link to the host; called at the start, and by `unload` after a loss.
        node: Where the engine is, for stores whose tiers belong to nodes; "" for what the host says.
        epoch: Of two controllers of one host, the one with the lower number is refused
            (`ControllerSuperseded`). The default is the time at which this object was made: the later one
            has the engine.
        silence_s: After so long without a frame of the host, the link ends. The host is told, and beats four
            times as often; its own limit for this end may be another.
        start_s: The time limit for opening a link, the start of a process behind `open_link` included.
    """

    def __init__(
        self,
        id: str,
        open_link: LinkOpener,
        *,
        node: str = "",
        epoch: int | None = None,
        silence_s: float = 8.0,
        start_s: float = 60.0,
    ) -> None:
        check_strings(ConfigError, id=id, node=node)
        check_callables(ConfigError, open_link=open_link)
        check_silence(silence_s)
        check_positive_seconds(ConfigError, start_s=start_s)
        self.epoch = time.time_ns() if epoch is None else epoch
        check_counts(ConfigError, 0, epoch=self.epoch)
        self.id = InstanceId(id)
        self._open_link, self._silence_s, self._start_s = open_link, silence_s, start_s
        self._status = RemoteStatus(self.id, node)
        self._base = type(self)
        self._link = None
        self._tasks = None

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        error: Exception | None = None
        try:
            async with anyio.create_task_group() as self._tasks:
                try:
                    await self._connect()
                    yield self
                except Exception as exc:
                    error = exc  # the task group would wrap it
                finally:
                    self._tasks.cancel_scope.cancel()
        finally:
            self._tasks = None
        if error is not None:
            raise error

    # ------------------------------------------------------------------ weights

    async def load(self, model: ModelCard, store: WeightStore) -> None:
        link = self._linked()
        self._give(store)
        with self._status.becoming(_LOADING, model.id, _EMPTY):
            answer = await link.call("load", model=card_fields(model))
        count_read(link, store, answer)

    async def unload(self) -> None:
        link = self._link
        if link is not None and not link.lost:
            try:
                await self._unload()
            except InstanceLost as exc:
                if not link.lost:  # the host's engine alone is lost, and cannot come back
                    if not await self._end_host(str(exc)):
                        raise
                    await link.ended.wait()
            else:
                return
        with self._status.becoming(_LOST, None, _LOST):  # not the model that the host has kept
            await self._connect()
        await self._unload()

    async def _unload(self) -> None:
        with self._status.becoming(_DRAINING, self.status().model, _SERVING, _DRAINING):
            await self._linked().call_at_once("unload")

    async def evict(self, *, deadline_s: float) -> int:
        link = self._linked()
        with self._status.becoming(_DRAINING, self.status().model, _SERVING):
            answer = await link.call("evict", deadline_s=min(deadline_s, _MOST_S))
        with link.reading():
            return answer.fields.size("num_evicted")

    # ------------------------------------------------------------------ requests

    def stream(self, request: Request) -> AbstractAsyncContextManager[TokenStream]:
        return self._linked().stream(request)

    # ------------------------------------------------------------------ status

    def status(self) -> EngineStatus:
        return self._status.shown

    def watch(self, listener: StatusListener) -> bool:
        return self._status.watch(listener)

    # ------------------------------------------------------------------ the link

    async def open_channel(self) -> Channel:
        return await self._open_link()

    async def _connect(self) -> None:
        """Open a link; it is kept by a task until it ends.

        Raises:
            InstanceLost: the host cannot be reached, or has a newer controller.
        """
        if self._tasks is None:
            raise InstanceError(f"Engine {self.id!r} cannot be used before `async with` has started it.")
        try:
            with anyio.fail_after(self._start_s):
                await self._tasks.start(self._keep_link, name=f"link to {self.id}")
        except TimeoutError as exc:
            raise InstanceLost(
                f"The host of engine {self.id!r} gave no link within {self._start_s:g} s; see what its "
                "process has printed, or give it a longer start_s."
            ) from exc
        except (MigrationAborted, OSError) as exc:
            reason = reason_in(exc) if isinstance(exc, MigrationAborted) else f"the system says {exc}"
            raise InstanceLost(f"The host of engine {self.id!r} gives no link: {reason}.") from exc

    async def _keep_link(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        async with await self._open_link() as channel:
            link = ControlLink(channel, self._status, self._silence_s)
            await link.open(self.epoch)
            self._link = link
            self.__class__ = class_with(self._base, link.abilities)
            try:
                task_status.started()
                await link.run()
            except* MigrationAborted as errors:
                self._lose(link, await self._reason_of_loss(first_reason_in(errors)))
            finally:
                if not link.lost:
                    await self._leave(link)

    async def _end_host(self, because: str) -> bool:
        """End the process of a host whose engine cannot come back; the next link starts another one.

        Returns whether it is this engine's to end.
        """
        await checkpoint()
        return False

    async def _reason_of_loss(self, because: str) -> str:
        """Return why the engine is lost, given why its link has ended."""
        return because

    def _lose(self, link: ControlLink, because: str) -> None:
        log.info("Engine %r is lost: %s.", self.id, because)  # a fleet warns, as of any engine
        link.lose(because)
        self._status.lose(because)

    async def _leave(self, link: ControlLink) -> None:
        link.lose("it was stopped")
        self._status.end()
        with anyio.move_on_after(_GOODBYE_S, shield=True), suppress(MigrationAborted):
            await link.leave()
