"""The stores behave as every store must."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hotswap import ModelId
from hotswap.backends.stores import NvmeStore, PinnedStore, SharedStore, TieredStore
from hotswap.testing.conformance import WeightStoreConformance
from tests.backends.stores.models import UNIT, put_all

MODELS = (ModelId("a"), ModelId("b"), ModelId("c"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models on a disk."""
    return put_all(tmp_path_factory.mktemp("root"), MODELS)


class OnDisk(WeightStoreConformance):
    models = MODELS

    @pytest.fixture(autouse=True)
    def _root(self, root: Path) -> None:
        self.disk = NvmeStore(root, chunk_bytes=UNIT)


class TestNvmeStore(OnDisk):
    def make_store(self) -> NvmeStore:
        return self.disk


class TestTieredStore(OnDisk):
    def make_store(self) -> TieredStore:
        return TieredStore(PinnedStore("1 MiB", chunk_bytes=UNIT), self.disk)


class TestTieredStoreWithRoomForOne(OnDisk):
    def make_store(self) -> TieredStore:
        return TieredStore(PinnedStore(18 * UNIT, chunk_bytes=UNIT), self.disk)


class TestTieredStoreOfOneTier(OnDisk):
    def make_store(self) -> TieredStore:
        return TieredStore(self.disk)


class TestPrefetchedTieredStore(OnDisk):
    @asynccontextmanager
    async def make_store(self) -> AsyncGenerator[TieredStore]:
        async with TieredStore(PinnedStore("1 MiB", chunk_bytes=UNIT), self.disk) as store:
            for model in MODELS:
                await store.prefetch(model)
            yield store


class InSharedMemory(OnDisk):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path


class TestSharedTieredStore(InSharedMemory):
    def make_store(self) -> TieredStore:
        return TieredStore(SharedStore(self.directory, "1 MiB", chunk_bytes=UNIT), self.disk)


class TestSharedTieredStoreWithRoomForOne(InSharedMemory):
    def make_store(self) -> TieredStore:
        return TieredStore(SharedStore(self.directory, 22 * UNIT, chunk_bytes=UNIT), self.disk)


class TestTieredStoreBesideAnotherThatSharesItsMemory(InSharedMemory):
    @asynccontextmanager
    async def make_store(self) -> AsyncGenerator[TieredStore]:
        mine, other = (
            TieredStore(SharedStore(self.directory, "1 MiB", chunk_bytes=UNIT), disk)
            for disk in (self.disk, NvmeStore(self.disk.root))
        )
        async with other, mine:
            await other.prefetch(MODELS[0])
            yield mine
