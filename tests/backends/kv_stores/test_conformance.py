"""The stores of KV blocks behave as every such store must."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotswap.backends.kv_stores import HostKVStore, NvmeKVStore, SharedKVStore, TieredKVStore
from hotswap.backends.sim import SimKVStore
from hotswap.testing.conformance import KVStoreConformance


class TestHostKVStore(KVStoreConformance):
    def make_store(self, capacity_bytes: int) -> HostKVStore:
        return HostKVStore(capacity_bytes)


class OnADisk(KVStoreConformance):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self._path = tmp_path


class TestNvmeKVStore(OnADisk):
    def make_store(self, capacity_bytes: int) -> NvmeKVStore:
        return NvmeKVStore(self._path, capacity_bytes)


class TestSharedKVStore(OnADisk):
    def make_store(self, capacity_bytes: int) -> SharedKVStore:
        return SharedKVStore(self._path / "shared", capacity_bytes)


class TestTieredKVStore(OnADisk):
    def make_store(self, capacity_bytes: int) -> TieredKVStore:
        """Memory for two blocks, and for two more that it keeps free, so that most are on the disk."""
        in_memory = min(capacity_bytes, 2 * self.block_size)
        headroom = in_memory and 2 * self.block_size
        disk = NvmeKVStore(self._path, capacity_bytes - in_memory)
        return TieredKVStore(HostKVStore(in_memory + headroom), disk, headroom=headroom)


class TestSimKVStore(KVStoreConformance):
    virtual = True
    has_content = False

    def make_store(self, capacity_bytes: int) -> SimKVStore:
        return SimKVStore(capacity_bytes)
