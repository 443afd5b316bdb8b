"""Stores of weights: host memory, shared or not, a local disk, a remote store, and all of them as tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotswap.backends.stores.nvme import NvmeStore
from hotswap.backends.stores.pieces import Verify
from hotswap.backends.stores.pinned import PinnedStore
from hotswap.backends.stores.shared import SharedStore
from hotswap.backends.stores.tiered import TieredStore

if TYPE_CHECKING:
    from hotswap.backends.stores.remote import RemoteStore

__all__ = ["NvmeStore", "PinnedStore", "RemoteStore", "SharedStore", "TieredStore", "Verify"]


def __getattr__(name: str) -> object:
    if name == "RemoteStore":  # it needs the `remote` extra, the others do not
        from hotswap.backends.stores.remote import RemoteStore

        return RemoteStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
