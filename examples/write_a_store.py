"""Write a store: models as zip archives in a folder, checked while they are read.

    python -m examples.write_a_store

A store has three methods: `manifest` says what a model consists of, `open` lends its bytes in order, `view`
shows what is stored where. Subclass `hotswap.testing.WeightStoreConformance` to test a store of your own;
this one passes.
"""

import random
import tempfile
import zipfile
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import anyio
from anyio import CapacityLimiter, to_thread

from hotswap.abc import (
    HostChunk,
    Manifest,
    Model,
    ModelCard,
    ModelId,
    Residency,
    Shard,
    StoreView,
    TierView,
    WeightStore,
)
from hotswap.backends.sim import SimEngine
from hotswap.errors import ShardCorrupt, ShardMissing


class ZipStore(WeightStore):
    """Lends the one entry of each `<model>.zip`, whose CRC-32 is checked when its last byte is read."""

    def __init__(self, folder: Path, *, chunk_bytes: int = 1 << 20) -> None:
        self._archives = {ModelId(path.stem): path for path in sorted(folder.glob("*.zip"))}
        self._shards = {model: self._find(model) for model in self._archives}
        self._chunk_bytes = chunk_bytes
        self._limiter = CapacityLimiter(4)  # the program may hold all of the default threads

    async def manifest(self, model: ModelId) -> Manifest:
        if model not in self._shards:
            raise ShardMissing(
                f"There was no {model + '.zip'!r} when the store was made; add it, make it anew."
            )
        shard = self._shards[model]
        return Manifest(model=model, shards=(shard,), buffer_bytes=shard.size_bytes)

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncIterator[AsyncIterator[HostChunk]]:
        if shard not in self._shards.values():
            raise ShardMissing(f"Model {shard.model!r} has no such shard here; ask for its manifest again.")
        with await to_thread.run_sync(self._open, shard.model, limiter=self._limiter) as archive:
            async with aclosing(self._lend(archive, shard)) as chunks:
                yield chunks

    def view(self) -> StoreView:
        held = tuple(
            Residency(model=s.model, tier="zip", size_bytes=s.size_bytes) for s in self._shards.values()
        )
        tier = TierView(name="zip", used_bytes=sum(entry.size_bytes for entry in held))
        return StoreView(tiers=(tier,), residency=held)

    async def _lend(self, archive: zipfile.ZipFile, shard: Shard) -> AsyncGenerator[HostChunk]:
        offset = 0
        try:
            with await to_thread.run_sync(archive.open, shard.file, limiter=self._limiter) as entry:
                while data := await to_thread.run_sync(entry.read, self._chunk_bytes, limiter=self._limiter):
                    yield HostChunk(offset, memoryview(data), tier="zip")
                    offset += len(data)
        except (zipfile.BadZipFile, zlib.error, EOFError) as exc:
            raise ShardCorrupt(f"{archive.filename!r} is damaged: {exc}. Copy it here again.") from exc

    def _open(self, model: ModelId) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(self._archives[model])
        except (OSError, zipfile.BadZipFile) as exc:
            raise ShardCorrupt(
                f"'{self._archives[model]}' cannot be read: {exc}. Copy it here again."
            ) from exc

    def _find(self, model: ModelId) -> Shard:
        with self._open(model) as archive:
            (entry,) = archive.infolist()
        return Shard(
            model=model,
            rank=0,
            file=entry.filename,
            file_offset_bytes=0,
            buffer_offset_bytes=0,
            size_bytes=entry.file_size,
            checksum=f"crc32:{entry.CRC:08x}",
        )


async def main() -> None:
    """Pack a model and load it from its archive."""
    with tempfile.TemporaryDirectory() as folder:
        pack(Path(folder, "smollm.zip"), random.Random(0).randbytes(20 << 20))
        async with ZipStore(Path(folder)) as store, SimEngine("e0") as engine:
            card = ModelCard.of(Model("smollm"), await store.manifest(ModelId("smollm")))
            await engine.load(card, store)
            print(engine, store.view(), sep="\n")


def pack(path: Path, weights: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("weights.bin", weights)


if __name__ == "__main__":
    anyio.run(main)
