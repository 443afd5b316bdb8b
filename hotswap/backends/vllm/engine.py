"""`VllmEngine`: an instance whose core is vLLM, in a process of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from hotswap.backends.life import Life
from hotswap.backends.servable import check_servable
from hotswap.backends.stores.unbroken import unbroken
from hotswap.backends.vllm.adapters import Adapters, Held
from hotswap.backends.vllm.core import Core, CorePool, start
from hotswap.backends.vllm.settings import Settings, StartMethod, architecture_of
from hotswap.backends.vllm.staging import Staged, stage
from hotswap.backends.vllm.streams import Stream, Streams, sampling_params
from hotswap.backends.vllm.trial import try_resumption
from hotswap.engine import Engine
from hotswap.errors import InstanceError, OutOfMemory, RequestEvicted
from hotswap.model import Adapter, Manifest, ModelCard
from hotswap.request import AdapterId, Request
from hotswap.store import WeightStore
from hotswap.stream import TokenStream
from hotswap.view import InstanceId, InstanceState, InstanceView

__all__ = ["VllmEngine"]

_EMPTY, _LOADING, _SERVING, _DRAINING = (
    InstanceState.EMPTY,
    InstanceState.LOADING,
    InstanceState.SERVING,
    InstanceState.DRAINING,
)


class VllmEngine(Engine):
    """An instance that serves through vLLM: production kernels, batching and parallelism, one core at a time.

    A core is started by the first load, which takes seconds. The next model takes the core over in place if
    its architecture is the same; any other has a new core. Text and stop strings are the fleet's, so requests
    move between this engine and others in the middle of a word. Requests that come from elsewhere go on as if
    they had begun here, seeds and penalties included; `resumes_exactly` tells whether this vLLM can do that.

    On Linux a core ends with this process, however that ends. Start methods other than `"fork"` import the
    program's main module anew, which needs its `if __name__ == "__main__":`.

    Args:
        id: The instance's name.
        kv_bytes: KV memory.
        kv_block_tokens: Tokens of a block; vLLM's choice if `None`.
        dtype: What is computed with; `"auto"` takes the checkpoint's.
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        max_requests: Most requests of a batch.
        token_budget: Most tokens of a step, decodes and chunks of prefill together; vLLM's choice if `None`.
        prefix_reuse: Whether requests that begin alike share KV blocks.
        eager: Whether to leave out compiled graphs, which take long to make.
        max_adapters: How many adapters it may hold.
        max_adapter_rank: The largest of them.
        memory_bytes: What weights and KV blocks may take; the machine's memory if `None`.
        cores: Where cores wait between models; one of the engine's own, of one core, if `None`.
        start: How a core's process is made: `"fork"` (quick, safe while this process has computed with
            one thread only) or `"spawn"`; chosen by that if `None`.
        arguments: More arguments for vLLM's `AsyncEngineArgs`.

    Raises:
        ConfigError: an argument is out of range, or the engine's own to decide.
    """

    def __init__(
        self,
        id: str,
        *,
        kv_bytes: int | str = "1 GiB",
        kv_block_tokens: int | None = None,
        dtype: str = "auto",
        tp: int = 1,
        pp: int = 1,
        max_requests: int = 64,
        token_budget: int | None = None,
        prefix_reuse: bool = True,
        eager: bool = True,
        max_adapters: int = 0,
        max_adapter_rank: int = 16,
        memory_bytes: int | str | None = None,
        cores: CorePool | None = None,
        start: StartMethod | None = None,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        self.id = InstanceId(id)
        self._settings = Settings(
            kv_bytes=kv_bytes,
            kv_block_tokens=kv_block_tokens,
            dtype=dtype,
            tp=tp,
            pp=pp,
            max_requests=max_requests,
            token_budget=token_budget,
            prefix_reuse=prefix_reuse,
            eager=eager,
            max_adapters=max_adapters,
            max_adapter_rank=max_adapter_rank,
            memory_bytes=memory_bytes,
            start=start,
            arguments=arguments or {},
        )
        self._life = Life(self.id)
        self._cores = cores if cores is not None else CorePool()
        self._owns_cores = cores is None
        self._core: Core | None = None
        self._ready: Core | None = None  # of a load under way
        self._card: ModelCard | None = None
        self._context = 0
        self._staged: Staged | None = None
        self._is_staging = False
        self._streams = Streams()
        self._adapters = Adapters(self.id, most=max_adapters, max_rank=max_adapter_rank)
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
                    await self._drop_staged()
                    if self._owns_cores:
                        await self._cores.close()
                self._life.state = _EMPTY
                tasks.cancel_scope.cancel()

    # ------------------------------------------------------------------ weights

    async def load(self, model: ModelCard, store: WeightStore) -> None:
        self._life.require(_EMPTY, "load")
        self._life.state = _LOADING
        try:
            core = await self._life.unless_lost(self._bring(model, store))
        except BaseException:
            if self._life.state is _LOADING:
                self._life.state = _EMPTY
            raise
        self._serve(model, core)

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

    def can_preload(self, model: ModelCard) -> bool:
        staged_bytes = self._staged.size_bytes if self._staged else 0
        return self._weight_bytes - staged_bytes + model.weight_bytes <= self._settings.total_bytes

    async def preload(self, model: ModelCard, store: WeightStore) -> None:
        if self._staged is not None and self._staged.card == model:
            return await checkpoint()
        self._life.require(_SERVING, "preload")
        if self._is_staging:
            raise InstanceError(f"Engine {self.id!r} is preloading already; cancel that first.")
        await self._drop_staged()
        self._is_staging = True
        try:
            self._staged = await self._life.unless_lost(self._stage(model, store))
        finally:
            self._is_staging = False
        return None

    async def drop_preload(self) -> None:
        await checkpoint()
        await self._drop_staged()

    # ------------------------------------------------------------------ adapters

    async def load_adapter(self, adapter: Adapter) -> None:
        self._life.require(_SERVING, "load an adapter")
        await self._life.unless_lost(self._adapters.load(adapter))

    async def drop_adapter(self, adapter: AdapterId) -> None:
        await self._adapters.drop(adapter)

    # ------------------------------------------------------------------ requests

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[TokenStream]:
        stream, core, adapter = self._admit(request)
        try:
            yield stream.tokens
        finally:
            if adapter is not None:
                adapter.num_users -= 1
            self._streams.leave(self._running, stream, core)

    async def evict(self, *, deadline_s: float) -> int:
        self._life.require(_SERVING, "evict")
        self._life.state = _DRAINING
        try:
            await self._life.unless_lost(self._streams.wait_until_drained(deadline_s))
        except BaseException:
            if self._life.state is _DRAINING:
                self._life.state = _SERVING
            raise
        return self._evict_all(f"A deadline of {deadline_s} s passed")

    # ------------------------------------------------------------------ faults

    def lose(self, reason: str = "it was dropped on purpose") -> None:
        """Kill the core's processes: streams and pending verbs raise `InstanceLost`.

        Call it from the event loop. `unload` brings the engine back EMPTY.
        """
        if self._core is not None:
            self._core.kill()
        self._lose(reason)

    # ------------------------------------------------------------------ view

    def view(self) -> InstanceView:
        core = None if self._life.is_lost else self._core
        begun = self._streams.num_begun
        running = max(begun, min(core.stats.num_running, len(self._streams))) if core else 0
        num_blocks = core.num_blocks if core else 0
        block_tokens = core.block_tokens if core else 16
        return InstanceView(
            id=self.id,
            state=self._life.state,
            model=self._card.id if core and self._card else None,
            num_running=running,
            num_waiting=len(self._streams) - running,
            max_requests=self._settings.max_requests,
            num_kv_blocks=num_blocks,
            num_free_kv_blocks=max(0, num_blocks - self._streams.num_blocks(block_tokens)),
            kv_block_tokens=block_tokens,
            memory_bytes=self._settings.total_bytes,
            weight_bytes=self._weight_bytes,
            adapters=() if self._life.is_lost else self._adapters.names,
            max_adapters=self._settings.max_adapters,
            preloaded=self._staged.card.id if self._staged else None,
        )

    @property
    def num_preempted(self) -> int:
        """How often a request gave up its KV blocks for another since the core was started."""
        return self._core.stats.num_preempted if self._core else 0

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that are still to be computed."""
        return int(self._core.llm.get_num_queued_tokens()) if self._core and not self._core.is_dead else 0

    @property
    def resumes_exactly(self) -> bool:
        """Whether requests go on here as if they had begun here, whatever their sampling; true when EMPTY."""
        return self._core.resumes if self._core else True

    # ------------------------------------------------------------------ loading

    async def _bring(self, model: ModelCard, store: WeightStore) -> Core:
        await checkpoint()
        staged, self._staged = self._staged, None
        if staged is not None and staged.card.id != model.id:
            await staged.release()
            staged = None
        if staged is None:
            staged = await self._stage(model, store)
        try:
            await unbroken(partial(self._make_ready, staged))
            self._life.refuse_if_lost()
            await checkpoint_if_cancelled()
        except BaseException:
            await unbroken(self._give_ready_back)
            raise
        finally:
            await staged.release()
        core, self._ready = self._ready, None
        assert core is not None, "it was made ready"
        return core

    async def _stage(self, model: ModelCard, store: WeightStore) -> Staged:
        manifest = await store.manifest(model.id)
        if manifest.buffer_bytes + self._weight_bytes > self._settings.total_bytes:
            raise OutOfMemory(
                f"Model {model.id!r} takes {manifest.buffer_bytes:,} bytes, and engine {self.id!r} has "
                f"{self._settings.total_bytes - self._weight_bytes:,} left; use a larger one."
            )
        return await stage(store, model, manifest)

    async def _make_ready(self, staged: Staged) -> None:
        """Have a core with the model's weights: one that waits, or a new one. Is not to be interrupted."""
        weights = _fingerprint(staged.manifest)
        core = self._cores.take(self._settings, architecture_of(staged.manifest.config), weights)
        if core is None:
            if self._owns_cores:  # whose memory this one takes
                await self._cores.close()
            core = await start(self._settings, staged)
            prepared = try_resumption(core, staged.card, weights)
        else:
            prepared = core.reload(staged, weights)
        try:
            await prepared
        except BaseException:
            await core.stop()
            raise
        self._ready = core

    async def _give_ready_back(self) -> None:
        core, self._ready = self._ready, None
        if core is not None:
            await self._cores.give(self._settings, core)

    def _serve(self, model: ModelCard, core: Core) -> None:
        self._core, self._card = core, model
        self._context = min(core.context, model.max_context_tokens)
        self._adapters.serve(model.id, core)
        core.died = partial(self._note_death, core)
        self._life.state = _SERVING

    def _note_death(self, core: Core) -> None:
        if self._core is core:
            self._lose("vLLM's core process has ended")

    async def _release(self) -> None:
        """Let go of the core. Cannot be interrupted."""
        core = self._core
        if core is None:
            return
        await self._adapters.forget()
        self._core = self._card = None
        if core.is_dead:
            await core.stop()
        else:
            await self._cores.give(self._settings, core)
        await self._streams.wait_until_gone()

    async def _drop_staged(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            await staged.release()

    # ------------------------------------------------------------------ streams

    def _admit(self, request: Request) -> tuple[Stream, Core, Held | None]:
        self._life.refuse_if_lost()
        card, core = self._card, self._core
        if card is None or core is None or self._life.state is not _SERVING or card.id != request.model:
            raise RequestEvicted(
                f"Engine {self.id!r} is {self._life.state} with model {card.id if card else None!r} and "
                f"admits no request for {request.model!r}; ask another."
            )
        check_servable(
            request,
            card.id,
            context=self._context,
            vocabulary=core.vocabulary,
            kv_tokens=core.num_blocks * core.block_tokens,
        )
        adapter = self._adapters.use(request.adapter)
        stream = self._streams.open(request)
        params = sampling_params(request, card, self._context, resumes=core.resumes)
        self._streams.start(self._running, stream, core, params, adapter.lora if adapter else None)
        return stream, core, adapter

    def _evict_all(self, why: str) -> int:
        return self._streams.close_all(
            self._running,
            self._core,
            lambda: RequestEvicted(
                f"Engine {self.id!r} gave its requests back. {why}; they go on elsewhere."
            ),
        )

    def _lose(self, reason: str) -> None:
        if self._life.is_lost or not self._life.has_begun:
            return
        self._life.lose(reason, None)
        self._streams.close_all(self._running, None, self._life.lost)

    @property
    def _running(self) -> TaskGroup:
        assert self._tasks is not None, "only an engine that was entered gets here"
        return self._tasks

    @property
    def _weight_bytes(self) -> int:
        loaded = self._card.weight_bytes if self._card and not self._life.is_lost else 0
        return loaded + (self._staged.size_bytes if self._staged else 0)


def _fingerprint(manifest: Manifest) -> str:
    """The same for the same weights of the same model, where the store takes checksums."""
    sums = " ".join(shard.checksum for shard in manifest.shards_of(0))
    return f"{manifest.model} {sums}"
