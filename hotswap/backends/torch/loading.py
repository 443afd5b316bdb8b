"""What an engine asks of whatever holds its models: one process, or ranks that share the work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from hotswap.backends.notifier import Observed, StatusNotifier
from hotswap.backends.torch.adapters.targets import Target
from hotswap.backends.torch.forward import Forward
from hotswap.backends.torch.kv import LayerShape, blocks_for, bytes_per_token
from hotswap.model import ModelCard
from hotswap.store import WeightStore

__all__ = ["KVBudget", "LoadedModel", "Loader"]


@dataclass(frozen=True, slots=True)
class KVBudget:
    """How much KV memory an engine may use: `size_bytes` if given, else `tokens`."""

    tokens: int
    size_bytes: int | None
    block_tokens: int
    max_requests: int

    def num_blocks(self, layers: tuple[LayerShape, ...], context: int, room_bytes: int) -> int:
        """Blocks that the budget and the room allow, and that requests could ever fill."""
        block_bytes = self.block_tokens * bytes_per_token(layers)
        wanted = (
            self.tokens // self.block_tokens if self.size_bytes is None else self.size_bytes // block_bytes
        )
        useful = self.max_requests * blocks_for(context, self.block_tokens)
        # One block is everyone's padding, and is paid for like the others.
        return min(wanted, useful, room_bytes // block_bytes - 1)


class LoadedModel(ABC):
    """A model whose weights are where they are computed with.

    Attributes:
        card: What the fleet knows of it.
        context: The longest request, in tokens.
        eos_token_ids: Its end tokens.
        vocabulary: Token ids are less than this.
        fingerprint: The same for the same weights, served in the same way, in any process; empty where the
            store takes no checksums.
    """

    card: ModelCard
    context: int
    eos_token_ids: frozenset[int]
    vocabulary: int
    fingerprint: str = ""

    @property
    @abstractmethod
    def own_bytes(self) -> int:
        """Memory of the engine that its weights take."""

    def targets(self) -> Mapping[str, Target]:
        """The layers that adapters may change, by name; none where other processes compute."""
        return {}

    async def pack(self) -> None:  # noqa: B027 - a place for what some can do
        """Make it faster before it serves, as far as memory allows. Interrupted, it leaves what is done."""

    @abstractmethod
    async def open(self, budget: KVBudget) -> Forward:
        """Make KV blocks, and return what steps are computed with.

        Raises:
            OutOfMemory: not one block would fit.
            InstanceLost: a rank failed.
        """

    @abstractmethod
    async def release(self) -> None:
        """Free its memory, KV blocks included. Nobody may use it any more; cannot be interrupted."""


class Loader(ABC):
    """Makes loaded models within a budget of memory.

    What an interrupted load held is given back before the interruption goes on.

    Args:
        memory_bytes: The budget.
        notifier: Told when `weight_bytes` changes.

    Attributes:
        memory_bytes: As given.
        weight_bytes: What weights take of it now; changed on the event loop alone.
        can_preload: Whether a second model may be loaded beside one that serves.
        packed_bytes: What copies that make models faster take now; they go when the memory is wanted.
    """

    weight_bytes: Observed[int] = Observed(lambda loader: loader.notifier.state_changed())
    can_preload: bool = True

    def __init__(self, memory_bytes: int, notifier: StatusNotifier) -> None:
        self.memory_bytes, self.notifier = memory_bytes, notifier
        self.weight_bytes = 0

    @property
    def packed_bytes(self) -> int:
        return 0

    @abstractmethod
    async def start(self) -> None:
        """Start what is needed before the first load, and again after the engine was lost.

        Raises:
            InstanceLost: it cannot be started.
        """

    @abstractmethod
    async def load(self, card: ModelCard, store: WeightStore, *, others_bytes: int) -> LoadedModel:
        """Bring a model's weights to where they are computed with; KV blocks hold `others_bytes`.

        Raises:
            OutOfMemory: there is no room for the weights.
            UnsupportedModel: the architecture cannot be served exactly, or the model is cut for another
                number of ranks.
            ShardCorrupt: the store's bytes do not fit the architecture.
            StoreError: they could not be read.
            InstanceLost: a rank failed.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Interrupt, from any thread, whoever waits for a step or a load that may never end."""

    @abstractmethod
    async def stop(self) -> None:
        """End what `start` started; models that were not released are lost. Cannot be interrupted."""

    @abstractmethod
    async def reclaimed(self) -> None:
        """Return once the device has the memory of what was released. No model serves meanwhile.

        Raises:
            MemoryNotReclaimed: it has not within a few seconds.
        """
