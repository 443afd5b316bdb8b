"""Loads models that are sharded over rank processes: all ranks load their shard, or none keeps it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain

import anyio
import torch
from anyio.lowlevel import checkpoint_if_cancelled
from torch import Tensor

from hotswap.backends.layouts import require_modules
from hotswap.backends.notifier import StatusNotifier
from hotswap.backends.torch.compatibility import check_config
from hotswap.backends.torch.fingerprint import fingerprint_of
from hotswap.backends.torch.forward import MAX_SCORED_ROWS
from hotswap.backends.torch.kv import KVCache, LayerShape, bytes_per_token, state_bytes
from hotswap.backends.torch.loading import KVBudget, LoadedModel, Loader
from hotswap.backends.torch.modeling import Skeleton, SkeletonCache, main_dtype
from hotswap.backends.torch.parallel.forward import RankedForward
from hotswap.backends.torch.parallel.grid import Grid
from hotswap.backends.torch.parallel.messages import (
    Bind,
    BindRead,
    Command,
    Done,
    Drop,
    GetStats,
    OpenCache,
    ReadWeights,
)
from hotswap.backends.torch.parallel.part import Part, part_of
from hotswap.backends.torch.parallel.preflight import PREFLIGHT_ROWS, run_preflight
from hotswap.backends.torch.parallel.processes import Ranks
from hotswap.backends.torch.parallel.shared import SharedMemory
from hotswap.backends.torch.parallel.weights import PartWeights, Reader, digest_of
from hotswap.backends.torch.weights import check_world_size
from hotswap.errors import InstanceLost, OutOfMemory, UnsupportedModel
from hotswap.metered_store import MeteredStore
from hotswap.model import Manifest, ModelCard
from hotswap.store import WeightStore
from hotswap.worker_threads import run_in_thread

__all__ = ["RankedLoader", "RankedModel"]

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class RankedModel(LoadedModel):
    """A model that is loaded on all ranks.

    Attributes:
        loader: The loader that made it and releases it.
        card: The model's card.
        context: The maximum length of a request, in tokens.
        eos_token_ids: The token ids that end a generation.
        vocabulary: The number of token ids.
        layers: What a request keeps in each layer, by rank.
        rank_bytes: The memory of the weights, by rank.
        logits: `[slots, rows, num_logits]` in fp32, shared with the ranks.
        fingerprint: See `LoadedModel`; it covers how the ranks are arranged.
    """

    loader: RankedLoader
    card: ModelCard
    context: int
    eos_token_ids: frozenset[int]
    vocabulary: int
    layers: tuple[tuple[LayerShape, ...], ...]
    rank_bytes: tuple[int, ...]
    logits: Tensor
    fingerprint: str = ""

    @property
    def own_bytes(self) -> int:
        return sum(self.rank_bytes)

    async def open(self, budget: KVBudget, kept: KVCache | None = None) -> RankedForward:
        assert kept is None, "the caches of ranks are in their processes"
        return await self.loader.open(self, budget)

    async def release(self) -> None:
        await self.loader.release(self)


class RankedLoader(Loader):
    """Loads models on rank processes, which it starts and ends with the engine.

    Weights are read once on each machine, into memory that is shared with its ranks; on a CPU the ranks
    compute with it in place. Hosts of stages elsewhere read those of their ranks from stores of their own. A
    load binds the weights on every rank, and runs a
    preflight on all ranks if the architecture is new in its dtype. If any rank fails, all release the model.

    Each rank may use an equal part of `memory_bytes`; `weight_bytes` is the sum over all ranks.

    Args:
        ranks: The processes, not yet started.
        dtype: See `TorchEngine`.
        memory_bytes: The budget of weights and KV blocks on all ranks together.
        skeletons: The cache of modules, of which only names and shapes are used here.
        block_tokens: Tokens per KV block.
        max_requests: The maximum number of rows of logits of a step.
        died: Called on the event loop with a reason and a cause, when a rank ended by itself or did not reply
            in time.
        notifier: See `Loader`.
    """

    can_preload = False

    def __init__(
        self,
        ranks: Ranks,
        *,
        dtype: torch.dtype | None,
        memory_bytes: int,
        skeletons: SkeletonCache,
        block_tokens: int,
        max_requests: int,
        died: Callable[[str, Exception | None], None],
        notifier: StatusNotifier,
    ) -> None:
        super().__init__(memory_bytes, notifier)
        self._ranks, self._dtype, self._died = ranks, dtype, died
        self._skeletons = skeletons
        self._block_tokens, self._max_requests = block_tokens, max_requests
        self._layers: dict[tuple[str, torch.dtype], tuple[tuple[LayerShape, ...], ...]] = {}
        self._starts = False

    @property
    def grid(self) -> Grid:
        """How the ranks are arranged."""
        return self._ranks.grid

    @property
    def pids(self) -> tuple[int, ...]:
        """The process id of every rank that runs."""
        return self._ranks.pids

    async def start(self) -> None:
        failures = list[InstanceLost]()
        try:
            async with anyio.create_task_group() as watching:
                watching.start_soon(self._kill_if_cancelled)
                await run_in_thread(self._start_ranks, failures)
                self._starts = False
                watching.cancel_scope.cancel()
            await checkpoint_if_cancelled()
        except BaseException:
            await self.stop()
            raise
        if failures:
            raise failures[0]
        self._watch()

    async def stop(self) -> None:
        self._ranks.unwatch(asyncio.get_running_loop())
        self._ranks.kill()
        with anyio.CancelScope(shield=True):
            await run_in_thread(self._ranks.join)
        self.weight_bytes = 0

    def abandon(self) -> None:
        self._ranks.kill()

    async def reclaimed(self) -> None:
        """Return at once: ranks have freed a model's memory when they reply to its release."""

    async def load(self, card: ModelCard, store: WeightStore, *, others_bytes: int) -> RankedModel:
        manifest = await store.manifest(card.id)
        require_modules(manifest.model, manifest)
        check_world_size(manifest, self.grid.tp)
        skeleton = await run_in_thread(self._borrow_skeleton, manifest.config)
        try:
            parts = await run_in_thread(self._parts, skeleton)
            rank_bytes = Reader(manifest, parts, self._dtype).rank_bytes
            self._check_room(card, rank_bytes)
            weights = await self._read(manifest, parts, store)
            try:
                return await self._hand_over(card, manifest, skeleton, weights, rank_bytes)
            finally:
                for part in weights:
                    part.memory.close()
        finally:
            self._skeletons.give_back(skeleton, _CPU)

    async def open(self, model: RankedModel, budget: KVBudget) -> RankedForward:
        """Allocate the KV blocks and recurrent states of every rank.

        As many as the rank with the least free memory has room for: blocks and slots are equal on all.

        Raises:
            OutOfMemory: the memory of a rank does not suffice for one block beside the states.
            InstanceLost: a rank failed.
        """
        share, size = self.memory_bytes // self.grid.size, budget.block_tokens
        rooms = [
            (layers, share - taken) for layers, taken in zip(model.layers, model.rank_bytes, strict=True)
        ]
        count, every = budget.num_snapshots(*rooms), tuple(chain.from_iterable(model.layers))
        part = budget.of_ranks(every)
        num_blocks = min(
            part.num_blocks(layers, model.context, room, num_snapshots=count) for layers, room in rooms
        )
        if num_blocks < 1:
            states = (
                f" beside recurrent states of {budget.max_requests} requests" if state_bytes(every) else ""
            )
            raise OutOfMemory(
                f"Model {model.card.id!r} leaves no memory for KV blocks{states} on one of {self.grid.size} "
                f"ranks, which may use {share:,} bytes each; give the engine more memory"
                f"{', or lower its max_requests' if states else ''}."
            )
        num_slots = budget.max_requests + count
        await self._ask([OpenCache(num_blocks, size, num_slots, layers) for layers in model.layers])
        kv_bytes = (num_blocks + 1) * bytes_per_token(every) * size
        return RankedForward(
            self._ranks,
            model.logits,
            num_blocks=num_blocks,
            size_bytes=kv_bytes + budget.state_bytes(every, count),
            block_tokens=size,
            keeps_states=bool(state_bytes(every)),
            num_snapshots=count,
            layers=model.layers,
        )

    async def release(self, model: RankedModel) -> None:
        """Release a model on every rank. Shielded from cancellation."""
        await self._drop()
        self.weight_bytes -= model.own_bytes

    async def sent_bytes(self) -> tuple[int, ...]:
        """Return the bytes that each rank has sent to the next stage since its start. Not during steps."""
        return tuple(done.sent_bytes for done in await self._ask([GetStats()] * self.grid.size))

    # ------------------------------------------------------------------ private

    def _start_ranks(self, failures: list[InstanceLost]) -> None:
        try:
            self._ranks.start()
        except InstanceLost as exc:
            failures.append(exc)

    async def _kill_if_cancelled(self) -> None:
        self._starts = True
        try:
            await anyio.sleep_forever()
        finally:
            if self._starts:  # the thread, which is waited for, ends soon then
                self._ranks.kill()

    def _borrow_skeleton(self, config_text: str) -> Skeleton:
        """Borrow the modules of a config; refuses architectures that its check refuses, before any read."""
        check_config(config_text)
        skeleton = self._skeletons.borrow(config_text, _CPU)
        if skeleton.long_rope is not None:
            self._skeletons.give_back(skeleton, _CPU)
            raise UnsupportedModel(
                f"The {skeleton.config.model_type!r} model chooses RoPE factors by the length of a text, "
                "which an engine of several ranks does not; serve it with tp=1 and pp=1."
            )
        return skeleton

    def _parts(self, skeleton: Skeleton) -> list[Part]:
        hidden_size = int(skeleton.config.get_text_config().hidden_size)
        if self.grid.pp > 1 and hidden_size % self.grid.tp:
            raise UnsupportedModel(
                f"A hidden state of {hidden_size} cannot be sent in {self.grid.tp} equal slices; choose "
                "another tp."
            )
        return [part_of(skeleton, position) for position in self.grid.positions]

    async def _read(
        self, manifest: Manifest, parts: Sequence[Part], store: WeightStore
    ) -> tuple[PartWeights, ...]:
        """Return the weights of ranks on this machine, while hosts elsewhere read those of theirs.

        If one fails or the load is cancelled, all release what they have read.
        """
        here = [part for part, is_here in zip(parts, self._ranks.is_here, strict=True) if is_here]
        reader = Reader(manifest, here, self._dtype)
        if len(here) == len(parts):
            return await reader.read(store)
        weights: tuple[PartWeights, ...] = ()
        failures = list[Exception]()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._read_elsewhere, manifest, store, failures, tasks.cancel_scope)
                try:
                    weights = await reader.read(store)
                except Exception as exc:
                    failures.append(exc)
                    tasks.cancel_scope.cancel()
            if failures:
                raise failures[0]
        except BaseException as exc:
            for part in weights:
                part.memory.close()
            if isinstance(exc, InstanceLost):
                self._died("a rank failed during a load", exc)
            await self._drop()
            raise
        return weights

    async def _read_elsewhere(
        self, manifest: Manifest, store: WeightStore, failures: list[Exception], scope: anyio.CancelScope
    ) -> None:
        try:
            digest = await run_in_thread(digest_of, manifest)
            command = ReadWeights(manifest.model, digest, self._dtype)
            for read in await self._ranks.read_elsewhere(command):
                if isinstance(store, MeteredStore):
                    store.count(read.num_bytes, read.tier, buffered=read.buffered)
        except Exception as exc:
            failures.append(exc)
            scope.cancel()

    def _check_room(self, card: ModelCard, rank_bytes: Sequence[int]) -> None:
        share, largest = self.memory_bytes // self.grid.size, max(rank_bytes)
        if largest > share:
            raise OutOfMemory(
                f"The weights of {card.id!r} take {largest:,} bytes of one rank, which may use {share:,} of "
                f"the engine's {self.memory_bytes:,}; give the engine more memory or more ranks."
            )

    async def _hand_over(
        self,
        card: ModelCard,
        manifest: Manifest,
        skeleton: Skeleton,
        weights: Sequence[PartWeights],
        rank_bytes: tuple[int, ...],
    ) -> RankedModel:
        """Bind the weights on every rank; release them on all if a rank fails or the load is cancelled."""
        # A rank that refuses a model during a preflight ends: that is the load's error, not an instance loss.
        self._ranks.unwatch(asyncio.get_running_loop())
        try:
            logits, layers = await run_in_thread(self._bind, manifest, skeleton, weights)
        except InstanceLost as exc:
            self._died("a rank failed during a load", exc)
            raise
        except UnsupportedModel:
            # It failed within a step, in which the state of the other ranks is unknown.
            await self._restart_ranks()
            raise
        except BaseException:
            self._watch()
            await self._drop()
            raise
        self._watch()
        self.weight_bytes += sum(rank_bytes)
        positions = skeleton.max_positions or card.max_context_tokens
        return RankedModel(
            loader=self,
            card=card,
            context=min(card.max_context_tokens, positions),
            eos_token_ids=frozenset(card.eos_token_ids or manifest.eos_token_ids),
            vocabulary=skeleton.vocabulary,
            layers=layers,
            rank_bytes=rank_bytes,
            logits=logits,
            fingerprint=fingerprint_of(manifest, self._format(weights)),
        )

    def _format(self, weights: Sequence[PartWeights]) -> str:
        """Return everything but the stored weights that the bits of KV blocks and their order depend on."""
        dtype = main_dtype([spec for part in weights for spec in part.specs])
        return f"{self._ranks.devices[0].split(':')[0]} {dtype} tp={self.grid.tp} pp={self.grid.pp}"

    def _bind(
        self, manifest: Manifest, skeleton: Skeleton, weights: Sequence[PartWeights]
    ) -> tuple[Tensor, tuple[tuple[LayerShape, ...], ...]]:
        num_rows = max(self._max_requests + MAX_SCORED_ROWS, PREFLIGHT_ROWS)
        shape = (self.grid.pp, num_rows, skeleton.num_logits)
        with ExitStack() as opened:
            logits = opened.enter_context(
                SharedMemory.make(shape[0] * shape[1] * shape[2] * torch.float32.itemsize)
            )
            view = logits.tensor.view(torch.float32).view(shape)
            commands: list[Command] = [BindRead()] * self.grid.size
            files: list[Sequence[int]] = [()] * self.grid.size
            here = (rank for rank, is_here in enumerate(self._ranks.is_here) if is_here)
            for rank, part in zip(here, weights, strict=True):
                commands[rank] = Bind(manifest.config, part.specs, part.memory.size_bytes, shape)
                files[rank] = part.memory.file, logits.file
            self._ranks.call(commands, files)
        dtype = main_dtype([spec for part in weights for spec in part.specs])
        key = (skeleton.key, dtype)
        if key not in self._layers:
            self._layers[key] = run_preflight(
                self._ranks,
                view,
                kind=skeleton.config.model_type,
                vocabulary=skeleton.vocabulary,
                block_tokens=self._block_tokens,
                dtype=dtype,
            )
        return view, self._layers[key]

    async def _drop(self) -> None:
        with anyio.CancelScope(shield=True):
            with suppress(InstanceLost):  # an ended process has no memory to free
                await self._ask([Drop()] * self.grid.size)

    async def _ask(self, commands: Sequence[Command]) -> list[Done]:
        """Run a command on every rank; if one fails or does not reply in time, the instance is lost."""
        try:
            return await run_in_thread(self._ranks.call, commands)
        except InstanceLost as exc:
            self._died("a rank failed to run a command", exc)
            raise

    async def _restart_ranks(self) -> None:
        with anyio.CancelScope(shield=True):
            await self.stop()
            try:
                await self.start()
            except InstanceLost as exc:
                self._died("its ranks could not be restarted", exc)
                raise

    def _watch(self) -> None:
        self._ranks.watch(asyncio.get_running_loop(), self._note_death)

    def _note_death(self, reason: str) -> None:
        self._died(reason, None)
