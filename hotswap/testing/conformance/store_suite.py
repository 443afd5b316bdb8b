"""The hooks of `WeightStoreConformance`, and the reading helpers of its checks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar

from hotswap.model import Manifest, Shard
from hotswap.request import ModelId
from hotswap.store import WeightStore
from hotswap.testing.conformance.suite import Suite

__all__ = ["StoreSuite", "read"]


class StoreSuite(Suite):
    """Hooks to write or to override.

    Attributes:
        models: at least two models that the store holds, the first of several chunks.
        unknown: a model that the store does not hold.
        has_disk: whether a store with `lend_files` has a local disk to lend from.
    """

    models: ClassVar[tuple[ModelId, ...]] = ()
    unknown: ClassVar[ModelId] = ModelId("no-such-model")
    has_disk: ClassVar[bool] = True

    def make_store(self) -> AbstractAsyncContextManager[WeightStore]:
        """Return a context manager that opens a store with all `models`; a store is one itself."""
        raise NotImplementedError("Write make_store(): it returns the store to be tested.")

    def num_lent(self, store: WeightStore) -> int | None:
        """Return the number of chunks lent at this moment; `None` if the store does not count them."""
        count: int | None = getattr(store, "num_lent", None)
        return count

    def assert_released(self, store: WeightStore) -> None:
        """Raise if a store without readers still holds resources for one."""
        assert not self.num_lent(store), f"{self.num_lent(store)} chunks are still lent by {store!r}"
        for tier in store.view().tiers:
            assert tier.used_bytes >= 0, f"a tier holds less than nothing: {tier}"
            assert tier.capacity_bytes is None or tier.used_bytes <= tier.capacity_bytes, f"over full: {tier}"

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[WeightStore]:
        """An open store; at the end all resources must be released."""
        async with self.make_store() as store:
            yield store
            self.assert_released(store)


@dataclass(frozen=True, slots=True)
class _Copy:
    """The offset of a chunk and a copy of its bytes."""

    offset_bytes: int
    data: bytes


async def read(store: WeightStore, shard: Shard) -> bytes:
    """Read a shard whole; raise unless its chunks ascend without gaps and end where the shard ends."""
    copies: list[_Copy] = []
    async with store.open(shard) as chunks:
        async for chunk in chunks:
            copies.append(_Copy(chunk.offset_bytes, bytes(chunk.data)))  # noqa: PERF401  # lent until the next
    at = shard.buffer_offset_bytes
    for copy in copies:
        assert copy.data, f"an empty chunk of {shard}"
        assert copy.offset_bytes == at, f"a chunk at {copy.offset_bytes} where {at} was due, of {shard}"
        at += len(copy.data)
    end = shard.buffer_offset_bytes + shard.size_bytes
    assert at == end, f"the chunks end at {at}, not at {end}, of {shard}"
    return b"".join(copy.data for copy in copies)


async def read_all(store: WeightStore, manifest: Manifest) -> list[bytes]:
    """Read all shards of a model, one after another."""
    return [await read(store, shard) for shard in manifest.shards]
