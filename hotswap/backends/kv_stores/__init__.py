"""Stores of KV blocks: in memory, on a disk, in both, and in memory that processes share.

They need the `torch` extra, for numpy.
"""

from hotswap.backends.kv_stores.host import HostKVStore
from hotswap.backends.kv_stores.nvme import NvmeKVStore
from hotswap.backends.kv_stores.shared import SharedKVStore
from hotswap.backends.kv_stores.tiered import TieredKVStore

__all__ = ["HostKVStore", "NvmeKVStore", "SharedKVStore", "TieredKVStore"]
