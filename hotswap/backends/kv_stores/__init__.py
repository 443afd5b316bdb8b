"""Stores of KV blocks: `HostKVStore` in memory, `NvmeKVStore` on a disk, and `TieredKVStore` of both.

They need the `torch` extra, for numpy.
"""

from hotswap.backends.kv_stores.host import HostKVStore
from hotswap.backends.kv_stores.nvme import NvmeKVStore
from hotswap.backends.kv_stores.tiered import TieredKVStore

__all__ = ["HostKVStore", "NvmeKVStore", "TieredKVStore"]
