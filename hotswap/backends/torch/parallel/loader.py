"""From a manifest to a model that ranks compute: all of them have it, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import anyio
import anyio.to_thread
import torch
from torch import Tensor

from hotswap.backends.notifier import StatusNotifier
from hotswap.backends.torch.examine import examine
from hotswap.backends.torch.kv import LayerShape
from hotswap.backends.torch.loading import KVBudget, LoadedModel, Loader
from hotswap.backends.torch.modeling import Skeleton, SkeletonCache, main_dtype
from hotswap.backends.torch.parallel.forward import RankedForward
from hotswap.backends.torch.parallel.messages import Ask, Bind, Command, Done, Drop, OpenCache
from hotswap.backends.torch.parallel.part import Part, part_of
from hotswap.backends.torch.parallel.places import Grid, Place
from hotswap.backends.torch.parallel.processes import Ranks
from hotswap.backends.torch.parallel.shared import SharedMemory
from hotswap.backends.torch.parallel.trial import TRIAL_ROWS, run_trial
from hotswap.backends.torch.parallel.weights import PartWeights, Reader
from hotswap.backends.torch.weights import check_world_size
from hotswap.errors import InstanceLost, OutOfMemory, UnsupportedModel
from hotswap.model import Manifest, ModelCard
from hotswap.store import WeightStore

__all__ = ["RankedLoader", "RankedModel"]

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class RankedModel(LoadedModel):
    """A model of which every rank has its part.

    Attributes:
        loader: Who made it, and takes it back.
        card: What the fleet knows of it.
        context: The longest request, in tokens.
        eos_token_ids: Its end tokens.
        vocabulary: Token ids are less than this.
        layers: What the layers of each rank keep of a token.
        rank_bytes: What the weights of each rank take.
        logits: `[slots, rows, num_logits]` in fp32, shared with the ranks.
    """

    loader: RankedLoader
    card: ModelCard
    context: int
    eos_token_ids: frozenset[int]
    vocabulary: int
    layers: tuple[tuple[LayerShape, ...], ...]
    rank_bytes: tuple[int, ...]
    logits: Tensor

    @property
    def own_bytes(self) -> int:
        return sum(self.rank_bytes)

    async def open(self, budget: KVBudget) -> RankedForward:
        return await self.loader.open(self, budget)

    async def release(self) -> None:
        await self.loader.release(self)


class RankedLoader(Loader):
    """Makes models that ranks compute, processes of their own, and ends them with the engine.

    The store stays in the engine's process. It is read once, into memory that is shared with the ranks; on a
    CPU they compute with it there. Loads have two phases: every rank is given its part, and only when all of
    them have it is there a model; an architecture that comes for the first time in its dtype must also show
    in a trial that they compute the right logits together. If one fails, all let go.

    Each rank may use an equal share of `memory_bytes`; `weight_bytes` counts all ranks together.

    Args:
        ranks: The processes, not yet started.
        dtype: See `TorchEngine`.
        memory_bytes: What weights and KV blocks of all ranks may take together.
        skeletons: Modules kept between loads, of which only names and shapes are used here.
        block_tokens: Tokens of a KV block.
        max_requests: How many rows of logits a step may have.
        died: Called by the event loop, when a rank ended by itself, or said nothing when it was waited for.
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

    @property
    def grid(self) -> Grid:
        """How the ranks are arranged."""
        return self._ranks.grid

    @property
    def pids(self) -> tuple[int, ...]:
        """The process id of every rank that runs."""
        return self._ranks.pids

    async def start(self) -> None:
        await anyio.to_thread.run_sync(self._ranks.start)
        self._watch()

    async def stop(self) -> None:
        self._ranks.unwatch(asyncio.get_running_loop())
        self._ranks.kill()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._ranks.join)
        self.weight_bytes = 0

    def abandon(self) -> None:
        self._ranks.kill()

    async def reclaimed(self) -> None:
        """Ranks answer that they let go of a model only when they have."""

    async def load(self, card: ModelCard, store: WeightStore, *, others_bytes: int) -> RankedModel:
        manifest = await store.manifest(card.id)
        check_world_size(manifest, self.grid.tp)
        skeleton = await anyio.to_thread.run_sync(self._borrow_skeleton, manifest.config)
        try:
            parts = await anyio.to_thread.run_sync(self._parts, skeleton)
            reader = Reader(manifest, parts, self._dtype)
            self._check_room(card, reader.rank_bytes)
            weights = await reader.read(store)
            try:
                return await self._hand_over(card, manifest, skeleton, weights)
            finally:
                for part in weights:
                    part.memory.close()
        finally:
            self._skeletons.give_back(skeleton, _CPU)

    async def open(self, model: RankedModel, budget: KVBudget) -> RankedForward:
        """Have every rank make its KV blocks, as many as fit the fullest.

        Raises:
            OutOfMemory: not one would fit.
            InstanceLost: a rank failed.
        """
        share = self.memory_bytes // self.grid.size
        per_rank = list(zip(model.layers, model.rank_bytes, strict=True))
        num_blocks = min(budget.num_blocks(layers, model.context, share - size) for layers, size in per_rank)
        if num_blocks < 1:
            raise OutOfMemory(
                f"Model {model.card.id!r} leaves one of {self.grid.size} ranks, which may use {share:,} "
                "bytes each, no room for KV blocks; give the engine more."
            )
        await self._ask([OpenCache(num_blocks, budget.block_tokens, layers) for layers in model.layers])
        block_bytes = sum(layer.bytes_per_token for layers in model.layers for layer in layers)
        return RankedForward(
            self._ranks,
            model.logits,
            num_blocks=num_blocks,
            size_bytes=(num_blocks + 1) * block_bytes * budget.block_tokens,
            block_tokens=budget.block_tokens,
        )

    async def release(self, model: RankedModel) -> None:
        """Have every rank let go of a model. Cannot be interrupted."""
        await self._drop()
        self.weight_bytes -= model.own_bytes

    async def sent_bytes(self) -> tuple[int, ...]:
        """Return what each rank has sent to the next stage since it was started. Not while steps are run."""
        return tuple(done.sent_bytes for done in await self._ask([Ask()] * self.grid.size))

    # ------------------------------------------------------------------ private

    def _borrow_skeleton(self, config_text: str) -> Skeleton:
        """Refuse what a look at the config tells cannot be served, before a byte of weights is read."""
        examine(config_text)
        return self._skeletons.borrow(config_text, _CPU)

    def _parts(self, skeleton: Skeleton) -> list[Part]:
        hidden_size = int(skeleton.config.get_text_config().hidden_size)
        if self.grid.pp > 1 and hidden_size % self.grid.tp:
            raise UnsupportedModel(
                f"A hidden state of {hidden_size} cannot be sent in {self.grid.tp} equal slices; choose "
                "another tp."
            )
        return [part_of(skeleton, place) for place in self.grid.places]

    def _check_room(self, card: ModelCard, rank_bytes: Sequence[int]) -> None:
        share, largest = self.memory_bytes // self.grid.size, max(rank_bytes)
        if largest > share:
            raise OutOfMemory(
                f"The weights of {card.id!r} take {largest:,} bytes of one rank, which may use {share:,} of "
                f"the engine's {self.memory_bytes:,}; give the engine more memory or more ranks."
            )

    async def _hand_over(
        self, card: ModelCard, manifest: Manifest, skeleton: Skeleton, weights: Sequence[PartWeights]
    ) -> RankedModel:
        """Give every rank its part, and take all back if one of them fails or the load is interrupted."""
        rank_bytes = tuple(part.memory.size_bytes for part in weights)
        # A rank that refuses a model amid a trial ends. Whoever waits here is told why; nobody else is.
        self._ranks.unwatch(asyncio.get_running_loop())
        try:
            logits, layers = await anyio.to_thread.run_sync(self._bind, manifest, skeleton, weights)
        except InstanceLost as exc:
            self._died("a rank failed while it was given a model", exc)
            raise
        except UnsupportedModel:
            # In the middle of a step: where the other ranks are in theirs nobody knows.
            await self._start_anew()
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
        )

    def _bind(
        self, manifest: Manifest, skeleton: Skeleton, weights: Sequence[PartWeights]
    ) -> tuple[Tensor, tuple[tuple[LayerShape, ...], ...]]:
        shape = (self.grid.pp, max(self._max_requests, TRIAL_ROWS), skeleton.num_logits)
        with ExitStack() as opened:
            logits = opened.enter_context(
                SharedMemory.make(shape[0] * shape[1] * shape[2] * torch.float32.itemsize)
            )
            view = logits.tensor.view(torch.float32).view(shape)
            binds = [Bind(manifest.config, part.specs, part.memory.size_bytes, shape) for part in weights]
            self._ranks.call(binds, [(part.memory.file, logits.file) for part in weights])
        dtype = main_dtype([spec for part in weights for spec in part.specs])
        key = (skeleton.key, dtype)
        if key not in self._layers:
            self._layers[key] = run_trial(
                self._ranks,
                view,
                kind=skeleton.config.model_type,
                num_layers=skeleton.num_layers,
                vocabulary=skeleton.vocabulary,
                block_tokens=self._block_tokens,
                dtype=dtype,
            )
        return view, self._layers[key]

    async def _drop(self) -> None:
        with anyio.CancelScope(shield=True):
            with suppress(InstanceLost):  # with the process went what it held
                await self._ask([Drop()] * self.grid.size)

    async def _ask(self, commands: Sequence[Command]) -> list[Done]:
        """Have every rank carry out a command; where one fails to, also by its silence, all are lost."""
        try:
            return await anyio.to_thread.run_sync(self._ranks.call, commands)
        except InstanceLost as exc:
            self._died("a rank failed when it was asked for something", exc)
            raise

    async def _start_anew(self) -> None:
        with anyio.CancelScope(shield=True):
            await self.stop()
            try:
                await self.start()
            except InstanceLost as exc:
                self._died("its ranks could not be started anew", exc)
                raise

    def _watch(self) -> None:
        self._ranks.watch(asyncio.get_running_loop(), self._note_death)

    def _note_death(self, place: Place) -> None:
        self._died(f"the process of its {place} ended", None)
