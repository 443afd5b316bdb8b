"""`KVPool`: the KV blocks of an engine, which stay where the next model's blocks have the same format.

A model that comes back after a swap to another one of that format so finds what it had, unless others have
taken the room. The keys of blocks cover the weights (`prefix`), so none is read for another model.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotswap.backends.torch.blocks import BlockPool
from hotswap.backends.torch.kv import KVCache

__all__ = ["KVPool"]


@dataclass(frozen=True, slots=True, eq=False)
class KVPool:
    """The KV blocks of an engine.

    Attributes:
        cache: Their memory.
        blocks: What each contains, and which are in use.
    """

    cache: KVCache
    blocks: BlockPool
