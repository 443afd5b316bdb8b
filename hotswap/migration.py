"""Requests that move with their KV blocks: what an engine offers, and what is recorded of a move.

KV blocks are append-only, so those that are full can be copied while the request goes on decoding, and only
what has come since is left for the moment in which it stops (Llumnix: Sun et al., arXiv:2406.03243, section
4.2). What arrives is a prefix that the destination need not compute: the request itself moves as its tokens
do, by the one loop of its flight, and whatever of its blocks is missing there is computed again. So nothing
that goes wrong with blocks can cost a token.

    source       EXPORTING --stop--> STOPPED --release--> gone       left before release: decodes on
    destination  RESERVED --write--> ... --commit--> COMMITTED       left, or no news for long: freed
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hotswap.action import MigrationRecord, MigrationWay
from hotswap.request import AdapterId, ModelId, Request, RequestId
from hotswap.view import InstanceView

__all__ = [
    "KVLayout",
    "KVPages",
    "KVSink",
    "KVSource",
    "MoveChoice",
    "MoveView",
    "Mover",
    "Stopped",
    "SupportsMigration",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """What KV blocks mean: only between equal layouts may they move.

    Attributes:
        model: The model that computed them.
        weights: Stands for its very weights; the same id with new weights is another.
        adapter: The adapter that took part, if one did.
        block_tokens: Tokens of a block.
        layers: For each layer `(kv_heads, key_dim, value_dim, dtype)`.
        block_bytes: Bytes of one block, all layers.
    """

    model: ModelId
    weights: str
    adapter: AdapterId | None
    block_tokens: int
    layers: tuple[tuple[int, int, int, str], ...]
    block_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class KVPages:
    """The content of neighbouring blocks of one request.

    Attributes:
        first_block: Which of the request's blocks the first is, counted from 0.
        num_tokens: How many tokens they have keys and values of; a last block may be part full.
        data: All bytes, writable, in the order that the layout's engines agree on; valid until the next are
            read. Empty in a simulation.
    """

    first_block: int
    num_tokens: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class Stopped:
    """A request that stopped: its `tokens`, prompt included; the first `num_computed` are in KV blocks."""

    tokens: tuple[int, ...]
    num_computed: int


class KVSource(ABC):
    """The giving end of a move, lent by `SupportsMigration.export_kv`; one task uses it.

    Every verb raises `MigrationAborted` once the request has left the engine's batch: it ended, was aborted
    or evicted, or gave its blocks back for others. `InstanceLost` if the engine is lost.

    Attributes:
        layout: What the blocks mean.
    """

    layout: KVLayout

    @abstractmethod
    async def num_tokens(self) -> int:
        """Return how many tokens have keys and values now. Only ever grows while the source is open."""

    @abstractmethod
    async def read(self, first_block: int, num_tokens: int) -> KVPages:
        """Return what blocks hold of `num_tokens` tokens from the start of `first_block` on.

        Copied in small pieces between steps, so that others are not held up. A cancellation copies no more.
        """

    @abstractmethod
    async def stop(self) -> Stopped:
        """Stop the request at a step boundary, its blocks kept, and return how it stands.

        Every token that it has by then is in its stream already.
        """

    @abstractmethod
    async def release(self) -> None:
        """Give a stopped request up: its stream ends by `RequestEvicted` after the tokens it holds."""


class KVSink(ABC):
    """The taking end of a move, lent by `SupportsMigration.import_kv`; one task uses it.

    Blocks are reserved, so that a move that began finds room. Verbs raise `MigrationAborted` once the engine
    has freed them: it turned to another model, or heard nothing for too long. `InstanceLost` if it is lost.

    Attributes:
        layout: What the blocks mean.
        num_present_blocks: How many of the request's first blocks the engine has already, full ones: they
            need not be written.
    """

    layout: KVLayout
    num_present_blocks: int = 0

    @abstractmethod
    async def reserve(self, num_tokens: int) -> None:
        """Reserve blocks for `num_tokens` tokens in all, those that are present included.

        Raises:
            MigrationAborted: there are too few.
        """

    @abstractmethod
    async def write(self, pages: KVPages) -> None:
        """Copy pages to reserved blocks, in small pieces between steps."""

    @abstractmethod
    async def commit(self, tokens: Sequence[int]) -> None:
        """Let a stream of the request that is opened from now on find what was written.

        `tokens` are all that the request has, prompt included. The blocks are kept until the sink is left.
        """


@runtime_checkable
class SupportsMigration(Protocol):
    """An engine whose requests can leave with their KV blocks, and arrive with them.

    Serving goes on beside all of it. Leaving either block gives back what it holds: a request that was
    stopped and not released decodes on, blocks that were not committed are freed.
    """

    def export_kv(self, request: RequestId) -> AbstractAsyncContextManager[KVSource]:
        """Lend the giving end for a request that the engine has.

        Raises:
            MigrationAborted: it has no such request, or none whose blocks could be copied.
            InstanceLost: the engine is gone.
        """
        ...

    def import_kv(self, request: Request) -> AbstractAsyncContextManager[KVSink]:
        """Lend the taking end for a request; nothing is reserved yet.

        Raises:
            MigrationAborted: the engine does not serve its model, or could not hold it.
            InstanceLost: the engine is gone.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveView:
    """What a choice between ways is made from.

    Attributes:
        num_tokens: Of the request so far.
        num_remaining: How many more it may get.
        kv_bytes_per_token: Of its model; 0 where the store does not know.
        source: The instance that runs it.
        destination: The one that could.
        kv_possible: Whether both engines can move KV blocks.
    """

    num_tokens: int
    num_remaining: int
    kv_bytes_per_token: int
    source: InstanceView
    destination: InstanceView
    kv_possible: bool


@dataclass(frozen=True, slots=True)
class MoveChoice:
    """A way to go, and the `downtime_s` that is expected of it."""

    way: MigrationWay
    estimated_s: float = 0.0


class Mover(ABC):
    """Chooses how a request moves, and learns from what became of it. Pure but for what it learns."""

    @abstractmethod
    def choose(self, move: MoveView) -> MoveChoice:
        """Return a way; `"wait"` if the request had better end where it is."""

    def learn(self, record: MigrationRecord) -> None:  # noqa: B027 - not all learn
        """See what became of a move."""
