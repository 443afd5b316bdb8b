"""`VllmEngine`: an instance whose core is vLLM, in a process of its own."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from anyio.lowlevel import checkpoint

from hotswap.backends.adapter_accounting import Held
from hotswap.backends.external import ExternalEngine
from hotswap.backends.grammar_check import GrammarCheck
from hotswap.backends.layouts import require_tensors
from hotswap.backends.notifier import Observed, StatusNotifier
from hotswap.backends.servable import check_servable
from hotswap.backends.vllm.adapters import Adapters
from hotswap.backends.vllm.core import Core, CorePool
from hotswap.backends.vllm.kernels import KernelCheck
from hotswap.backends.vllm.loading import Loader
from hotswap.backends.vllm.migration import (
    MigrationContext,
    VllmKVSink,
    VllmKVSource,
    aborted,
    lent_sink,
    lent_source,
    list_cached,
)
from hotswap.backends.vllm.params import check_prompt_rows, no_grammar, sampling_params, unsupported
from hotswap.backends.vllm.settings import Settings, StartMethod
from hotswap.backends.vllm.streams import Stream, Streams
from hotswap.errors import HotswapError, RequestEvicted
from hotswap.migration import CachedKV, KVSink, KVSource
from hotswap.model import Adapter, ModelCard
from hotswap.request import AdapterId, ModelId, Request, RequestId
from hotswap.store import WeightStore
from hotswap.stream import TokenStream
from hotswap.view import EngineStatus, InstanceState

__all__ = ["VllmEngine"]

log = logging.getLogger("hotswap.vllm")

_SERVING = InstanceState.SERVING


class VllmEngine(ExternalEngine):
    """An instance that serves through vLLM: production kernels, batching and parallelism, one core at a time.

    The first load starts a core, which takes seconds. The next model replaces the weights of the core in
    place if its architecture is the same; otherwise a new core is started. The fleet makes text and matches
    stop strings, so requests can move between this engine and others in the middle of a word. Requests that
    moved here continue as if they had begun here, seeds and penalties included; `resumes_exactly` tells
    whether the installed vLLM can do that.

    On Linux a core ends with this process, even if that is killed. Start methods other than `"fork"` import
    the program's main module anew, which needs its `if __name__ == "__main__":`.

    Args:
        id: The instance's name.
        kv_bytes: KV memory.
        kv_block_tokens: Tokens of a block; vLLM's choice if `None`.
        dtype: What is computed with; `"auto"` takes the checkpoint's.
        device: The GPU of the first rank, such as `"cuda:1"`; further ranks have those that follow. `None` is
            the first, or the CPU of a machine without.
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        max_requests: Most requests of a batch.
        token_budget: Most tokens of a step, decodes and chunks of prefill together; vLLM's choice if `None`.
        prefix_reuse: Whether requests that begin alike share KV blocks.
        eager: Whether to leave out compiled graphs, which take long to make.
        max_adapters: How many adapters it may hold.
        max_adapter_rank: The largest of them.
        memory_bytes: What weights and KV blocks may take, all ranks together; engines that share a GPU need
            one. `None` is 0.92 of the GPUs' memory, as for vLLM, and on a CPU the machine's.
        cores: The pool of idle cores; a pool of the engine's own, of one core, if `None`.
        start: The start method of a core's process: `"fork"` (fast, safe while this process has computed with
            one thread only) or `"spawn"`; `None` takes `"fork"` where it is safe.
        arguments: More arguments for vLLM's `AsyncEngineArgs`.

    Raises:
        ConfigError: an argument is out of range, or the engine's own to decide.
    """

    _core = Observed[Core | None](lambda engine: engine._notifier.state_changed())

    def __init__(
        self,
        id: str,
        *,
        kv_bytes: int | str = "1 GiB",
        kv_block_tokens: int | None = None,
        dtype: str = "auto",
        device: str | None = None,
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
        super().__init__(id)
        self._settings = Settings(
            kv_bytes=kv_bytes,
            kv_block_tokens=kv_block_tokens,
            dtype=dtype,
            device=device,
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
        self._grammars = GrammarCheck()
        self._kernels = KernelCheck(self._settings)
        self._loader = Loader(self.id, self._settings, self._life, cores)
        self._core = None
        self._card: ModelCard | None = None
        self._context = 0
        self._kv_tokens = dict[ModelId, int]()  # of models that vLLM has loaded, since it tells then
        self._streams = Streams(self._notifier)
        self._sinks: list[VllmKVSink] = []
        self._has_said_that_tokens_move = False
        self._adapters = Adapters(
            self.id, most=max_adapters, max_rank=max_adapter_rank, notifier=self._notifier
        )

    # ------------------------------------------------------------------ weights

    def check_model(self, model: ModelCard) -> None:
        require_tensors(model.id, model)

    async def try_model(self, model: ModelCard, store: WeightStore) -> None:
        await self._kernels.check(await store.manifest(model.id), store)

    def most_kv_tokens(self, model: ModelCard) -> int | None:
        return self._kv_tokens.get(model.id)

    def can_preload(self, model: ModelCard) -> bool:
        return self._loaded_bytes + model.weight_bytes <= self._settings.total_bytes

    async def preload(self, model: ModelCard, store: WeightStore) -> None:
        staged = self._loader.staged
        if staged is not None and staged.card == model:
            await checkpoint()
            return
        self._life.require(_SERVING, "preload")
        await self._loader.preload(model, store, self._loaded_bytes)

    async def drop_preload(self) -> None:
        await checkpoint()
        await self._loader.drop_preload()

    # ------------------------------------------------------------------ adapters

    async def load_adapter(self, adapter: Adapter) -> None:
        self._life.require(_SERVING, "load an adapter")
        await self._life.unless_lost(self._adapters.load(adapter))

    async def drop_adapter(self, adapter: AdapterId) -> None:
        await self._adapters.drop(adapter)

    # ------------------------------------------------------------------ requests

    def check_grammar(self, field: str, grammar: str) -> None:
        """Refuse a grammar that no model could be held to, unless vLLM compiles it as `arguments` say."""
        if self._settings.guides:
            self._grammars.check(field, grammar)

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[TokenStream]:
        stream, core, adapter = self._admit(request)
        try:
            yield stream.tokens
        finally:
            if adapter is not None:
                adapter.num_users -= 1
            self._streams.leave(self._running, stream, core)

    # ------------------------------------------------------------------ migration

    @asynccontextmanager
    async def export_kv(self, request: RequestId) -> AsyncGenerator[KVSource]:
        context, stream = self._migration("export"), self._streams.find(request)
        if stream is None:
            raise aborted("export", f"engine {self.id!r} has no request {request!r}")
        give_up = partial(self._give_up, stream, context.core)
        async with lent_source(VllmKVSource(context, stream, give_up)) as source:
            yield source

    @asynccontextmanager
    async def import_kv(self, request: Request) -> AsyncGenerator[KVSink]:
        context = self._migration("reserve")
        if self._life.state is not _SERVING or self._card is None or self._card.id != request.model:
            raise aborted("reserve", f"engine {self.id!r} is {self._life.state} with another model")
        adapter = self._adapters.use(request.adapter)
        try:
            sink = VllmKVSink(context, request, self._sinks.remove)
            self._sinks.append(sink)
            async with lent_sink(sink):
                yield sink
        finally:
            if adapter is not None:
                adapter.num_users -= 1

    async def cached_kv(self) -> Sequence[CachedKV]:
        context, card = self._migration("export"), self._card
        if card is None:
            raise aborted("export", f"engine {self.id!r} serves no model")
        return await list_cached(context, card.id, self._adapters.inside_names)

    # ------------------------------------------------------------------ view

    def status(self) -> EngineStatus:
        core = None if self._life.is_lost else self._core
        begun = self._streams.num_begun
        running = max(begun, min(core.stats.num_running, len(self._streams))) if core else 0
        waiting = len(self._streams) - running
        num_blocks = core.num_blocks if core else 0
        block_tokens = core.block_tokens if core else 16
        taken = self._streams.num_blocks(block_tokens) + sum(sink.num_blocks for sink in self._sinks)
        return EngineStatus(
            id=self.id,
            state=self._life.state,
            model=self._card.id if core and self._card else None,
            num_running=running,
            num_waiting=waiting,
            num_prefill_tokens=self._streams.num_prefill_tokens,
            max_requests=self._settings.max_requests,
            num_kv_blocks=num_blocks,
            num_free_kv_blocks=max(0, num_blocks - taken),
            num_next_kv_blocks=-(-self._streams.num_next_tokens // block_tokens) if waiting else 0,
            kv_block_tokens=block_tokens,
            memory_bytes=self._settings.total_bytes,
            weight_bytes=self._loaded_bytes + self._loader.staged_bytes,
            adapters=() if self._life.is_lost else self._adapters.names,
            max_adapters=self._settings.max_adapters,
            preloaded=self._loader.staged.card.id if self._loader.staged else None,
            load_path=self._loader.load_path if core else "",
            lost_because=self._life.lost_because,
        )

    @property
    def num_preempted(self) -> int:
        """How often a request gave up its KV blocks for another since the core was started."""
        return self._core.stats.num_preempted if self._core else 0

    @property
    def resumes_exactly(self) -> bool:
        """Whether requests of any sampling continue here as if they had begun here; true when EMPTY."""
        return self._core.resumes if self._core else True

    @property
    def moves_blocks(self) -> bool:
        """Whether requests can leave and arrive with their KV blocks, else as tokens; true when EMPTY."""
        return self._core.blocks is not None if self._core else True

    # ------------------------------------------------------------------ loading

    async def _start(self, model: ModelCard, store: WeightStore) -> Core:
        return await self._loader.load(model, store)

    def _serve(self, model: ModelCard, processes: Core) -> None:
        core = processes
        self._core, self._card = core, model
        self._context = min(core.context, model.max_context_tokens)
        self._kv_tokens[model.id] = core.num_blocks * core.block_tokens
        self._adapters.serve(model.id, core)
        core.died = partial(self._note_death, core)
        core.stats.notifier = self._notifier

    def _note_death(self, core: Core) -> None:
        if self._core is core:
            self._lose(core.ending)

    async def _release(self) -> None:
        """Give the core back. Cannot be interrupted."""
        core = self._core
        if core is None:
            return
        for sink in tuple(self._sinks):
            sink.close()
        await self._adapters.forget()
        self._core = self._card = None
        core.stats.notifier = StatusNotifier()
        if core.is_dead:
            await core.stop()
        else:
            await self._loader.give_back(core)
        await self._streams.wait_until_gone()

    async def _close(self) -> None:
        await self._loader.close()

    def _kill(self) -> None:
        if self._core is not None:
            self._core.kill()

    # ------------------------------------------------------------------ streams

    async def _wait_until_drained(self, deadline_s: float) -> None:
        await self._streams.wait_until_drained(deadline_s)

    def _close_streams(self, error: Callable[[], HotswapError]) -> int:
        return self._streams.close_all(self._running, None if self._life.is_lost else self._core, error)

    def _admit(self, request: Request) -> tuple[Stream, Core, Held[Any] | None]:
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
            no_grammar=no_grammar(core, request),
            unsupported=unsupported(request.sampling, core),
        )
        check_prompt_rows(request, core)
        adapter = self._adapters.use(request.adapter)
        stream = self._streams.open(request)
        arrival = next((s.id for s in self._sinks if s.committed and s.request.id == request.id), None)
        params = sampling_params(request, card, self._context, core, arrival=arrival)
        self._streams.start(self._running, stream, core, params, adapter.place if adapter else None)
        return stream, core, adapter

    def _migration(self, stage: str) -> MigrationContext:
        """Return the context of a KV source or sink."""
        self._life.refuse_if_lost()
        core = self._core
        if core is None:
            raise aborted(stage, f"engine {self.id!r} has no KV blocks that can move")
        if core.blocks is None:
            self._say_that_tokens_move()
            raise aborted(stage, f"engine {self.id!r} has no KV blocks that can move")
        return MigrationContext(self._life, core, core.blocks, lambda: self._core)

    def _say_that_tokens_move(self) -> None:
        if not self._has_said_that_tokens_move:
            self._has_said_that_tokens_move = True
            log.warning(
                "Requests leave engine %r as tokens, which are computed again: its KV blocks cannot be "
                "copied. It has another KV connector, a model that keeps more than keys and values, or a "
                "vLLM that this version does not know.",
                self.id,
            )

    def _give_up(self, stream: Stream, core: Core) -> bool:
        evicted = RequestEvicted(f"Engine {self.id!r} gave {stream.request.id!r} away; it goes on elsewhere.")
        return self._streams.give_up(self._running, stream, core, evicted)

    @property
    def _loaded_bytes(self) -> int:
        return self._card.weight_bytes if self._card and not self._life.is_lost else 0
