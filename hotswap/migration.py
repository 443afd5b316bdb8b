"""Live migration: requests that move between engines with their KV blocks.

KV blocks are append-only, so full blocks are copied while the request decodes, and only the blocks filled
since are left for the moment in which it stops (Llumnix: Sun et al., arXiv:2406.03243, section 4.2). The
blocks are a prefix that the destination need not compute. The request itself moves as its tokens, like after
an eviction, and blocks that are missing at the destination are computed again: no error with blocks can lose
a token.

Recurrent states change with every token, so they are copied once, after the last blocks of a request that has
stopped. Blocks without the states are of no use to a model that has some.

    source       EXPORTING --stop--> STOPPED --release--> gone       left before release: decodes on
    destination  RESERVED --write--> ... --commit--> COMMITTED       left, or a timeout: freed
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from hotswap.action import MigrationMethod, MigrationRecord
from hotswap.request import AdapterId, ModelId, Request, RequestId
from hotswap.view import InstanceView

__all__ = [
    "CachedKV",
    "KVLayout",
    "KVPages",
    "KVSink",
    "KVSource",
    "MoveChoice",
    "MoveView",
    "Mover",
    "Stopped",
    "SupportsKVListing",
    "SupportsMigration",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The format of KV blocks, which move between engines with equal layouts only.

    Attributes:
        model: The model that computes them.
        weights: Identifies the model's weights; new weights under the same id have another value.
        adapter: The adapter that is applied, if any.
        block_tokens: Tokens per block.
        layers: For each layer `(kv_heads, key_dim, value_dim, dtype)`.
        block_bytes: Bytes of one block, all layers.
        states: Each recurrent state of a request: `(layer, shape, dtype)`. None for most models.
        state_bytes: Bytes of the states of one request, all layers.
        computed_by: What else the bits of keys and values depend on: versions of libraries and kernels, and
            the device. Blocks move between engines that differ in it, but a store finds them across
            processes, or after a restart, under the same value alone; under "" never.
    """

    model: ModelId
    weights: str
    adapter: AdapterId | None
    block_tokens: int
    layers: tuple[tuple[int, int, int, str], ...]
    block_bytes: int
    states: tuple[tuple[int, tuple[int, ...], str], ...] = ()
    state_bytes: int = 0
    computed_by: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class KVPages:
    """The content of consecutive blocks of one request.

    Of a layout with states, pages that end with the last computed token of a stopped request have its states
    after the blocks, `state_bytes` more.

    Attributes:
        first_block: The index of the first of the blocks in the request, from 0.
        num_tokens: The number of tokens in the blocks; the last block may be partly full.
        data: The bytes, writable, in the order that engines of the layout use; valid until the next read.
            Empty in a simulation.
    """

    first_block: int
    num_tokens: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class Stopped:
    """A stopped request: its `tokens`, prompt included; the first `num_computed` are in KV blocks.

    It stopped `ago_s` seconds before this was told, if its engine is elsewhere and says so.
    """

    tokens: tuple[int, ...]
    num_computed: int
    ago_s: float = 0.0


class KVSource(ABC):
    """The source end of a move, lent by `SupportsMigration.export_kv`; used by one task.

    Each method raises `MigrationAborted` once the request has left the engine's batch: it ended, was aborted,
    evicted or preempted. `InstanceLost` if the engine is lost.

    Attributes:
        layout: The format of the blocks.
    """

    layout: KVLayout

    @abstractmethod
    async def num_tokens(self) -> int:
        """Return how many tokens are in KV blocks now. Never shrinks while the source is open.

        With recurrent states it is one token fewer, so that a token is left to be copied after the stop, and
        the states with it.
        """

    @abstractmethod
    async def read(self, first_block: int, num_tokens: int) -> KVPages:
        """Return the content of the blocks of `num_tokens` tokens from the start of `first_block`.

        Copied in small pieces between steps, so that other requests are not delayed. A cancellation stops it.
        """

    async def copy_to(self, sink: KVSink, first_block: int, num_tokens: int) -> int:
        """Copy the content of blocks to a sink, and return how many bytes that were.

        By default read here and written there. A source that is elsewhere may have them sent to a sink that
        is elsewhere without their passing this process.
        """
        pages = await self.read(first_block, num_tokens)
        await sink.write(pages)
        return len(pages.data)

    @abstractmethod
    async def stop(self) -> Stopped:
        """Stop the request at a step boundary, keep its blocks, and return its state.

        All its tokens are in its stream by then.
        """

    async def stop_for(self, sink: KVSink, first_block: int) -> Stopped:
        """Stop a request whose blocks from `first_block` on go to a sink next; by default like `stop`.

        A source that is elsewhere may send them on the way, so that `copy_to` finds them sent.
        """
        return await self.stop()

    @abstractmethod
    async def release(self) -> None:
        """Release a stopped request: its stream ends with `RequestEvicted` after its tokens."""


