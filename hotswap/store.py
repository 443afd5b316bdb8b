"""The `WeightStore` interface: stores hold weights, and lend them to engines chunk by chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

from anyio import AsyncContextManagerMixin

from hotswap.model import Adapter, HostBuffer, HostChunk, Manifest, Model, Shard
from hotswap.request import ModelId
from hotswap.text import TextSettings, Tokenizer
from hotswap.view import StoreView

__all__ = [
    "SupportsImport",
    "SupportsLend",
    "SupportsLendFiles",
    "SupportsNodes",
    "SupportsPrefetch",
    "SupportsReadInto",
    "SupportsSideFiles",
    "SupportsTextSettings",
    "SupportsTokenizer",
    "WeightStore",
    "WrapperStore",
]


class WeightStore(AsyncContextManagerMixin, ABC):
    """Holds the weights of many models; engines read them chunk by chunk. Weights are immutable.

    A store is used inside `async with`: the fleet enters its store first and leaves it last. All methods may
    be called concurrently. Nothing blocks the event loop: files are read in worker threads.
    """

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        """Open the store and close it afterwards; override to hold resources."""
        yield self

    @abstractmethod
    async def manifest(self, model: ModelId) -> Manifest:
        """Return the description of a model; its weights are not read.

        Raises:
            ShardMissing: the store does not hold the model.
            ShardCorrupt: its index cannot be read or contradicts its files.
            UnsafeFile: its index names a path outside the model's directory.
        """

    @abstractmethod
    def open(self, shard: Shard) -> AbstractAsyncContextManager[AsyncIterator[HostChunk]]:
        """Lend the bytes of a shard in chunks, in ascending order and without gaps.

        A chunk is valid until the next one is requested or the block is left. The block may be left early, by
        an error or a cancellation; all buffers are returned then.

        Raises:
            ShardMissing: the store holds no such shard.
            ShardCorrupt: the file is shorter than its index says, or a checksum does not match; raised no
                later than after the last chunk.
            StoreError: the read failed.
        """

    @abstractmethod
    def view(self) -> StoreView:
        """Return a frozen view of the tiers: residency and free bytes. Synchronous and cheap."""


@runtime_checkable
class SupportsPrefetch(Protocol):
    """A store with a fast tier that models can be loaded into before they are needed, and dropped from."""

    async def prefetch(self, model: ModelId) -> None:
        """Return once the model is resident on the fastest tier. Cancelling leaves the tier as it was.

        Raises:
            TierFull: the model does not fit even when everything not lent is dropped.
            StoreError: it could not be read from the tiers below.
        """
        ...

    async def drop(self, model: ModelId) -> None:
        """Free the model's bytes on the fastest tier once they are not lent; other tiers keep the model."""
        ...


@runtime_checkable
class SupportsReadInto(Protocol):
    """A store that can read weights straight into a buffer of the caller."""

    async def read_into(self, shard: Shard, destination: memoryview) -> HostChunk | None:
        """Fill `destination` with the bytes of a shard, and return it as one chunk.

        `None` means that this shard can only be lent by `open`; nothing was written. `destination` is
        contiguous, writable, as long as the shard, and owned by the caller; reading is fastest if it begins
        on a page. The bytes are verified as those of `open` are. An error or a cancellation is raised after
        all writing has ended; the content of `destination` is undefined then.

        Raises:
            ShardMissing: the store holds no such shard.
            ShardCorrupt: the file is shorter than its index says, or a checksum does not match.
            StoreError: the read failed.
        """
        ...


@runtime_checkable
class SupportsLend(Protocol):
    """A store that can lend weights in place: an engine on a CPU then loads without a copy."""

    def lend(self, manifest: Manifest, rank: int = 0) -> AbstractAsyncContextManager[HostBuffer | None]:
        """Lend the flat buffer of a rank in host memory, loaded first if need be.

        It is neither moved, changed nor dropped before the block is left, which may be hours later, and by
        another task than the one that entered it. `None` (no room, no such tier, another conversion of the
        model) is no error: read the shards instead.

        Raises:
            StoreError: the weights could not be read; see `open`.
        """
        ...


@runtime_checkable
class SupportsLendFiles(Protocol):
    """A store that can lend files by path, for engines that open a model's files themselves."""

    def lend_files(self, manifest: Manifest) -> AbstractAsyncContextManager[tuple[Path, ...]]:
        """Lend the files of a model's shards, in their order; to be read only.

        They are brought to a local disk first if need be, and neither changed, moved nor removed before the
        block is left, which may be hours later. Each has the bytes of its shard at `file_offset_bytes`, and
        may be longer.

        Raises:
            ShardMissing: the store has no such model any more, or another conversion of it.
            ShardCorrupt: a file is shorter than its index says, or a checksum does not match.
            StoreError: they could not be brought to a local disk, or read.
        """
        ...


@runtime_checkable
class SupportsNodes(Protocol):
    """A store with tiers that belong to nodes: an engine reads from the tiers of its node."""

    def on(self, node: str) -> WeightStore:
        """Return the store for engines of a node (`InstanceView.node`); it is open while this store is.

        It has the manifests of this store. `view` of this store covers all nodes, by `TierView.node`.

        Raises:
            StoreError: it has no such node.
        """
        ...


@runtime_checkable
class SupportsImport(Protocol):
    """A store that can import the checkpoint of a model."""

    async def import_model(self, model: Model) -> None:
        """Import `model` under its id from `model.source`; return at once if the store has it.

        Concurrent calls for one model import it once. A crash or a cancellation leaves no part of it.

        Raises:
            ShardMissing: there is no checkpoint at the source.
            UnsafeFile: the checkpoint holds pickled weights only.
            TierFull: the disk has no room; other models are untouched.
        """
        ...


@runtime_checkable
class SupportsSideFiles(Protocol):
    """A store that gives the small files beside a model's weights: for a tier's copy, and for engines."""

    async def side_files(self, model: ModelId) -> dict[str, bytes]:
        """Return the files by name, the tokenizer among them; missing ones are left out.

        Raises:
            StoreError: one of them could not be read.
        """
        ...


@runtime_checkable
class SupportsTokenizer(Protocol):
    """A store that keeps a model's tokenizer beside its weights."""

    async def tokenizer(self, model: ModelId) -> Tokenizer | None:
        """Return the model's tokenizer, `None` if the checkpoint has none."""
        ...


@runtime_checkable
class SupportsTextSettings(Protocol):
    """A store that keeps what a checkpoint says of text beside the weights: chat templates, defaults."""

    async def text_settings(self, model: ModelId) -> TextSettings | None:
        """Return what the model's files say of text; `None` if the store has none of them.

        Raises:
            ShardCorrupt: a file cannot be used.
            StoreError: a file cannot be read.
        """
        ...

    async def adapter_settings(self, adapter: Adapter) -> TextSettings:
        """Return what the files of an adapter say of text, as far as they differ from its model's.

        Raises:
            UnsupportedAdapter: its tokenizer cannot be used with the model.
            StoreError: a file cannot be used or read.
        """
        ...


class WrapperStore(WeightStore):
    """Forwards `manifest`, `open` and `view` to another store: subclass it and override what should differ.

    Optional abilities are not forwarded, because a wrapper must change all methods alike: one whose `open`
    decrypts must not have a `lend` that does not. A subclass may define them.
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
