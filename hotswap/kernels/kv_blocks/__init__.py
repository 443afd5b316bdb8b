"""Copies KV blocks of all layers to one buffer (`gather`) or back (`scatter`), in one kernel launch.

A block of 16 tokens has a few kilobytes of keys and of values in each layer: with one copy for each, the
launches would take longer than the transfer.
"""

from __future__ import annotations

from hotswap.kernels.kv_blocks.launch import BlockTable, gather, scatter

__all__ = ["BlockTable", "gather", "scatter"]
