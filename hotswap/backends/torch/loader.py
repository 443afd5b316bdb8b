"""From a manifest to a model that can run: memory, weights, modules, and whether they belong together."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial

import anyio
import anyio.to_thread
import torch
from torch import Tensor

from hotswap.backends.notifier import StatusNotifier
from hotswap.backends.torch.adapters.targets import Target, observed, targets
from hotswap.backends.torch.buffers import FlatBuffers, fetch, in_place
from hotswap.backends.torch.coded import Coding, keeps_by_default, linear_weights, prepare
from hotswap.backends.torch.dequantize import Dequantizer, original_dtype
from hotswap.backends.torch.device import Released, out_of_memory_mapped, touch
from hotswap.backends.torch.examine import examine
from hotswap.backends.torch.forward import LocalForward
from hotswap.backends.torch.identity import fingerprint_of, identity, way_of
from hotswap.backends.torch.kv import KVCache, LayerShape, bytes_per_token
from hotswap.backends.torch.loading import KVBudget, LoadedModel, Loader
from hotswap.backends.torch.modeling import Skeleton, SkeletonCache, main_dtype
from hotswap.backends.torch.packed_cache import PackedCache, PackedWeights
from hotswap.backends.torch.preflight import preflight
from hotswap.backends.torch.weights import check_world_size, convert, recast
from hotswap.errors import InstanceLost, OutOfMemory
from hotswap.kernels.targets import runs_triton
from hotswap.model import Manifest, ModelCard, TensorSpec
from hotswap.request import ModelId
from hotswap.store import SupportsLend, WeightStore

__all__ = ["LocalLoader", "LocalModel"]


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """A flat buffer and what lies in it: memory of the engine, or of the store while `loan` is open.

    `coding` says which of the tensors are codes that are computed with as they are.
    """

    flat: Tensor
    specs: tuple[TensorSpec, ...]
    loan: AsyncExitStack | None = None
    coding: Coding | None = None

    @property
    def own_bytes(self) -> int:
        """Memory of the engine that they take; what is lent takes none."""
        return 0 if self.loan else len(self.flat)


@dataclass(frozen=True, slots=True, eq=False)
class LocalModel(LoadedModel):
    """A model whose weights are on the device and bound to its modules.

    Attributes:
        loader: Who made it, and takes it back.
        card: What the fleet knows of it.
        skeleton: The modules, borrowed.
        weights: What their parameters are views of.
        packed: The packed copies of their linear weights, as far as they are made.
        layers: What each layer keeps of a token.
        context: The longest request, in tokens.
        eos_token_ids: Its end tokens.
        vocabulary: Token ids are less than this.
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

    @property
    def own_bytes(self) -> int:
        return self.weights.own_bytes

    def targets(self) -> Mapping[str, Target]:
        return self.loader.targets(self)

    async def pack(self) -> None:
        while await anyio.to_thread.run_sync(self.loader.pack_next, self):
            pass

    async def open(self, budget: KVBudget) -> LocalForward:
        return await anyio.to_thread.run_sync(self.loader.open, self, budget)

    async def release(self) -> None:
        await self.loader.release(self)


