"""Saving the KV blocks of an instance: full blocks while requests decode, the rest once they have stopped."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass
from typing import Never

import anyio

from hotswap import telemetry as tm
from hotswap.kv_store import KVPrefix, KVPut
from hotswap.loop_time import current_time
from hotswap.migration import CachedKV, KVSource, SupportsKVListing, SupportsMigration
from hotswap.request import RequestId
from hotswap.runtime.active import ActiveRequest
from hotswap.runtime.instance import Instance
from hotswap.runtime.kv_context import AHEAD, CHUNK_BYTES, KVContext, logged

__all__ = ["Save", "Saved"]

# While requests decode their full blocks are looked at so often.
AHEAD_S = 0.5
# What blocks of requests that have ended are worth beside those of requests that are known to go on.
ENDED_SHARE = 0.25


@dataclass(slots=True)
class Saved:
    """What was saved in a swap or a drain: whole requests, tokens in blocks that were copied, and bytes."""

    num_requests: int = 0
    num_tokens: int = 0
    num_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Stopped:
    """A request that has stopped, with its place in the store once there is a plan."""

    source: KVSource
    prefix: KVPrefix
    put: KVPut | None = None

    @property
    def is_saved(self) -> bool:
        """Whether all that it has fits in the store, once it is copied."""
        return self.put is not None and 0 < self.put.num_tokens == len(self.prefix.tokens)


class Save:
    """The saving of one instance; what is put stays leased until its end, or requests evict each other.

    Args:
        context: The fleet's store.
        instance: The instance.
        saved: Counts what is saved.
        leases: Has the puts.
        limit_s: How long saving may take once requests have stopped.

    Attributes:
        released: The requests that the engine has evicted after they were saved.
    """

    def __init__(
        self, context: KVContext, instance: Instance, saved: Saved, leases: ExitStack, *, limit_s: float
    ) -> None:
        self._context, self._instance, self._saved = context, instance, saved
        self._leases, self._limit_s = leases, limit_s
        self.released: list[RequestId] = []
        self._stopped: list[_Stopped] = []
        self._num_saved: dict[RequestId, int] = {}  # full blocks, in tokens
        self._num_stopping = 0
        self._planned, self._copying = anyio.Event(), anyio.Lock()

    async def until_stopped(self, deadline_s: float, waiting: anyio.CancelScope) -> None:
        """Save full blocks until the deadline, then stop and save all; cancel `waiting` for what is left."""
        try:
            with logged("saved", self._instance.id):
                with anyio.move_on_after(deadline_s):
                    if deadline_s > 0:
                        await self.ahead(deadline_s / 8)
                with anyio.move_on_after(self._limit_s):
                    await self.stop_all()
        finally:
            waiting.cancel()

    async def ahead(self, pause_s: float = AHEAD_S) -> Never:
        """Save the full blocks of requests that decode, and what ended ones left, until it is cancelled."""
        await self.full_blocks()
        await self.ended()
        while True:
            await anyio.sleep(pause_s)
            await self.full_blocks()

    async def full_blocks(self) -> None:
        """Save the full blocks of requests that decode, once."""
        for active in self._running():
            with logged(AHEAD, active.request.id):
                self._num_saved[active.request.id] = await self._copy_full(
                    active, self._num_saved.get(active.request.id, 0)
                )

    async def ended(self, *, common: bool = False) -> None:
        """Save what ended requests left in the engine's prefix cache, the latest first.

        With `common` that alone which other fleets find.
        """
        engine = self._instance.engine
        if not isinstance(engine, SupportsKVListing):
            return
        with logged("listed", self._instance.id):
            for cached in await engine.cached_kv():
                if common and not self._context.lookup.is_common(cached.layout):
                    continue
                with logged("saved", self._instance.id):
                    prefix = self._context.lookup.prefix(cached.layout, cached.tokens)
                    await self._copy(cached, self._put(prefix, share=ENDED_SHARE))

    async def stop_all(self) -> None:
        """Stop all requests at one step boundary, plan what is kept, save it, and release them."""
        self._num_stopping = len(running := self._running())
        async with anyio.create_task_group() as tasks:
            for active in running:
                tasks.start_soon(self._stop_and_save, active)

    def _running(self) -> tuple[ActiveRequest, ...]:
        return self._context.state.running_on(self._instance.id)

    async def _copy_full(self, active: ActiveRequest, num_saved: int) -> int:
        """Copy the full blocks of a request beyond the tokens that are saved; return how many now are."""
        request = active.remaining
        if request.num_tokens < num_saved + self._instance.status().kv_block_tokens:
            return num_saved
        async with self._export(active) as source:
            block_tokens, tokens = source.layout.block_tokens, request.tokens
            num_full = min(await source.num_tokens(), len(tokens)) // block_tokens * block_tokens
            prefix = self._context.lookup.prefix(source.layout, tokens[:num_full])
            await self._copy(source, put := self._put(prefix))
            active.stored_tokens = put.num_tokens
            return num_full

    async def _stop_and_save(self, active: ActiveRequest) -> None:
        with logged("saved", active.request.id), ExitStack() as arrival:
            arrival.push(self._note_stopped)  # also if it cannot stop
            async with self._export(active) as source:
                stopped = await source.stop()
                prefix = self._context.lookup.prefix(source.layout, stopped.tokens[: stopped.num_computed])
                entry = _Stopped(source, prefix)
                self._stopped.append(entry)
                arrival.close()
                await self._planned.wait()
                async with self._copying:
                    if entry.put is not None:
                        entry.put.release()  # what others have stored meanwhile is not copied again
                        entry.put = self._put(prefix)
                        started_s, before = current_time(), self._saved.num_bytes
                        await self._copy(source, entry.put)
                        seconds = current_time() - started_s
                        self._context.state.times.learn_save(self._saved.num_bytes - before, seconds)
                await source.release()
                self._saved.num_requests += entry.is_saved
                self.released.append(active.request.id)

    def _note_stopped(self, _: object, error: BaseException | None, traceback: object) -> None:
        """Once all have stopped, make room for them: the longest first, before anything is copied."""
        if error is not None and not isinstance(error, Exception):
            return  # after a cancellation none is copied, and blocks would be evicted for nothing
        self._num_stopping -= 1
        if self._num_stopping == 0:
            self._stopped.sort(key=lambda entry: len(entry.prefix.tokens), reverse=True)
            for entry in self._stopped:
                with logged("planned", self._instance.id):
                    entry.put = self._put(entry.prefix)
            self._planned.set()

    def _export(self, active: ActiveRequest) -> AbstractAsyncContextManager[KVSource]:
        engine = self._instance.engine
        assert isinstance(engine, SupportsMigration), "it was asked before"
        return engine.export_kv(active.request.id)

    def _put(self, prefix: KVPrefix, *, share: float = 1.0) -> KVPut:
        """Make room for a prefix; `share` is how likely it is that it is asked for."""
        times, layout = self._context.state.times, prefix.layout
        size_bytes = prefix.num_blocks * layout.block_bytes + layout.state_bytes
        prefill_s = times.compute_s(layout.model, len(prefix.tokens)) * share
        copy_s = times.save_s(size_bytes) + times.restore_s(size_bytes)
        store = self._context.store.near(self._instance.engine)
        put = store.put(prefix, prefill_s=prefill_s, copy_s=copy_s)
        self._leases.callback(self._end, put)
        return put

    def _end(self, put: KVPut) -> None:
        with logged("released", self._instance.id):
            put.release()

    async def _copy(self, source: KVSource | CachedKV, put: KVPut) -> None:
        """Copy the blocks for which a put has room, and count them."""
        layout = source.layout
        step = max(1, CHUNK_BYTES // max(1, layout.block_bytes)) * layout.block_tokens
        labels = {tm.MODEL: layout.model, tm.KV_TIER: self._context.lookup.tier}
        if not (missing := range(put.first_block * layout.block_tokens, put.num_tokens, step)):
            return
        async with put.copying_from(source) as copy:
            for at in missing:
                num_tokens = min(step, put.num_tokens - at)
                num_bytes = await copy(at // layout.block_tokens, num_tokens)
                num_bytes = num_bytes or -(-num_tokens // layout.block_tokens) * layout.block_bytes
                self._saved.num_tokens += num_tokens
                self._saved.num_bytes += num_bytes
                self._context.telemetry.kv_saved.add(num_bytes, labels)
