"""`TorchEngine`: an in-process instance that serves Hugging Face causal language models through PyTorch.

Limits: greedy and sampled decoding only, adapters for models of one rank only. A load refuses architectures
that keep state of an unknown kind outside attention or build their own masks. On a CPU logits are
batch-invariant to the bit; on other devices they may depend on the batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Self

import anyio
import torch
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from hotswap.backends.adapter_accounting import Held
from hotswap.backends.grammar_check import GrammarCheck
from hotswap.backends.layouts import require_modules
from hotswap.backends.life import Life
from hotswap.backends.notifier import StatusNotifier
from hotswap.backends.torch.adapters.manager import AdapterManager
from hotswap.backends.torch.adapters.slots import AdapterSlot
from hotswap.backends.torch.admission import to_sequence
from hotswap.backends.torch.forward import Forward
from hotswap.backends.torch.loading import LoadedModel
from hotswap.backends.torch.masks import Constraint
from hotswap.backends.torch.migration import (
    TorchKVSink,
    TorchKVSource,
    aborted,
    lent_sink,
    lent_source,
    list_cached,
)
from hotswap.backends.torch.modeling import SkeletonCache
from hotswap.backends.torch.models import Models
from hotswap.backends.torch.parallel.nodes import StageNode
from hotswap.backends.torch.placement import make_loader
from hotswap.backends.torch.prefix import root_key
from hotswap.backends.torch.row_invariance import warnings_of_products
from hotswap.backends.torch.runner import Report
from hotswap.backends.torch.settings import Settings
from hotswap.backends.torch.step_options import GpuSteps
from hotswap.backends.torch.streams import Streams
from hotswap.backends.torch.worker import Worker
from hotswap.device_budget import DeviceBudget
from hotswap.engine import Engine, StatusListener
from hotswap.errors import InstanceError, InstanceLost, RequestEvicted
from hotswap.hardware import parse_bytes
from hotswap.loop_time import asyncio_loop
from hotswap.migration import CachedKV, KVSink, KVSource
from hotswap.model import Adapter, ModelCard
from hotswap.request import AdapterId, Request, RequestId
from hotswap.store import WeightStore
from hotswap.stream import TokenQueue, TokenStream
from hotswap.view import EngineStatus, InstanceId, InstanceState
from hotswap.worker_threads import run_in_thread

__all__ = ["TorchEngine"]

log = logging.getLogger("hotswap")

_EMPTY, _LOADING, _SERVING, _DRAINING = (
    InstanceState.EMPTY,
    InstanceState.LOADING,
    InstanceState.SERVING,
    InstanceState.DRAINING,
)


class TorchEngine(Engine):
    """Serves one model on a device, with LoRA adapters; can preload the next model beside it.

    Steps run on the engine's own thread and loads on worker threads, so neither blocks the event loop
    (asyncio). In fp32 greedy tokens equal those of transformers' `generate` for the request alone. With
    `invariant`, on a CPU, the logits of a request have the same bits in any batch, so a request that is
    preempted, or continued on another instance, gets the same tokens.

    Sizes are bytes, given as a number or as text such as `"2 GiB"`.

    Args:
        id: The name of the instance.
        device: The device of weights and KV blocks, such as `"cuda:0"`. Default: `"cpu"`.
        dtype: The dtype to which weights of the model's main dtype are converted at load; while they are
            converted both copies take memory. Default: `None`, weights keep their stored dtype.
        kv_tokens: The capacity of the KV cache in tokens; ignored if `kv_bytes` is given. Default: `None`,
            16,384 on a CPU and with several ranks. On a GPU the memory that is left beside weights, adapters
            and a step of the largest size, which the first load of an architecture measures; as much as the
            weights take stays free for a preload, but at most half.
        kv_bytes: The capacity of the KV cache as a size, of all ranks together. Default: `None`, `kv_tokens`
            counts.
        kv_block_tokens: Tokens per KV block, a multiple of 16. Default: 32.
        token_budget: The maximum number of tokens of a step, decodes and prefill chunks together; at least
            `max_requests`. Default: `None`, which is 256 on a CPU, 2,048 on a GPU, and 8,192 with an
            `itl_target_s`.
        itl_target_s: The target inter-token latency in seconds, which the engine meets by lowering the token
            budget according to measured step times. Default: `None`, the budget is fixed.
        prefix_reuse: Whether requests share the KV blocks of common prefixes, also with ended requests.
            Models with recurrent states do so from snapshots of them on. Default: true.
        snapshot_bytes: The size of snapshots of recurrent states on all ranks, part of `memory_bytes`, which
            a load takes whole; of a size below one snapshot no prefix is reused. Default: `None`, one for
            each of `max_requests`, and at most an eighth of the memory that weights and the states of
            requests leave; none under a `device_budget`.
        max_requests: The maximum number of running requests; more wait inside the engine. Recurrent states
            take memory for each. Default: `None`, 64 on a CPU and 128 on a GPU.
        memory_bytes: The limit of weights (preloaded ones included), KV blocks and recurrent states together.
            Weights that a store lends to a CPU do not count: they are in the store's budget. Default: `None`,
            all of the device or its budget; set it if engines share a device by no budget.
        device_budget: Memory that engines share (`docs/device-memory.md`). The KV
            cache grows to at most `kv_tokens`; a request can have what fits into the floor beside weights.
        floor_bytes: What the engine can always take of `device_budget`, for all that `memory_bytes` limits.
        idle_bytes: On a CPU, the size of freed weight memory that is kept for the next load, which then
            writes to allocated pages; 0 returns all of it at once. Default: 1 GiB.
        max_adapters: The maximum number of loaded adapters; 0 disables adapters. Default: 32.
        adapter_bytes: The limit of adapters on the device, in addition to `memory_bytes`, and the limit of
            the cache of adapters in host memory. Allocated as adapters are loaded. Default: 1 GiB.
        packed_bytes: On a CPU, the limit of packed copies of linear weights, a faster layout, in addition to
            the weights. They are made in a preload or between steps, change no bits while a model is loaded,
            are kept across swaps, and are dropped if weights or KV blocks need their part of `memory_bytes`.
            On a CPU without bf16 instructions the copies of bf16 weights are in fp32, and bits depend on
            whether all would fit this limit: KV blocks move between engines that compute alike. Engines of
            several ranks make none. 0 makes none. Default: `None`, a quarter of `memory_bytes`.
        keep_fp8: Whether linear weights stored as FP8 stay quantized in memory, at half the memory of bf16;
            if false they are dequantized at load. Default: `None`, which keeps them on GPUs whose kernels
            dequantize them within bf16 and fp16 products, and dequantizes them otherwise: on a CPU steps are
            faster then.
        threads: The CPU threads of a step. Every engine has its own threads, so divide the cores among
            engines that serve at the same time. Default: `None`, PyTorch's default, usually all cores.
        invariant: Whether logits are batch-invariant to the bit, which takes a few per cent more time. On a
            CPU only, and only for models whose products all have a batch-invariant kernel (see
            `docs/engine.md`). Default: true.
        skeletons: The cache of modules kept between loads, which engines of a process may share. Default:
            `None`, a cache of its own.
        tp: The number of tensor-parallel ranks: the parts into which each layer's weights are sharded. The
            store must have models sharded for this number. Each rank is a process, on the CPU or on a GPU of
            its own, from `device` upwards; the ranks divide `threads` and `memory_bytes` equally. Default: 1.
        pp: The number of pipeline-parallel stages into which the layers are divided, each of `tp` ranks. As
            many batches are in flight and divide `token_budget`, so that all stages compute. Default: 1.
        stage_nodes: The nodes of the first stages, in order, such as `LinkedNode`; `None` is this machine. It
            always has the last stage. The ranks of a node divide `threads` of their own, and have GPUs from
            `device` upwards; `memory_bytes` is that of all ranks. Default: none, all are on this machine.
        gpu_steps: How steps run on a GPU. `"gathered"`: the KV blocks of a batch are gathered and PyTorch
            multiplies them. `"in_place"`: Triton kernels read the blocks, if they pass a trial at the first
            load. `"graphs"`: so, and steps that only decode are CUDA graphs, unless a capture fails; requests
            with adapters and models with recurrent states run without. One rank only; a CPU ignores it. The
            last two were not run on a GPU yet. Default: `"gathered"`.
        rank_timeout_s: The time in seconds after which a rank that does not reply is considered failed, and
            the instance lost. Default: 300.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        id: str,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        kv_tokens: int | None = None,
        kv_bytes: int | str | None = None,
        kv_block_tokens: int = 32,
        token_budget: int | None = None,
        itl_target_s: float | None = None,
        prefix_reuse: bool = True,
        snapshot_bytes: int | str | None = None,
        max_requests: int | None = None,
        memory_bytes: int | str | None = None,
        device_budget: DeviceBudget | None = None,
        floor_bytes: int | str | None = None,
        idle_bytes: int | str = "1 GiB",
        max_adapters: int = 32,
        adapter_bytes: int | str = "1 GiB",
        packed_bytes: int | str | None = None,
        keep_fp8: bool | None = None,
        threads: int | None = None,
        invariant: bool = True,
        skeletons: SkeletonCache | None = None,
        tp: int = 1,
        pp: int = 1,
        stage_nodes: Sequence[StageNode | None] = (),
        gpu_steps: GpuSteps = "gathered",
        rank_timeout_s: float = 300.0,
    ) -> None:
        settings = Settings(
            device=device,
            dtype=dtype,
            tp=tp,
            pp=pp,
            stage_nodes=stage_nodes,
            kv_tokens=kv_tokens,
            kv_bytes=kv_bytes,
            kv_block_tokens=kv_block_tokens,
            token_budget=token_budget,
            itl_target_s=itl_target_s,
            prefix_reuse=prefix_reuse,
            snapshot_bytes=snapshot_bytes,
            max_requests=max_requests,
            memory_bytes=memory_bytes,
            device_budget=device_budget,
            floor_bytes=floor_bytes,
            idle_bytes=idle_bytes,
            max_adapters=max_adapters,
            adapter_bytes=adapter_bytes,
            packed_bytes=packed_bytes,
            keep_fp8=keep_fp8,
            threads=threads,
            invariant=invariant,
            rank_timeout_s=rank_timeout_s,
            gpu_steps=gpu_steps,
        )
        self.id = InstanceId(id)
        self.device = settings.first_device
        self._settings, self._kv = settings, settings.kv
        self._notifier = StatusNotifier()
        self._life = Life(self.id, self._notifier)
        cache = skeletons if skeletons is not None else SkeletonCache()
        self._loader = make_loader(self.id, settings, cache, died=self._lose, notifier=self._notifier)
        self._adapters = AdapterManager(
            self.id,
            self.device,
            max_adapters=settings.num_adapters,
            size_bytes=parse_bytes(adapter_bytes, "adapter_bytes"),
            notifier=self._notifier,
        )
        self._grammars = GrammarCheck()
        self._worker: Worker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._models = Models(self.id, self._loader, self._adapters, settings, self._life)
        self._streams = Streams(self._notifier)
        self._detached = anyio.Event()
        self._warnings: tuple[str, ...] = ()

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        self._loop = asyncio_loop(f"Engine {self.id!r}")
        with self._loader.memory.opened(self._post):
            await self._start()
            self._life.has_begun = True
            try:
                yield self
            finally:
                self._evict_all("It was stopped")
                self._life.has_begun = False
                self._loader.abandon()
                with anyio.CancelScope(shield=True):
                    await self._stop()
                self._life.state = _EMPTY

    # ------------------------------------------------------------------ weights

    async def load(self, model: ModelCard, store: WeightStore) -> None:
        self._life.require(_EMPTY, "load")
        self._life.state = _LOADING
        try:
            loaded, forward = await self._life.unless_lost(self._models.load(model, store))
        except BaseException:
            if self._life.state is _LOADING:
                self._life.state = _EMPTY
            raise
        self._serve(loaded, forward, store)

    async def unload(self) -> None:
        if self._life.state is _LOADING:
            raise InstanceError(f"Engine {self.id!r} is LOADING; cancel the load instead of unloading it.")
        with anyio.CancelScope(shield=True):
            if self._life.is_lost:
                await self._restart()
            elif self._life.state is not _EMPTY:
                await self._unload()
        await checkpoint_if_cancelled()

    def check_model(self, model: ModelCard) -> None:
        require_modules(model.id, model)

    def can_preload(self, model: ModelCard) -> bool:
        return self._models.can_preload(model)

    async def preload(self, model: ModelCard, store: WeightStore) -> None:
        await self._models.preload(model, store, self._worker)

    async def drop_preload(self) -> None:
        await checkpoint()
        await self._models.drop_preload(self._worker)

    async def resize_kv(self, num_blocks: int) -> int:
        """See `SupportsResize`."""
        return await self._models.resize_kv(num_blocks, self._worker, self._post)

    # ------------------------------------------------------------------ adapters

    async def load_adapter(self, adapter: Adapter) -> None:
        self._life.require(_SERVING, "load an adapter")
        await self._life.unless_lost(self._adapters.load(adapter))

    async def drop_adapter(self, adapter: AdapterId) -> None:
        await self._adapters.drop(adapter)

    # ------------------------------------------------------------------ requests

    def most_kv_tokens(self, model: ModelCard) -> int | None:
        return self._kv.most_tokens

    def check_grammar(self, field: str, grammar: str) -> None:
        self._grammars.check(field, grammar)

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[TokenStream]:
        constraint = await self._models.compile(request) if request.sampling.has_grammar else None
        ticket, tokens, adapter = self._admit(request, constraint)
        try:
            yield tokens
        finally:
            if adapter is not None:
                adapter.num_users -= 1
            if self._streams.remove(ticket):
                self._running_worker.remove(ticket)

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

    # ------------------------------------------------------------------ migration

    @asynccontextmanager
    async def export_kv(self, request: RequestId) -> AsyncGenerator[KVSource]:
        context, found = self._models.migration_context(), self._streams.find(request)
        if found is None:
            raise aborted("export", f"engine {self.id!r} has no request {request!r}")
        ticket, exported = found
        async with lent_source(
            TorchKVSource(context, ticket, context.layout_for(exported), partial(self._end_stream, ticket))
        ) as source:
            yield source

    @asynccontextmanager
    async def import_kv(self, request: Request) -> AsyncGenerator[KVSink]:
        context = self._models.migration_context()
        if self._life.state is not _SERVING or self._models.name != request.model:
            raise aborted("reserve", f"engine {self.id!r} is {self._life.state} with {self._models.name!r}")
        adapter = self._adapters.use(request.adapter)
        try:
            slot = adapter.place if adapter else None
            async with lent_sink(TorchKVSink(context, request, context.layout_for(request), slot)) as sink:
                yield sink
        finally:
            if adapter is not None:
                adapter.num_users -= 1

    async def cached_kv(self) -> Sequence[CachedKV]:
        context, model = self._models.migration_context(), self._models.name
        if model is None:
            raise aborted("export", f"engine {self.id!r} serves no model")
        roots: dict[bytes, AdapterId | None] = {
            root_key(context.weights, key): adapter for adapter, key in self._adapters.keys.items()
        }
        return await list_cached(context, model, {root_key(context.weights): None, **roots})

    # ------------------------------------------------------------------ faults

    def lose(self, reason: str = "it was dropped on purpose") -> None:
        """Mark the instance as LOST, as a device failure does; streams and calls raise `InstanceLost`.

        Call it from the event loop. `unload` restarts the engine; it is EMPTY afterwards.

        Args:
            reason: The reason in the errors' messages.
        """
        self._lose(reason, None)

    # ------------------------------------------------------------------ view

    def status(self) -> EngineStatus:
        report = Report() if self._life.is_lost else self._streams.report
        running = min(report.num_running, len(self._streams))
        return EngineStatus(
            id=self.id,
            state=self._life.state,
            model=self._models.name,
            num_running=running,
            num_waiting=len(self._streams) - running,
            num_prefill_tokens=self._streams.num_prefill_tokens,
            max_requests=self._settings.most_requests,
            num_kv_blocks=report.num_blocks,
            num_free_kv_blocks=report.num_free_blocks,
            preempted=self._streams.ids_of(report.preempted),
            num_next_kv_blocks=self._streams.num_next_blocks(self._kv.block_tokens),
            kv_block_tokens=self._kv.block_tokens,
            kept_since_s=report.kept_since_s,
            **self._models.pool_fields(),
            memory_bytes=self._loader.memory_bytes,
            weight_bytes=self._loader.weight_bytes,
            adapters=() if self._life.is_lost else self._adapters.names,
            max_adapters=self._settings.num_adapters,
            preloaded=self._models.staged.card.id if self._models.staged else None,
            lost_because=self._life.lost_because,
            warnings=self._warnings,
        )

    def watch(self, listener: StatusListener) -> bool:
        return self._notifier.watch(listener)

    @property
    def num_preempted(self) -> int:
        """The number of preemptions since the model was loaded."""
        return self._streams.report.num_preempted

    @property
    def packed_bytes(self) -> int:
        """The memory of packed weight copies, those kept for models that are not loaded included, in bytes.

        `weight_bytes` of the status does not include them: they are dropped if weights or KV blocks need the
        memory.
        """
        return self._loader.packed_bytes

    @property
    def num_reused_tokens(self) -> int:
        """The number of tokens found in the prefix cache instead of computed since the model was loaded."""
        return self._streams.report.num_reused_tokens

    @property
    def token_budget(self) -> int:
        """The maximum number of tokens of the next step; with an `itl_target_s` it follows step times."""
        return self._streams.report.token_budget or self._settings.max_step_tokens

    def __repr__(self) -> str:
        report = self._streams.report
        blocks = f"{report.num_free_blocks} free, {report.num_cached_blocks} of them cached"
        return f"{super().__repr__()[:-2]} | KV blocks: {blocks} | budget: {self.token_budget} tokens]>"

    # ------------------------------------------------------------------ loading

    def _serve(self, loaded: LoadedModel, forward: Forward, store: WeightStore) -> None:
        runner = self._models.serve(loaded, forward, store, self._running_worker, self._post)
        self._streams.report = runner.report()
        self._running_worker.attach(runner)
        self._life.state = _SERVING

    async def _unload(self) -> None:
        self._evict_all("The model was unloaded")
        self._life.state = _DRAINING
        self._detached = anyio.Event()
        self._running_worker.detach(partial(self._post, self._detached.set))
        await self._detached.wait()
        if not self._life.is_lost:
            await self._release_serving()
        if self._life.is_lost:
            await self._restart()
            return
        try:
            await self._loader.reclaimed()
        finally:
            self._life.state = _EMPTY

    async def _restart(self) -> None:
        await self._stop()
        await self._start()
        self._life.state = _EMPTY

    async def _start(self) -> None:
        try:
            await self._loader.start()
        except InstanceLost as exc:
            raise InstanceLost(f"Engine {self.id!r} cannot start: {exc}") from exc
        if self._settings.is_invariant and not self._warnings:
            self._warnings = await run_in_thread(warnings_of_products)
            for warning in self._warnings:
                log.warning("Engine %r: %s", self.id, warning)
        self._worker = Worker(
            f"steps of {self.id}",
            threads=self._settings.rank_threads,
            publish=partial(self._post, self._streams.deliver),
            ended=partial(self._post, self._note_end),
        )
        self._loader.memory.changed = self._worker.settle

    async def _stop(self) -> None:
        """Stop the engine's thread and release its models."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()
            await run_in_thread(worker.join)
        await self._models.drop_preload(self._worker)
        await self._release_serving()
        await self._loader.stop()

    async def _release_serving(self) -> None:
        await self._models.release()
        self._streams.report = Report()

    # ------------------------------------------------------------------ streams

    def _admit(
        self, request: Request, constraint: Constraint | None
    ) -> tuple[int, TokenQueue, Held[AdapterSlot] | None]:
        model = self._models.check(request)
        adapter = self._adapters.use(request.adapter)
        ticket, tokens = self._streams.open(request)
        slot = adapter.place if adapter else None
        sequence = to_sequence(
            request,
            ticket,
            model,
            slot,
            weights=self._models.weights,
            constraint=constraint,
            announced=self._models.announced,
        )
        self._running_worker.add(sequence)
        return ticket, tokens, adapter

    def _end_stream(self, ticket: int) -> bool:
        error = RequestEvicted(f"Engine {self.id!r} ended a request that continues on another engine.")
        if was_open := self._streams.close(ticket, error):
            self._running_worker.remove(ticket)
        return was_open

    def _evict_all(self, why: str) -> int:
        evicted = self._streams.close_all(
            lambda: RequestEvicted(
                f"Engine {self.id!r} evicted its requests. {why}; they continue elsewhere."
            )
        )
        for ticket in evicted:
            self._running_worker.remove(ticket)
        return len(evicted)

    # ------------------------------------------------------------------ loss

    def _note_end(self, error: Exception | None) -> None:
        if error is not None:
            self._lose(f"a step failed: {error!r}", error)

    def _lose(self, reason: str, cause: Exception | None) -> None:
        if self._life.is_lost or not self._life.has_begun:
            return
        self._life.lose(reason, cause)
        self._streams.close_all(self._life.lost)
        self._detached.set()
        if self._worker is not None:
            self._worker.stop()
        self._loader.abandon()

    def _post(self, call: Callable[..., object], *arguments: object) -> None:
        """Call a function on the event loop, from any thread; calls keep their order."""
        assert self._loop is not None, "the engine was entered"
        self._loop.call_soon_threadsafe(call, *arguments)

    @property
    def _running_worker(self) -> Worker:
        assert self._worker is not None, "the engine was entered"
        return self._worker