class LocalLoader(Loader):
    """Makes models that this process computes, on one device, and takes them back.

    On a CPU, weights that the store can lend are used where they lie, however many engines do: loading copies
    nothing, and the budget, here as in `weight_bytes`, counts nothing for them, since they take the store's.
    Quantised weights are made whole in memory of the engine, and count as what they become; or those of
    linear layers stay codes, are lent like others, and count as codes.

    Everything between two awaits is cheap; files, copies and modules are dealt with in worker threads. What
    an interrupted load held is given back before the interruption goes on.
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
        block_tokens: int,
        invariant: bool,
        notifier: StatusNotifier,
    ) -> None:
        super().__init__(memory_bytes, notifier)
        self._device, self._dtype, self._keep_fp8 = device, dtype, keep_fp8
        self._buffers, self._released = FlatBuffers(device, idle_bytes), Released(device)
        self._packed = PackedCache(packed_bytes)
        self._skeletons = skeletons
        self._block_tokens, self._invariant = block_tokens, invariant
        self._others_bytes = 0

    async def start(self) -> None:
        try:
            await anyio.to_thread.run_sync(touch, self._device)
        except RuntimeError as exc:
            raise InstanceLost(f"{self._device} fails ({exc}); restart the process.") from exc
        # Whoever asks again is answered at once.
        await anyio.to_thread.run_sync(runs_triton, self._device)

    async def load(self, card: ModelCard, store: WeightStore, *, others_bytes: int) -> LocalModel:
        manifest = await store.manifest(card.id)
        check_world_size(manifest, 1)
        skeleton = await anyio.to_thread.run_sync(self._borrow_skeleton, manifest.config)
        try:
            weights = await self._weights(manifest, store, others_bytes, skeleton)
        except BaseException:
            self._skeletons.give_back(skeleton, self._device)
            raise
        try:
            return await anyio.to_thread.run_sync(self._bind, card, manifest, skeleton, weights)
        except BaseException:
            self._skeletons.give_back(skeleton, self._device)
            await self._free(weights)
            raise

    async def release(self, model: LocalModel) -> None:
        """Free the weights of a model that nobody runs any more; not interrupted by a cancellation."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._packed.release, model.packed)
        self._skeletons.give_back(model.skeleton, self._device)
        await self._free(model.weights)

    def abandon(self) -> None:
        pass

    async def stop(self) -> None:
        """Free the buffers and the packed weights that are kept for the next load."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._buffers.clear)
            await anyio.to_thread.run_sync(self._packed.clear)

    @property
    def packed_bytes(self) -> int:
        return self._packed.used_bytes

    def pack_next(self, model: LocalModel) -> bool:
        """Pack one more linear layer, on the thread that calls; false if there is none left to be packed."""
        return self._packed.pack_next(model.packed)

    async def reclaimed(self) -> None:
        await self._released.freed()

    def open(self, model: LocalModel, budget: KVBudget) -> LocalForward:
        """Return a model about to serve with its KV cache. Blocking.

        Raises:
            OutOfMemory: not one block would fit.
        """
        room = self.memory_bytes - self.weight_bytes
        num_blocks = budget.num_blocks(model.layers, model.context, room)
        if num_blocks < 1:
            raise OutOfMemory(
                f"Model {model.card.id!r} leaves {room:,} bytes for KV blocks of "
                f"{budget.block_tokens * bytes_per_token(model.layers):,} bytes each; give the engine more."
            )
        self._others_bytes = (num_blocks + 1) * budget.block_tokens * bytes_per_token(model.layers)
        with out_of_memory_mapped(f"the KV blocks of {model.card.id!r}"):
            cache = KVCache(num_blocks, budget.block_tokens, self._device, model.layers)
            cache.build_kernels()
        self._released.watch(*cache.tensors)  # which go with the model, before `reclaimed` is asked
        self._fit()
        return LocalForward(
            model.skeleton.module,
            cache,
            invariant=self._invariant,
            linear_only=model.skeleton.linear_only,
            chore=partial(self.pack_next, model),
        )

    def _borrow_skeleton(self, config_text: str) -> Skeleton:
        """Refuse what a look at the config tells cannot be served, before a byte of weights is read."""
        examine(config_text)
        return self._skeletons.borrow(config_text, self._device)

    def targets(self, model: LocalModel) -> Mapping[str, Target]:
        """The layers of a loaded model that adapters may change, by name."""
        skeleton, way = model.skeleton, f"{self._device} {way_of(model.skeleton)}"
        if way not in skeleton.targets:
            odd = self._skeletons.unadaptable[skeleton.key, way]
            skeleton.targets[way] = targets(skeleton.module, odd)
        return skeleton.targets[way]

    async def _weights(
        self, manifest: Manifest, store: WeightStore, others_bytes: int, skeleton: Skeleton
    ) -> Weights:
        """Borrow or read the weights, and convert what is stored in another way than is wanted."""
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
        return keeps_by_default(self._device, self._dtype or original_dtype(manifest))

    async def _borrow(self, manifest: Manifest, store: WeightStore) -> Weights | None:
        """The store's own memory, if a CPU may use it and the store can lend it."""
        if self._device.type != "cpu" or not isinstance(store, SupportsLend):
            return None
        async with AsyncExitStack() as loan:
            buffer = await loan.enter_async_context(store.lend(manifest))
            if buffer is None:
                return None
            return Weights(in_place(buffer.data), manifest.tensors, loan.pop_all())

    async def _read(self, manifest: Manifest, store: WeightStore, others_bytes: int) -> Weights:
        flat = await self._take(manifest.model, manifest.buffer_bytes, others_bytes)
        try:
            await fetch(store, manifest, flat)
        except BaseException:
            await self._give(flat)
            raise
        return Weights(flat, manifest.tensors)

    async def _recast(
        self, model: ModelId, weights: Weights, dtype: torch.dtype, others_bytes: int
    ) -> Weights:
        specs, size_bytes = recast(weights.specs, main_dtype(weights.specs), dtype)
        flat = await self._take(model, size_bytes, others_bytes)
        try:
            await anyio.to_thread.run_sync(convert, weights.flat, weights.specs, flat, specs)
        except BaseException:
            await self._give(flat)
            raise
        return Weights(flat, specs)

    async def _dequantized(
        self, manifest: Manifest, store: WeightStore, others_bytes: int, dequantizer: Dequantizer
    ) -> Weights:
        """Make whole what is not kept, from the store's memory or within the buffer it is read into."""
        coding = None
        if dequantizer.kept:
            dtype = self._dtype or dequantizer.before
            coding = Coding(dequantizer.kept, dequantizer.scheme, dequantizer.before, dtype)
        loan = await self._borrow(manifest, store)
        if loan and dequantizer.as_stored:
            return replace(loan, specs=dequantizer.specs, coding=coding)
        try:
            size_bytes = dequantizer.size_bytes if loan else dequantizer.room_bytes
            flat = await self._take(manifest.model, size_bytes, others_bytes)
            try:
                stored = loan.flat if loan else dequantizer.stored_part(flat)
                if loan is None:
                    await fetch(store, manifest, stored)
                await anyio.to_thread.run_sync(dequantizer.run, stored, flat)
            except BaseException:
                await self._give(flat)
                raise
        finally:
            if loan:
                await self._free(loan)
        return Weights(flat, dequantizer.specs, coding=coding)

    async def _free(self, weights: Weights) -> None:
        if weights.loan is None:
            await self._give(weights.flat)
        else:
            with anyio.CancelScope(shield=True):
                await weights.loan.aclose()

    async def _take(self, model: ModelId, size_bytes: int, others_bytes: int) -> Tensor:
        self._check_room(model, size_bytes, others_bytes)
        self.weight_bytes += size_bytes
        self._others_bytes = others_bytes
        try:
            await anyio.to_thread.run_sync(self._fit)
            with out_of_memory_mapped(f"the weights of {model!r}"):
                flat = await anyio.to_thread.run_sync(self._buffers.take, size_bytes)
        except BaseException:
            self.weight_bytes -= size_bytes
            raise
        self.weight_bytes += len(flat) - size_bytes
        return flat

    async def _give(self, flat: Tensor) -> None:
        self._released.watch(flat)
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._buffers.give, flat)
            self.weight_bytes -= len(flat)
            # Layers of a model that serves beside it may be packed again.
            await anyio.to_thread.run_sync(self._fit)

    def _fit(self) -> None:
        """Leave packed weights what weights and KV blocks do not take. May free much."""
        self._packed.fit(self.memory_bytes - self.weight_bytes - self._others_bytes)

    def _bind(
        self,
        card: ModelCard,
        manifest: Manifest,
        skeleton: Skeleton,
        weights: Weights,
    ) -> LocalModel:
        coding = weights.coding
        if coding is not None:  # a module with several names is bound by one of them
            coding = replace(coding, names=coding.names & skeleton.shapes.keys())
        skeleton.bind(weights.flat, weights.specs, coding)
        with out_of_memory_mapped(f"the kernels of {card.id!r}"):
            prepare(skeleton.coded, skeleton.dtype)
        packed = self._packed.acquire(identity(manifest), skeleton.linears)
        try:
            return self._known(card, manifest, skeleton, weights, packed)
        except BaseException:
            self._packed.release(packed)
            raise

    def _known(
        self, card: ModelCard, manifest: Manifest, skeleton: Skeleton, weights: Weights, packed: PackedWeights
    ) -> LocalModel:
        """The model, whose architecture was found to be served exactly."""
        key = (skeleton.key, f"{self._device} {way_of(skeleton)}")
        layers = self._skeletons.verified.get(key)
        if layers is None:
            with (
                out_of_memory_mapped(f"the first pass of {card.id!r}"),
                observed(skeleton.module) as unadaptable,
            ):
                layers = preflight(
                    skeleton,
                    self._device,
                    block_tokens=self._block_tokens,
                    invariant=self._invariant,
                )
            # Whoever finds the architecture verified asks for these, so they are there before.
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
            fingerprint=fingerprint_of(manifest, f"{self._device.type} {way_of(skeleton)}"),
        )

    def _check_room(self, model: ModelId, size_bytes: int, others_bytes: int) -> None:
        room = self.memory_bytes - self.weight_bytes - others_bytes
        if size_bytes > room:
            raise OutOfMemory(
                f"The weights of {model!r} take {size_bytes:,} bytes of {self._device}, which has "
                f"{max(0, room):,} left; unload a model or give the engine more memory."
            )
