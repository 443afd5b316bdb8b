"""Stores of KV blocks: `HostKVStore`, in the memory of this process. Needs the `torch` extra, for numpy."""

from hotswap.backends.kv_stores.host import HostKVStore

__all__ = ["HostKVStore"]
