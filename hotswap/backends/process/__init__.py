"""Engines in processes of their own on this machine, and shares of one GPU for each.

A `ProcessEngine` makes an engine in a child process and stands for it: a crash there costs this instance
alone. With `Mps`, and a `memory_bytes` of each engine, several of them share a GPU; `partition` makes them.
A `SharedDeviceBudget` lets engines of several processes lend each other memory.
Page `docs/remote.md` shows how.
"""

from __future__ import annotations

from hotswap.backends.process.engine import EngineMaker, ProcessEngine, StoreMaker
from hotswap.backends.process.mps import Mps
from hotswap.backends.process.partition import Share, ShareMaker, partition
from hotswap.backends.process.shared_budget import SharedDeviceBudget

__all__ = [
    "EngineMaker",
    "Mps",
    "ProcessEngine",
    "Share",
    "ShareMaker",
    "SharedDeviceBudget",
    "StoreMaker",
    "partition",
]
