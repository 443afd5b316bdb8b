"""The `WeightStore` interface: where weights lie, and how they are lent to an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol, Self, runtime_checkable

from anyio import AsyncContextManagerMixin

from hotswap.model import HostBuffer, HostChunk, Manifest, Model, Shard
from hotswap.request import ModelId
from hotswap.text import Tokenizer
from hotswap.view import StoreView

__all__ = [
    "SupportsImport",
    "SupportsLend",
    "SupportsNodes",
    "SupportsPrefetch",
    "SupportsReadInto",
    "SupportsTokenizer",
    "WeightStore",
    "WrapperStore",
]


class WeightStore(AsyncContextManagerMixin, ABC):
    """Holds the weights of many models; engines read them chunk by chunk. Weights are immutable.

    `async with store` brackets its life: the fleet enters the store it is given and leaves it last. All
    three verbs may be called concurrently. Nothing blocks the event loop: files are read in worker threads.
    """

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        """Open the store and close it afterwards; override to hold resources."""
        yield self

    @abstractmethod
    async def manifest(self, model: ModelId) -> Manifest:
        """Return what the store knows of a model without reading its weights.

        Raises:
            ShardMissing: the store does not hold the model.
            ShardCorrupt: its index cannot be read or contradicts its files.
            UnsafeFile: its index names a path outside the model's directory.
        """

    @abstractmethod
    def open(self, shard: Shard) -> AbstractAsyncContextManager[AsyncIterator[HostChunk]]:
        """Lend the bytes of a shard, chunk after chunk, in ascending order and without gaps.

        A chunk is valid until the next is asked for or the block is left; leaving it early (an error, a
        cancellation) returns whatever was lent.

        Raises:
            ShardMissing: the store holds no such shard.
            ShardCorrupt: the file is shorter than its index says, or a checksum does not match; raised no
                later than after the last chunk.
            StoreError: the read failed.
        """

    @abstractmethod
    def view(self) -> StoreView:
        """Return residency and room by tier. Synchronous, cheap and frozen."""


@runtime_checkable
class SupportsPrefetch(Protocol):
    """A store with a faster tier that can be filled before a model is needed, and emptied of it again."""

    async def prefetch(self, model: ModelId) -> None:
        """Return once the model is resident on the fastest tier. Cancelling leaves the tier as it was.

        Raises:
            TierFull: the model does not fit even when everything not lent is dropped.
            StoreError: it could not be read from the tiers below.
        """
        ...

    async def drop(self, model: ModelId) -> None:
        """Free the fastest tier of the model once nothing lends from it; other tiers keep it."""
        ...


@runtime_checkable
class SupportsReadInto(Protocol):
    """A store that can put weights where the reader wants them, without a copy on the way."""

    async def read_into(self, shard: Shard, destination: memoryview) -> HostChunk | None:
        """Fill `destination` with the bytes of a shard, and return it as the one chunk that the shard is.

        `None` says that the store would rather lend this shard chunk by chunk, and that nothing was written.
        `destination` is contiguous, writable, as long as the shard, and the reader's own; one that begins on
        a page is served fastest. The bytes are as good as those that `open` lends. After an error or a
        cancellation, which both wait until nobody writes there any more, what it holds is undefined.

        Raises:
            ShardMissing: the store holds no such shard.
            ShardCorrupt: the file is shorter than its index says, or a checksum does not match.
            StoreError: the read failed.
        """
        ...


@runtime_checkable
class SupportsLend(Protocol):
    """A store that can lend the weights in place: an engine in the same memory then loads without a copy."""

    def lend(self, manifest: Manifest, rank: int = 0) -> AbstractAsyncContextManager[HostBuffer | None]:
        """Lend the flat buffer of a rank in host memory, or `None`; it is brought there first if it is not.

        It is neither moved, changed nor dropped before the block is left, which may be hours later and by
        another task than the one that entered it. `None` (no room, no such tier, the model was converted
        anew) is no failure: read the shards instead.

        Raises:
            StoreError: the weights could not be read; see `open`.
        """
        ...


@runtime_checkable
class SupportsNodes(Protocol):
    """A store with tiers that belong to nodes: where an engine is decides from which it reads."""

    def on(self, node: str) -> WeightStore:
        """Return the store as engines of a node use it (`InstanceView.node`); entered and left with this one.

        Its manifests are those of this store. `view` of this store tells of all nodes, by `TierView.node`.

        Raises:
            StoreError: it has no such node.
        """
        ...


@runtime_checkable
class SupportsImport(Protocol):
    """A store that can take in a checkpoint from where the user has it."""

    async def import_model(self, model: Model) -> None:
        """Make `model` available under its id from `model.source`; return at once when it is there already.

        Single-flight per model; a crash or a cancellation leaves nothing half made.

        Raises:
            ShardMissing: there is no checkpoint at the source.
            UnsafeFile: the checkpoint holds pickled weights only.
            TierFull: the disk filled up; what was there before still serves.
        """
        ...


@runtime_checkable
class SupportsTokenizer(Protocol):
    """A store that keeps a model's tokenizer beside its weights."""

    async def tokenizer(self, model: ModelId) -> Tokenizer | None:
        """Return the model's tokenizer, `None` if the checkpoint has none."""
        ...


class WrapperStore(WeightStore):
    """Forwards the three verbs to another store: subclass it and override what should differ.

    Optional abilities are not forwarded, since what they give must differ in the same way: a wrapper whose
    `open` decrypts must not have a `lend` that does not. A subclass that knows better defines them.
    """

    def __init__(self, store: WeightStore) -> None:
        self.wrapped = store

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with self.wrapped:
            yield self

    async def manifest(self, model: ModelId) -> Manifest:
        return await self.wrapped.manifest(model)

    def open(self, shard: Shard) -> AbstractAsyncContextManager[AsyncIterator[HostChunk]]:
        return self.wrapped.open(shard)

    def view(self) -> StoreView:
        return self.wrapped.view()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.wrapped!r}>"