class KVSink(ABC):
    """The destination end of a move, lent by `SupportsMigration.import_kv`; used by one task.

    Blocks are reserved, so that a move that has begun has room. Methods raise `MigrationAborted` once the
    engine has freed them: it was swapped to another model, or got no call for too long. `InstanceLost` if the
    engine is lost.

    Attributes:
        layout: The format of the blocks.
        num_present_blocks: How many of the request's first blocks the engine has in its prefix cache; they
            need not be written.
    """

    layout: KVLayout
    num_present_blocks: int = 0

    @abstractmethod
    async def reserve(self, num_tokens: int) -> None:
        """Reserve blocks for `num_tokens` tokens in total, present blocks included, and room for its states.

        Raises:
            MigrationAborted: too few blocks are free, or there is no room for more states.
        """

    @abstractmethod
    async def write(self, pages: KVPages) -> None:
        """Copy pages to reserved blocks, in small pieces between steps."""

    @abstractmethod
    async def commit(self, tokens: Sequence[int]) -> None:
        """Make the blocks available to a stream of the request that is opened from now on.

        `tokens` are all tokens of the request, prompt included. The blocks are kept until the sink is left.
        With recurrent states they are available once, and only if the states were written after them.
        """


@runtime_checkable
class SupportsMigration(Protocol):
    """An engine that can export the KV blocks of its requests, and import those of others.

    The engine serves meanwhile. Leaving either context ends the move: a request that was stopped and not
    released decodes on, and blocks that were not committed are freed.
    """

    def export_kv(self, request: RequestId) -> AbstractAsyncContextManager[KVSource]:
        """Lend the source end for a request that the engine has.

        Raises:
            MigrationAborted: it has no such request, or no blocks of it that could be copied.
            InstanceLost: the engine is gone.
        """
        ...

    def import_kv(self, request: Request) -> AbstractAsyncContextManager[KVSink]:
        """Lend the destination end for a request; nothing is reserved yet.

        Raises:
            MigrationAborted: the engine does not serve its model, or could not hold it.
            InstanceLost: the engine is gone.
        """
        ...


class CachedKV(ABC):
    """KV blocks that an engine keeps of requests that have ended, until it needs their room.

    Attributes:
        layout: The format of the blocks.
        tokens: The tokens whose keys and values they contain, from the start of a request on.
    """

    layout: KVLayout
    tokens: tuple[int, ...]

    @abstractmethod
    async def read(self, first_block: int, num_tokens: int) -> KVPages:
        """Return the content of the blocks of `num_tokens` tokens from the start of `first_block`.

        Copied like the blocks of a `KVSource`. It is valid until the next read.

        Raises:
            MigrationAborted: the engine has used the blocks for others meanwhile, or unloaded the model.
            InstanceLost: the engine is lost.
        """

    async def copy_to(self, sink: KVSink, first_block: int, num_tokens: int) -> int:
        """Copy the content of blocks to a sink, and return how many bytes that were.

        By default like `KVSource.copy_to`: read here and written there. Errors are those of both.
        """
        pages = await self.read(first_block, num_tokens)
        await sink.write(pages)
        return len(pages.data)


@runtime_checkable
class SupportsKVListing(Protocol):
    """An engine that tells of which requests that have ended it keeps KV blocks."""

    async def cached_kv(self) -> Sequence[CachedKV]:
        """Return what is kept for the model that serves, the latest first; it keeps nothing longer for this.

        Of prefixes that begin alike each is there with its beginning.

        Raises:
            MigrationAborted: its KV blocks cannot be read, or it serves no model.
            InstanceLost: the engine is gone.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveView:
    """The input of a `Mover`: a request, its source and its destination.

    Attributes:
        num_tokens: Tokens of the request so far.
        num_remaining: The most tokens still to be generated.
        kv_bytes_per_token: KV bytes per token of its model; 0 if unknown.
        source: The instance that runs it.
        destination: The instance to move it to.
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
    """A method of migration, and its expected downtime."""

    method: MigrationMethod
    estimated_s: float = 0.0


class Mover(ABC):
    """Chooses how a request moves. Pure, except for what it learns from past moves."""

    @abstractmethod
    def choose(self, move: MoveView) -> MoveChoice:
        """Return a method; `"wait"` if the request should finish where it is."""

    def learn(self, record: MigrationRecord) -> None:  # noqa: B027 - not all learn
        """Learn from the record of a move."""
