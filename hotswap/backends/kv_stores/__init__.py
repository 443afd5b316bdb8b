"""Stores of KV blocks: `HostKVStore` in memory, `NvmeKVStore` on a disk. They need the `torch` extra."""

from hotswap.backends.kv_stores.host import HostKVStore
from hotswap.backends.kv_stores.nvme import NvmeKVStore

__all__ = ["HostKVStore", "NvmeKVStore"]
