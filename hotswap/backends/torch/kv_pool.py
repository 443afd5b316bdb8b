"""`KVPool`: the KV blocks of an engine, which stay where the next model's blocks have the same format.

A model that comes back after a swap to another one of that format so finds what it had, unless others have
taken the room. The keys of blocks cover the weights (`prefix`), so none is read for another model.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotswap.backends.torch.blocks import BlockPool
from hotswap.backends.torch.device_memory import DeviceMemory, LeasedMemory
from hotswap.backends.torch.elastic_blocks import ElasticBlocks
from hotswap.backends.torch.forward import LocalForward
from hotswap.backends.torch.kv import KVCache

__all__ = ["KVPool"]


@dataclass(frozen=True, slots=True, eq=False)
class KVPool:
    """The KV blocks of an engine.

    Attributes:
        cache: Their memory.
        blocks: What each contains, and which are in use.
        state_bytes: The memory of recurrent states beside them.
    """

    cache: KVCache
    blocks: BlockPool
    state_bytes: int

    @classmethod
    def of(cls, forward: LocalForward, memory: DeviceMemory) -> KVPool:
        """Return the pool of a model's cache, of a size that changes if the engine's memory is leased."""
        cache, states = forward.cache, forward.states
        blocks = BlockPool(cache.num_blocks)
        if isinstance(memory, LeasedMemory):
            blocks = ElasticBlocks(cache, memory)
        return cls(cache, blocks, 0 if states is None else states.size_bytes)

    @property
    def size_bytes(self) -> int:
        """The memory that blocks and states take."""
        return (self.blocks.num_blocks + 1) * self.cache.block_bytes + self.state_bytes

    @property
    def spare_bytes(self) -> int:
        """The memory of blocks that could be given back now."""
        blocks = self.blocks
        return max(0, min(blocks.num_free, blocks.num_blocks - blocks.least_blocks)) * self.cache.block_bytes
