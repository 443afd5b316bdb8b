"""Loads models into this process: allocates memory, reads weights, binds modules and checks them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial

import anyio
import torch
from torch import Tensor

from hotswap.backends.layouts import require_modules
from hotswap.backends.notifier import StatusNotifier
from hotswap.backends.torch.adapters.targets import Target, observed, targets
from hotswap.backends.torch.buffers import FlatBuffers, fetch, in_place
from hotswap.backends.torch.compatibility import check_config
from hotswap.backends.torch.decode_graphs import graphs_for
from hotswap.backends.torch.dequantize import Dequantizer, original_dtype
from hotswap.backends.torch.device import (
    ReleasedMemory,
    available_bytes,
    check_device,
    out_of_memory_mapped,
)
from hotswap.backends.torch.device_memory import DeviceMemory
from hotswap.backends.torch.fingerprint import compute_format, fingerprint_of, weights_key
from hotswap.backends.torch.forward import LocalForward
from hotswap.backends.torch.fp8_linear import QuantizedWeights, keeps_fp8_by_default, linear_weights, prepare
from hotswap.backends.torch.held_weights import Weights
from hotswap.backends.torch.kv import KVCache, LayerShape
from hotswap.backends.torch.largest_step import LargestStep
from hotswap.backends.torch.loading import KVBudget, LoadedModel, Loader
from hotswap.backends.torch.long_rope import LongRope
from hotswap.backends.torch.modeling import Skeleton, SkeletonCache, main_dtype
from hotswap.backends.torch.packed_cache import PackedCache, PackedWeights
from hotswap.backends.torch.preflight import preflight
from hotswap.backends.torch.recurrent.states import StatePool
from hotswap.backends.torch.step_options import StepOptions
from hotswap.backends.torch.weights import check_world_size, convert, recast
from hotswap.errors import InstanceLost
from hotswap.kernels.targets import runs_triton
from hotswap.model import Manifest, ModelCard
from hotswap.request import ModelId
from hotswap.store import SupportsLend, WeightStore
from hotswap.worker_threads import run_in_thread

__all__ = ["LocalLoader", "LocalModel"]


@dataclass(frozen=True, slots=True, eq=False)
class LocalModel(LoadedModel):
    """A model whose weights are on the device and bound to its modules.

    Attributes:
        loader: The loader that made it and releases it.
        card: The model's card.
        skeleton: The modules, borrowed from the skeleton cache.
        weights: The weights; the modules' parameters are views of them.
        packed: The packed copies of linear weights that exist so far.
        layers: What a request keeps in each layer.
        context: The maximum length of a request, in tokens.
        eos_token_ids: The token ids that end a generation.
        vocabulary: The number of token ids.
        fingerprint: See `LoadedModel`.
        long_rope: See `LoadedModel`.
    """

    loader: LocalLoader
    card: ModelCard
    skeleton: Skeleton
    weights: Weights
    packed: PackedWeights
    layers: tuple[LayerShape, ...]
    context: int
    eos_token_ids: frozenset[int]
    vocabulary: int
    fingerprint: str
    long_rope: LongRope | None

    @property
    def own_bytes(self) -> int:
        return self.weights.own_bytes

    def targets(self) -> Mapping[str, Target]:
        return self.loader.targets(self)

    async def pack(self) -> None:
        while await run_in_thread(self.loader.pack_next, self):
            pass

    def fits(self, cache: KVCache, budget: KVBudget) -> bool:
        return self.loader.fits(self, cache, budget)

    async def open(self, budget: KVBudget, kept: KVCache | None = None) -> LocalForward:
        return await run_in_thread(self.loader.open, self, budget, kept)

    async def release(self) -> None:
        await self.loader.release(self)


class LocalLoader(Loader):
    """Loads and releases models on one device in this process.

    On a CPU, weights that the store can lend are used in place, by any number of engines: a load copies
    nothing, and `weight_bytes` counts 0 bytes for them, since they are in the store's budget. Quantized
    weights are dequantized into memory of the engine and count with their dequantized size. With `keep_fp8`
    the weights of linear layers stay quantized, can be lent, and count with their quantized size.

    Files, copies and modules are handled in worker threads, so the event loop never blocks. A load that fails
    or is cancelled releases its memory before the error or the cancellation propagates. See `TorchEngine` for
    the arguments.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        dtype: torch.dtype | None,
        memory_bytes: int,
        idle_bytes: int,
        packed_bytes: int,
        keep_fp8: bool | None,
        skeletons: SkeletonCache,
        steps: StepOptions,
        notifier: StatusNotifier,
        memory: DeviceMemory | None = None,
    ) -> None:
        super().__init__(memory_bytes, notifier, memory)
        self._device, self._dtype, self._keep_fp8 = device, dtype, keep_fp8
        self._buffers, self._released = FlatBuffers(device, idle_bytes), ReleasedMemory(device)
        self._packed = PackedCache(packed_bytes)
        self._skeletons, self._steps = skeletons, steps
        self._largest_step = LargestStep(device, steps, skeletons.step_bytes)
        self._others_bytes = 0

    async def start(self) -> None:
        try:
            await run_in_thread(check_device, self._device)
        except RuntimeError as exc:
            raise InstanceLost(f"{self._device} fails ({exc}); restart the process.") from exc
        # Slow the first time and cached: later calls on the event loop return at once.
        await run_in_thread(runs_triton, self._device)

    async def load(self, card: ModelCard, store: WeightStore, *, others_bytes: int) -> LocalModel:
        manifest = await store.manifest(card.id)
        require_modules(manifest.model, manifest)
        check_world_size(manifest, 1)
        skeleton = await run_in_thread(self._borrow_skeleton, manifest.config)
        try:
            weights = await self._weights(manifest, store, others_bytes, skeleton)
        except BaseException:
            self._skeletons.give_back(skeleton, self._device)
            raise
        try:
            return await run_in_thread(self._bind, card, manifest, skeleton, weights)
        except BaseException:
            self._skeletons.give_back(skeleton, self._device)
            await self._free(weights)
            raise

    async def release(self, model: LocalModel) -> None:
        """Release the weights of a model that no longer runs. Shielded from cancellation."""
        with anyio.CancelScope(shield=True):
            await run_in_thread(self._packed.release, model.packed)
        self._skeletons.give_back(model.skeleton, self._device)
        await self._free(model.weights)

    def abandon(self) -> None:
        pass

    async def stop(self) -> None:
        """Free the cached buffers and packed weights."""
        with anyio.CancelScope(shield=True):
            await run_in_thread(self._buffers.clear)
            await run_in_thread(self._packed.clear)

    @property
    def packed_bytes(self) -> int:
        return self._packed.used_bytes

    def pack_next(self, model: LocalModel) -> bool:
        """Pack one more linear layer, on the calling thread; false if none is left."""
        return self._packed.pack_next(model.packed)

    async def reclaimed(self) -> None:
        await self._released.freed()

    def keep(self, cache: KVCache) -> None:
        self._released.unwatch(*cache.tensors)

    def fits(self, model: LocalModel, cache: KVCache, budget: KVBudget) -> bool:
        """Whether `open` would allocate as many KV blocks of the same format as a cache has."""
        shapes = tuple(shape for _, shape in sorted(cache.layers.items()))
        if (cache.block_tokens, shapes) != (budget.block_tokens, model.layers):
            return False
        if budget.takes_rest:  # a preload beside it took no more than what it had left
            return True
        return cache.num_blocks == budget.num_blocks(model.layers, model.context, self._left_bytes)

    @property
    def _left_bytes(self) -> int:
        """What weights leave of the memory of the engine."""
        return self.memory_bytes - self.weight_bytes

    def _room_bytes(self, model: LocalModel, budget: KVBudget, kept: KVCache | None) -> int:
        """Return the memory for KV blocks and states, those of a cache that is kept included. Blocking."""
        if self._device.type != "cuda" or budget.is_elastic:
            return self._left_bytes
        skeleton = model.skeleton
        step_bytes = self._largest_step.size_bytes(
            model.card.id, skeleton, model.layers, model.context, self._way(skeleton)
        )
        free_bytes = available_bytes(self._device) + (0 if kept is None else kept.size_bytes)
        return min(self._left_bytes, free_bytes - step_bytes - budget.adapter_bytes)

    def open(self, model: LocalModel, budget: KVBudget, kept: KVCache | None = None) -> LocalForward:
        """Allocate the KV cache of a model, unless one is kept, and return its forward pass. Blocking.

        Raises:
            OutOfMemory: the memory does not suffice for one block, or for a step on a GPU.
        """
        room_bytes = self._room_bytes(model, budget, kept)
        cache = self._make_cache(model, budget, room_bytes) if kept is None else kept
        num_snapshots = budget.num_snapshots((model.layers, room_bytes))
        states = self._make_states(model, budget, num_snapshots)
        self._others_bytes = cache.size_bytes + (0 if states is None else states.size_bytes)
        # Released with the model, before `reclaimed` is called.
        self._released.watch(*cache.tensors, *(() if states is None else states.tensors))
        self._fit()
        return LocalForward(
            model.skeleton.module,
            cache,
            invariant=self._steps.invariant,
            linear_only=model.skeleton.linear_only,
            background_work=partial(self.pack_next, model),
            states=states,
            graphs=graphs_for(model.skeleton, cache, self._steps, budget.max_requests),
            num_snapshots=num_snapshots,
        )

    def _make_cache(self, model: LocalModel, budget: KVBudget, room_bytes: int) -> KVCache:
        num_blocks = budget.num_blocks(model.layers, model.context, room_bytes, model.own_bytes)
        if num_blocks < 1:
            raise budget.no_room(model.card.id, model.layers, room_bytes)
        size, kernels, elastic = budget.block_tokens, self._steps.by_kernels, budget.is_elastic
        with out_of_memory_mapped(f"the KV blocks of {model.card.id!r}"):
            cache = KVCache(
                num_blocks, size, self._device, model.layers, by_kernels=kernels, is_elastic=elastic
            )
            cache.build_kernels()
        return cache

    def _make_states(self, model: LocalModel, budget: KVBudget, num_snapshots: int) -> StatePool | None:
        layers = [layer.states for layer in model.layers]
        if not any(layers):
            return None
        with out_of_memory_mapped(f"the recurrent states of {model.card.id!r}"):
            pool = StatePool(budget.max_requests + num_snapshots, self._device, layers)
            pool.build_kernels()
        return pool

    def _borrow_skeleton(self, config_text: str) -> Skeleton:
        """Borrow the modules of a config; refuses architectures that its check refuses, before any read."""
        check_config(config_text)
        return self._skeletons.borrow(config_text, self._device)

    def _way(self, skeleton: Skeleton) -> str:
        return f"{self._device} {compute_format(skeleton)} {self._steps.by_kernels}"

    def targets(self, model: LocalModel) -> Mapping[str, Target]:
        """Return the layers of a loaded model that can have adapters, by name."""
        skeleton, key = model.skeleton, self._way(model.skeleton)
        if key not in skeleton.targets:
            odd = self._skeletons.unadaptable[skeleton.key, key]
            skeleton.targets[key] = targets(skeleton.module, odd)
        return skeleton.targets[key]

    async def _weights(
        self, manifest: Manifest, store: WeightStore, others_bytes: int, skeleton: Skeleton
    ) -> Weights:
        """Borrow or read the weights, and dequantize them or convert their dtype as configured."""
        if manifest.quantization:
            keep = linear_weights(skeleton.module) if self._keeps_fp8(manifest) else frozenset[str]()
            packs = runs_triton(self._device)
            dequantizer = Dequantizer(manifest, dtype=self._dtype, keep=keep, packs=packs)
            return await self._dequantized(manifest, store, others_bytes, dequantizer)
        weights = await self._borrow(manifest, store) or await self._read(manifest, store, others_bytes)
        if self._dtype is None or main_dtype(manifest.tensors) is self._dtype:
            return weights
        try:
            return await self._recast(manifest.model, weights, self._dtype, others_bytes)
        finally:
            await self._free(weights)

    def _keeps_fp8(self, manifest: Manifest) -> bool:
        if self._keep_fp8 is not None:
            return self._keep_fp8
        return keeps_fp8_by_default(self._device, self._dtype or original_dtype(manifest))

    async def _borrow(self, manifest: Manifest, store: WeightStore) -> Weights | None:
        """Borrow the weights from the store's memory; `None` if the store cannot lend them to this device."""
        if self._device.type != "cpu" or not isinstance(store, SupportsLend):
            return None
        async with AsyncExitStack() as loan:
            buffer = await loan.enter_async_context(store.lend(manifest))
            if buffer is None:
                return None
            return Weights(in_place(buffer.data), manifest.tensors, loan.pop_all())

    async def _read(self, manifest: Manifest, store: WeightStore, others_bytes: int) -> Weights:
        flat = await self._allocate(manifest.model, manifest.buffer_bytes, others_bytes)
        try:
            await fetch(store, manifest, flat)
        except BaseException:
            await self._release_buffer(flat)
            raise
        return Weights(flat, manifest.tensors)

    async def _recast(
        self, model: ModelId, weights: Weights, dtype: torch.dtype, others_bytes: int
    ) -> Weights:
        specs, size_bytes = recast(weights.specs, main_dtype(weights.specs), dtype)
        flat = await self._allocate(model, size_bytes, others_bytes)
        try:
            await run_in_thread(convert, weights.flat, weights.specs, flat, specs)
        except BaseException:
            await self._release_buffer(flat)
            raise
        return Weights(flat, specs)

    async def _dequantized(
        self, manifest: Manifest, store: WeightStore, others_bytes: int, dequantizer: Dequantizer
    ) -> Weights:
        """Dequantize weights that are not kept, from the store's memory or within the buffer of the read."""
        quantized = None
        if dequantizer.kept:
            dtype = self._dtype or dequantizer.original_dtype
            quantized = QuantizedWeights(
                dequantizer.kept, dequantizer.scheme, dequantizer.original_dtype, dtype
            )
        loan = await self._borrow(manifest, store)
        if loan and dequantizer.as_stored:
            return replace(loan, specs=dequantizer.specs, quantized=quantized)
        try:
            size_bytes = dequantizer.size_bytes if loan else dequantizer.buffer_bytes
            flat = await self._allocate(manifest.model, size_bytes, others_bytes)
            try:
                stored = loan.flat if loan else dequantizer.stored_part(flat)
                if loan is None:
                    await fetch(store, manifest, stored)
                await run_in_thread(dequantizer.run, stored, flat)
            except BaseException:
                await self._release_buffer(flat)
                raise
        finally:
            if loan:
                await self._free(loan)
        return Weights(flat, dequantizer.specs, quantized=quantized)

    async def _free(self, weights: Weights) -> None:
        if weights.loan is None:
            await self._release_buffer(weights.flat)
        else:
            with anyio.CancelScope(shield=True):
                await weights.loan.aclose()

    async def _allocate(self, model: ModelId, size_bytes: int, others_bytes: int) -> Tensor:
        self.check_room(model, size_bytes, others_bytes, self._device)
        self.weight_bytes += size_bytes
        self._others_bytes, taken_bytes = others_bytes, 0
        try:
            await self.memory.take_weights(size_bytes, f"The weights of {model!r}")
            taken_bytes = size_bytes
            await run_in_thread(self._fit)
            with out_of_memory_mapped(f"the weights of {model!r}"):
                flat = await run_in_thread(self._buffers.allocate, size_bytes)
        except BaseException:
            self.weight_bytes -= size_bytes
            self.memory.give(taken_bytes)
            raise
        self.weight_bytes += len(flat) - size_bytes
        return flat

    async def _release_buffer(self, flat: Tensor) -> None:
        self._released.watch(flat)
        with anyio.CancelScope(shield=True):
            await run_in_thread(self._buffers.release, flat)
            self.weight_bytes -= len(flat)
            self.memory.give(len(flat))
            # The released memory may be used to pack layers of the serving model.
            await run_in_thread(self._fit)

    def _fit(self) -> None:
        """Limit packed weights to the memory that weights and KV blocks do not take. May free much."""
        self._packed.fit(self.memory_bytes - self.weight_bytes - self._others_bytes)

    def _bind(
        self,
        card: ModelCard,
        manifest: Manifest,
        skeleton: Skeleton,
        weights: Weights,
    ) -> LocalModel:
        quantized = weights.quantized
        if quantized is not None:  # a tied module is bound by one of its names
            quantized = replace(quantized, names=quantized.names & skeleton.shapes.keys())
        skeleton.bind(weights.flat, weights.specs, quantized)
        with out_of_memory_mapped(f"the kernels of {card.id!r}"):
            prepare(skeleton.fp8_linears, skeleton.dtype)
        packed = self._packed.acquire(weights_key(manifest), skeleton.linears)
        try:
            return self._verified_model(card, manifest, skeleton, weights, packed)
        except BaseException:
            self._packed.release(packed)
            raise

    def _verified_model(
        self, card: ModelCard, manifest: Manifest, skeleton: Skeleton, weights: Weights, packed: PackedWeights
    ) -> LocalModel:
        """Return the loaded model, having run the preflight of its architecture if it is new."""
        key = (skeleton.key, self._way(skeleton))
        layers = self._skeletons.verified.get(key)
        if layers is None:
            with (
                out_of_memory_mapped(f"the first pass of {card.id!r}"),
                observed(skeleton.module) as unadaptable,
            ):
                layers = preflight(skeleton, self._device, self._steps)
            # Set before `verified`: other threads read it once they find the architecture verified.
            self._skeletons.unadaptable[key] = unadaptable
            self._skeletons.verified[key] = layers
        positions = skeleton.max_positions or card.max_context_tokens
        return LocalModel(
            loader=self,
            card=card,
            skeleton=skeleton,
            weights=weights,
            packed=packed,
            layers=layers,
            context=min(card.max_context_tokens, positions),
            eos_token_ids=frozenset(card.eos_token_ids or manifest.eos_token_ids),
            vocabulary=skeleton.vocabulary,
            fingerprint=fingerprint_of(manifest, f"{self._device.type} {compute_format(skeleton)}"),
            long_rope=skeleton.long_rope,
        )
