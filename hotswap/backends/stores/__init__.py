"""Stores of weights: a budgeted host tier, a local disk, and the tiered store over both."""

from hotswap.backends.stores.nvme import NvmeStore
from hotswap.backends.stores.pinned import PinnedStore
from hotswap.backends.stores.tiered import TieredStore

__all__ = ["NvmeStore", "PinnedStore", "TieredStore"]
