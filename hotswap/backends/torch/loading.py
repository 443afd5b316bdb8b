"""The interfaces `Loader` and `LoadedModel`: models in the engine's process, or sharded over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hotswap.backends.notifier import Observed, StatusNotifier
from hotswap.backends.torch.adapters.targets import Target
from hotswap.backends.torch.device_memory import DeviceMemory
from hotswap.backends.torch.forward import Forward
from hotswap.backends.torch.kv import KVCache, LayerShape, blocks_for, bytes_per_token, state_bytes
from hotswap.backends.torch.long_rope import LongRope
from hotswap.errors import OutOfMemory
from hotswap.model import ModelCard
from hotswap.request import ModelId
from hotswap.store import WeightStore

__all__ = ["KVBudget", "LoadedModel", "Loader"]


@dataclass(frozen=True, slots=True)
class KVBudget:
    """The limits of an engine's KV cache.

    Attributes:
        tokens: The capacity in tokens, if `size_bytes` is `None`; `None` for the memory that is left, less
            what weights of the same size take in a preload, but at least half of it.
        size_bytes: The capacity in bytes, or `None`.
        block_tokens: Tokens per block.
        max_requests: The maximum number of running requests.
        adapter_bytes: What adapters may take beside weights and blocks.
        snapshot_bytes: The limit of snapshots of recurrent states; `None` for as many as `max_requests`, and
            at most an eighth of the memory that weights and the states of requests leave.
        is_elastic: Whether the capacity is that of the largest pool, and what a request can have depends on
            the model's weights.
    """

    tokens: int | None
    size_bytes: int | None
    block_tokens: int
    max_requests: int
    adapter_bytes: int = 0
    snapshot_bytes: int | None = None
    is_elastic: bool = False

    def num_snapshots(self, *ranks: tuple[tuple[LayerShape, ...], int]) -> int:
        """Return how many snapshots of states there are; each rank has its layers' part of every one.

        Args:
            ranks: What a request keeps in each layer of a rank, and the memory that weights leave there.
        """
        parts = [(each, room_bytes) for layers, room_bytes in ranks if (each := state_bytes(layers))]
        if not parts:
            return 0
        if self.snapshot_bytes is not None:
            return self.snapshot_bytes // sum(each for each, _ in parts)
        left = (max(0, room_bytes - self.max_requests * each) // 8 // each for each, room_bytes in parts)
        return min(self.max_requests, *left)

    def state_bytes(self, layers: tuple[LayerShape, ...], num_snapshots: int) -> int:
        """Return the bytes of the recurrent states of all running requests, and of all snapshots."""
        return (self.max_requests + num_snapshots) * state_bytes(layers)

    @property
    def most_tokens(self) -> int | None:
        """How many tokens a request can have in the cache; `None` if that depends on the model."""
        if self.is_elastic or self.size_bytes is not None or self.tokens is None:
            return None
        return self.tokens // self.block_tokens * self.block_tokens

    @property
    def takes_rest(self) -> bool:
        """Whether the capacity is what memory is left."""
        return self.size_bytes is None and self.tokens is None

    def of_ranks(self, layers: tuple[LayerShape, ...]) -> KVBudget:
        """Return the budget of each rank, in tokens: a rank has a part of the bytes of a token.

        Args:
            layers: What a request keeps in each layer of all ranks.
        """
        if self.size_bytes is None:
            return self
        return replace(self, tokens=self.size_bytes // max(1, bytes_per_token(layers)), size_bytes=None)

    def num_blocks(
        self,
        layers: tuple[LayerShape, ...],
        context: int,
        room_bytes: int,
        own_bytes: int = 0,
        *,
        num_snapshots: int | None = None,
    ) -> int:
        """Return the number of blocks: the budget, limited by free memory and by what requests can fill.

        Args:
            layers: What a request keeps in each layer.
            context: The maximum length of a request, in tokens.
            room_bytes: The free memory, of which recurrent states take their part first.
            own_bytes: What the weights of the model take, for which a preload gets as much.
            num_snapshots: How many snapshots of states there are. Default: `None`, those of one rank.
        """
        if num_snapshots is None:
            num_snapshots = self.num_snapshots((layers, room_bytes))
        room_bytes -= self.state_bytes(layers, num_snapshots)
        # A model without attention has blocks of no size, by which tokens are counted alone.
        block_bytes = max(1, self.block_tokens * bytes_per_token(layers))
        if self.size_bytes is not None:
            wanted = self.size_bytes // block_bytes
        elif self.tokens is not None:
            wanted = self.tokens // self.block_tokens
        else:
            wanted = (room_bytes - min(own_bytes, room_bytes // 2)) // block_bytes
        useful = self.max_requests * blocks_for(context, self.block_tokens)
        # Block 0 is for padding rows and takes memory too.
        return min(wanted, useful, room_bytes // block_bytes - 1)

    def no_room(self, model: ModelId, layers: tuple[LayerShape, ...], room_bytes: int) -> OutOfMemory:
        """Return the error for a model that leaves no room for one block beside the states."""
        block_bytes = self.block_tokens * bytes_per_token(layers)
        count = self.num_snapshots((layers, room_bytes))
        state_bytes = self.state_bytes(layers, count)
        states = f"recurrent states of {self.max_requests} requests"
        states += f" and {count:,} snapshots" if count else ""
        taken = f" for {states}, which take {state_bytes:,}, and" if state_bytes else ""
        cure = ", or lower its max_requests" + (" or snapshot_bytes" if count else "")
        return OutOfMemory(
            f"Model {model!r} leaves {room_bytes:,} bytes{taken} for KV blocks of {block_bytes:,} bytes "
            f"each; give the engine more{cure if state_bytes else ''}."
        )


class LoadedModel(ABC):
    """A model whose weights are on the device or devices that compute it.

    Attributes:
        card: The model's card.
        context: The maximum length of a request, in tokens.
        eos_token_ids: The token ids that end a generation.
        vocabulary: The number of token ids.
        fingerprint: A hash of the weights and the format they are computed in, equal in all processes; empty
            if the store takes no checksums.
        long_rope: When RoPE factors for long texts are taken; `None` if factors depend on no length.
    """

    card: ModelCard
    context: int
    eos_token_ids: frozenset[int]
    vocabulary: int
    fingerprint: str = ""
    long_rope: LongRope | None = None

    @property
    @abstractmethod
    def own_bytes(self) -> int:
        """The memory of the engine that its weights take, in bytes."""

    def targets(self) -> Mapping[str, Target]:
        """Return the layers that can have adapters, by name; none if other processes compute."""
        return {}

    async def pack(self) -> None:  # noqa: B027 - optional
        """Pack linear weights into a faster layout, if memory allows; cancelled, it keeps partial work."""

    def fits(self, cache: KVCache, budget: KVBudget) -> bool:
        """Whether `open` would allocate as many KV blocks of the same format as a cache has."""
        return False

    @abstractmethod
    async def open(self, budget: KVBudget, kept: KVCache | None = None) -> Forward:
        """Allocate the KV cache and return the forward pass.

        Args:
            budget: The limits of the cache.
            kept: A cache that is used instead, which `fits`.

        Raises:
            OutOfMemory: the memory does not suffice for one block.
            InstanceLost: a rank failed.
        """

    @abstractmethod
    async def release(self) -> None:
        """Free its memory, KV blocks included. It must not be used afterwards. Shielded from cancellation."""


class Loader(ABC):
    """Loads models within a memory budget.

    A load that fails or is cancelled releases its memory before the error or the cancellation propagates.

    Args:
        memory_bytes: The budget of weights and KV blocks.
        notifier: Notified when `weight_bytes` changes.
        memory: Where weights and KV blocks are leased. Default: `None`, nowhere.

    Attributes:
        memory_bytes: The budget.
        memory: Where weights and KV blocks are leased.
        weight_bytes: The part of it that weights take now; changed on the event loop only.
        can_preload: Whether a second model may be loaded beside one that serves.
        packed_bytes: The memory of packed weight copies, which are dropped if the memory is needed.
    """

    weight_bytes: Observed[int] = Observed(lambda loader: loader.notifier.state_changed())
    can_preload: bool = True

    def __init__(
        self, memory_bytes: int, notifier: StatusNotifier, memory: DeviceMemory | None = None
    ) -> None:
        self.memory_bytes, self.notifier = memory_bytes, notifier
        self.memory = DeviceMemory() if memory is None else memory
        self.weight_bytes = 0

    @property
    def packed_bytes(self) -> int:
        return 0

    def check_room(self, model: ModelId, size_bytes: int, others_bytes: int, device: object) -> None:
        """Raise `OutOfMemory` unless weights fit into the budget beside what it has already."""
        room = self.memory_bytes - self.weight_bytes - others_bytes
        if size_bytes > room:
            raise OutOfMemory(
                f"The weights of {model!r} take {size_bytes:,} bytes of {device}, which has {max(0, room):,} "
                "left; unload a model or give the engine more memory."
            )

    @abstractmethod
    async def start(self) -> None:
        """Prepare for loads: called before the first one, and again after the engine was lost.

        Raises:
            InstanceLost: the device fails, or the ranks do not start.
        """

    @abstractmethod
    async def load(self, card: ModelCard, store: WeightStore, *, others_bytes: int) -> LoadedModel:
        """Load a model's weights and bind its modules.

        Args:
            card: The model's card.
            store: The store that has its weights.
            others_bytes: The part of the budget that KV blocks take now.

        Raises:
            OutOfMemory: the weights exceed the free memory.
            UnsupportedModel: the architecture cannot be served exactly, or the model is sharded for another
                number of ranks.
            ShardCorrupt: the store's bytes do not fit the architecture.
            StoreError: the store failed to read them.
            InstanceLost: a rank failed.
        """

    def keep(self, cache: KVCache) -> None:
        """Note that `reclaimed` is not to wait for a cache, which the next model will use."""
        raise NotImplementedError("a loader whose models fit no cache is not asked to keep one")

    @abstractmethod
    def abandon(self) -> None:
        """Make steps and loads in progress fail at once, for an engine that is lost. Thread-safe."""

    @abstractmethod
    async def stop(self) -> None:
        """Undo `start`; models that were not released are dropped. Shielded from cancellation."""

    @abstractmethod
    async def reclaimed(self) -> None:
        """Wait until the memory of released models is free on the device. No model may serve meanwhile.

        Raises:
            MemoryNotReclaimed: it is still in use after a few seconds.
        """
