"""The `KVStore` interface: KV blocks that outlive the model, the request and the engine that computed them.

A block is addressed by its content: by all that its keys and values depend on, which is the weights, the
adapter, the format of blocks and every token up to its end. So a store needs no word of requests or
instances. What it has under a key is right for whatever asks for that key, and two requests with one
beginning share its blocks.

    save      put --write--> ... --release      blocks can be found as they are written
    restore   lease --read--> ... --release     blocks stay as they are meanwhile

Blocks that are copied between a store and an engine which are both elsewhere need not pass this process:
`KVPut.copying_from` and `KVLease.copying_to`, by default a read and a write.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Self, TypeAlias

from anyio import AsyncContextManagerMixin

from hotswap.engine import Engine
from hotswap.migration import CachedKV, KVLayout, KVPages, KVSink, KVSource
from hotswap.store_view import KVStoreView

__all__ = ["KVCopy", "KVLease", "KVPrefix", "KVPut", "KVStore"]

KVCopy: TypeAlias = Callable[[int, int], Awaitable[int]]
"""Copies blocks, given the first of them and how many tokens they have; returns how many bytes that were."""


class KVPrefix:
    """Tokens from the start of a request on, as KV stores name their blocks.

    The key of a block is a hash of the key before it and of its tokens. The first of these, the root, stands
    for all else that keys and values depend on: weights and the way of computing with them, adapter, and
    format; not the model's name. Keys are computed when they are asked for.

    Args:
        layout: The format of the blocks.
        tokens: The tokens.
        salt: Tells apart what the layout does not, such as adapters of two fleets that have one name.

    Attributes:
        layout: The format of the blocks.
        tokens: The tokens.
        num_full: How many blocks the tokens fill.
    """

    def __init__(self, layout: KVLayout, tokens: Sequence[int], *, salt: str = "") -> None:
        self.layout, self.tokens = layout, tuple(tokens)
        self.num_full = len(self.tokens) // layout.block_tokens
        identity = (salt, layout.weights, layout.adapter, layout.block_tokens, layout.layers)
        self._keys = [_digest(repr((*identity, layout.block_bytes, layout.states)).encode())]

    def under(self, root: str) -> KVPrefix:
        """Return the same tokens under another root, which also names what `root` tells.

        For a store that other processes share, or that outlives them: what this process has in common with
        itself, as versions of libraries, they need not.
        """
        other = KVPrefix(self.layout, ())
        other.tokens, other.num_full = self.tokens, self.num_full
        other._keys = [_digest(self._keys[0] + root.encode())]
        return other

    @property
    def num_blocks(self) -> int:
        """How many blocks the tokens need; the last may be partly full."""
        return -(-len(self.tokens) // self.layout.block_tokens)

    def tokens_of(self, block: int) -> tuple[int, ...]:
        """Return the tokens of a block."""
        first = block * self.layout.block_tokens
        return self.tokens[first : first + self.layout.block_tokens]

    def parent(self, block: int) -> bytes:
        """Return the key before a block: that of the block before it, or the root."""
        return self._keys[0] if not block else self.key(block - 1)

    def key(self, block: int) -> bytes:
        """Return the key of a block; the last may be partly full."""
        while len(self._keys) <= block + 1:
            tokens = array("q", self.tokens_of(len(self._keys) - 1)).tobytes()
            self._keys.append(_digest(self._keys[-1] + tokens))
        return self._keys[block + 1]

    def __repr__(self) -> str:
        return f"<KVPrefix of {self.layout.model} [{len(self.tokens)} tokens]>"


class KVLease(ABC):
    """Stored blocks of a prefix, which stay as they are until `release`; used by one task.

    For a model with recurrent states they end where states are stored, and the pages of the last token have
    these after the blocks.

    Attributes:
        num_tokens: The number of first tokens that are stored.
    """

    num_tokens: int

    @abstractmethod
    async def read(self, first_block: int, num_tokens: int) -> KVPages:
        """Return the content of the blocks of `num_tokens` tokens from the start of `first_block`.

        It is valid until the next read or `release`, and must not be written to. Does not block the event
        loop. A cancellation stops it.

        Raises:
            ValueError: they are not all leased.
        """

    @asynccontextmanager
    async def copying_to(self, sink: KVSink) -> AsyncGenerator[KVCopy]:
        """A block in which leased blocks are copied to the sink of a move, in pieces, by what it yields.

        By default they are read here and written there, and errors are those of `read` and `KVSink.write`. A
        store that is elsewhere may have them sent. Release the lease after the block.
        """

        async def copy(first_block: int, num_tokens: int) -> int:
            pages = await self.read(first_block, num_tokens)
            await sink.write(pages)
            return len(pages.data)

        yield copy

    @abstractmethod
    def release(self) -> None:
        """Let the blocks be evicted again; harmless if called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class KVPut(ABC):
    """Room for the blocks of a prefix that are not stored yet; used by one task.

    For a model with recurrent states there is room for them too, or for nothing: they come with the pages of
    the last token, and without them none of the blocks is found.

    No block of the prefix is evicted until `release`. Room for blocks that were not written is given back
    then; those that were written stay.

    Attributes:
        first_block: The first block that is to be written: those before it are stored. The last block, if
            states alone are missing.
        num_tokens: How many of the first tokens will be stored once all blocks are written. Fewer than the
            prefix has if there is no room for more, or they are not worth it.
    """

    first_block: int
    num_tokens: int

    @abstractmethod
    async def write(self, pages: KVPages) -> None:
        """Copy blocks into the store, in order; they can be found once this returns.

        Blocks that are stored already are skipped. Does not block the event loop. A cancellation waits until
        nothing is copied any more, and keeps none of these blocks.

        Raises:
            ValueError: the pages do not follow those before, or there is no room for them.
        """

    @asynccontextmanager
    async def copying_from(self, source: KVSource | CachedKV) -> AsyncGenerator[KVCopy]:
        """A block in which blocks of a source are copied into the store, in pieces, by what it yields.

        By default they are read there and written here, and errors are those of `KVSource.read` and `write`.
        A store that is elsewhere may have them sent. End the put after the block.
        """

        async def copy(first_block: int, num_tokens: int) -> int:
            pages = await source.read(first_block, num_tokens)
            await self.write(pages)
            return len(pages.data)

        yield copy

    @abstractmethod
    def release(self) -> None:
        """End the put; harmless if called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class KVStore(AsyncContextManagerMixin, ABC):
    """Keeps KV blocks by content until their room is wanted. Belongs to one event loop; enter it to use it.

    Blocks are evicted one by one, a block never before those that follow it, and none that is leased. A store
    may lose any block at any time, whole: that costs a prefill, and never a token.

    Attributes:
        outlives_fleets: Whether blocks are found by a fleet that opens the store later. A fleet that closes
            then saves what its engines keep of requests that have ended; of each engine, if `near` says so.
    """

    outlives_fleets: bool = False

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        """Open the store; on leaving what it holds is forgotten, unless it says otherwise."""
        yield self

    @abstractmethod
    def lookup(self, prefix: KVPrefix) -> int:
        """Return how many of the first tokens are stored now. Changes nothing, also not what goes first."""

    @abstractmethod
    def lease(self, prefix: KVPrefix) -> KVLease:
        """Lease the stored blocks of a prefix, as many of the first as there are, which may be none.

        Release it, or use it as a context manager. The blocks count as used now.
        """

    @abstractmethod
    def put(self, prefix: KVPrefix, *, prefill_s: float = 0.0, copy_s: float = 0.0) -> KVPut:
        """Make room for the blocks of a prefix that are not stored, the first ones first.

        Release it, or use it as a context manager. Blocks that are worth less, by the seconds that they save
        for each byte, and those used longest ago go for it.

        Args:
            prefix: Its tokens, as far as they have keys and values.
            prefill_s: The seconds in which its tokens would be computed again; 0 if that is not known.
            copy_s: The seconds in which its blocks are saved and restored; no room is made unless that is
                less.
        """

    @abstractmethod
    def view(self) -> KVStoreView:
        """Return the store as it is now; cheap."""

    def node_of(self, prefix: KVPrefix) -> str:
        """Return the node that has most of a prefix, as `InstanceView.node` names it; changes nothing.

        "" if it is all the same to engines, as it is by default, or none of it is stored.
        """
        return ""

    def near(self, engine: Engine) -> KVStore:
        """Return the store as it is used for an engine: by default the store itself.

        One that keeps blocks in several places puts those of the engine near it, and where blocks are in
        several, leases those near it. Cheap, and changes nothing that others see.
        """
        return self


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()
