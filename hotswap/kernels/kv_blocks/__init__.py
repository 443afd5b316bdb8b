"""The KV blocks of a request, of all layers, gathered into one buffer or scattered from it by one launch.

A block of 16 tokens is a few kilobytes in each layer and on each side: copied one by one, the calls would
cost more than the bytes.
"""

from __future__ import annotations

from hotswap.kernels.kv_blocks.launch import BlockTable, gather, scatter

__all__ = ["BlockTable", "gather", "scatter"]
