"""Stores of weights: a budgeted host tier, a local disk, and the tiered store over both."""

from hotswap.backends.stores.nvme import NvmeStore

__all__ = ["NvmeStore"]
