"""`PoolFields`: what an engine tells of a KV pool whose size changes."""

from __future__ import annotations

from typing import TypedDict

__all__ = ["PoolFields"]


class PoolFields(TypedDict, total=False):
    """The fields of an `EngineStatus` that tell of a KV pool whose size changes."""

    request_kv_blocks: int
    least_kv_blocks: int
    most_kv_blocks: int
    kv_block_bytes: int
    device_budget: str
