"""The stores of KV blocks behave as every such store must."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotswap.backends.kv_stores import HostKVStore, NvmeKVStore
from hotswap.backends.sim import SimKVStore
from hotswap.testing.conformance import KVStoreConformance


class TestHostKVStore(KVStoreConformance):
    def make_store(self, capacity_bytes: int) -> HostKVStore:
        return HostKVStore(capacity_bytes)


class TestNvmeKVStore(KVStoreConformance):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self._path = tmp_path

    def make_store(self, capacity_bytes: int) -> NvmeKVStore:
        return NvmeKVStore(self._path, capacity_bytes)


class TestSimKVStore(KVStoreConformance):
    virtual = True
    has_content = False

    def make_store(self, capacity_bytes: int) -> SimKVStore:
        return SimKVStore(capacity_bytes)
