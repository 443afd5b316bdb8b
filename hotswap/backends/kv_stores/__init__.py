"""Stores of KV blocks: in memory, on a disk, in both, in memory that processes share, and on engines' nodes.

They need the `torch` extra, for numpy.
"""

from hotswap.backends.kv_stores.host import HostKVStore
from hotswap.backends.kv_stores.node import NodeKVStore
from hotswap.backends.kv_stores.nvme import NvmeKVStore
from hotswap.backends.kv_stores.shared import SharedKVStore
from hotswap.backends.kv_stores.tiered import TieredKVStore

__all__ = ["HostKVStore", "NodeKVStore", "NvmeKVStore", "SharedKVStore", "TieredKVStore"]
