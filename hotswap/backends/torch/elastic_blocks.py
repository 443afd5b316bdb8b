"""`ElasticBlocks`: a block pool whose memory is leased, which grows for requests and shrinks for others."""

from __future__ import annotations

from collections.abc import Iterator

from hotswap.backends.torch.blocks import BlockPool
from hotswap.backends.torch.device_memory import LeasedMemory
from hotswap.backends.torch.kv import KVCache
from hotswap.errors import OutOfMemory

__all__ = ["ElasticBlocks"]

# A pool grows by this part of its most blocks at once, as long as that takes nothing from others.
_GRAIN = 32


class ElasticBlocks(BlockPool):
    """The blocks of a KV cache whose addresses are reserved for the most blocks that it may have.

    The memory of block 0 and of blocks that are not withdrawn is leased. The pool has at least
    `least_blocks`, which fit into the floor of the lease beside the weights: a request that fits into them is
    never without memory. It grows when a request lacks blocks. When others want memory, blocks that no
    request uses are withdrawn, unless requests here wait for some, and their memory returns to the system.

    Belongs to the engine's thread; to its event loop while no runner is attached.

    Args:
        cache: The memory of the blocks.
        memory: What the engine has of its device's budget.
    """

    def __init__(self, cache: KVCache, memory: LeasedMemory) -> None:
        super().__init__(0, cache.num_blocks)
        self._cache, self._memory, self._size = cache, memory, cache.block_bytes
        self._least = self._beside_bytes = 0
        self._limit: int | None = None  # of growth, after a resize, while others want memory
        self._is_short = False  # since the last `settle`

    @property
    def least_blocks(self) -> int:
        return self._least

    @property
    def reachable_blocks(self) -> int:
        if not self._size:
            return self.most_blocks
        return min(self.most_blocks, self.num_blocks + self._memory.reachable_bytes // self._size)

    def begin(self, weight_bytes: int, state_bytes: int) -> None:
        floor, beside = self._memory.floor_bytes, weight_bytes + state_bytes + self._size
        least = min(self.most_blocks, (floor - beside) // max(1, self._size))
        missing = max(0, least - self.num_blocks)
        more = state_bytes + self._size - self._beside_bytes + missing * self._size
        if least < 1 or not self._memory.take_kv(max(0, more)):
            self._memory.forget_kv()
            raise OutOfMemory(
                f"Weights and recurrent states take {weight_bytes + state_bytes:,} bytes, and no KV block of "
                f"{self._size:,} bytes fits beside them into the {floor:,} bytes that the engine always has; "
                "raise its floor_bytes."
            )
        self._beside_bytes = state_bytes + self._size
        self._least, self._limit = least, None
        self.restore(missing)

    def close(self) -> None:
        if not self._beside_bytes and not self.num_blocks:
            return
        self._cache.discard([range(self.most_blocks + 1)])
        self._memory.forget_kv()
        size_bytes = self._beside_bytes + self.num_blocks * self._size
        self._withdraw_all()
        self._beside_bytes = 0
        self._memory.give(size_bytes)

    def grow(self, count: int) -> bool:
        room = self._room
        if 0 < count <= room:
            more = min(room, max(count, self.most_blocks // _GRAIN))
            if self._add(more if more * self._size <= self._memory.available_bytes else count):
                return True
        self._is_short = True
        return False

    def settle(self, *, num_running: int, is_waiting: bool) -> None:
        is_short, self._is_short = self._is_short and is_waiting, False
        if not is_short:
            self._memory.forget_kv()
        if self._limit is not None:
            if self._memory.is_wanted:
                self._give(min(self.num_blocks - self._limit, self.num_free))
            else:
                self._limit = None
        if not is_short:
            owed = -(-self._memory.owed_bytes // max(1, self._size))
            self._give(min(owed, self.num_blocks - self._least, self.num_free - num_running))

    def resize(self, num_blocks: int) -> int:
        target = max(self._least, min(num_blocks, self.most_blocks))
        self._limit = None
        if target < self.num_blocks:
            self._limit = target
            self._give(min(self.num_blocks - target, self.num_free))
        elif target > self.num_blocks:
            available = self._memory.available_bytes // max(1, self._size)
            self._add(min(target - self.num_blocks, available, self._room))
        return self.num_blocks

    @property
    def _room(self) -> int:
        """The blocks by which the pool may grow, if the budget has memory for them."""
        limit = self.reachable_blocks if self._limit is None else min(self._limit, self.reachable_blocks)
        return limit - self.num_blocks

    def _add(self, count: int) -> bool:
        if count <= 0 or not self._memory.take_kv(count * self._size):
            return False
        self.restore(count)
        return True

    def _give(self, count: int) -> None:
        """Withdraw blocks that no request uses, and give their memory back; first to the system."""
        if count <= 0:
            return
        blocks = self.withdraw(count)
        self._cache.discard(self._runs(blocks))
        self._memory.give(len(blocks) * self._size)

    def _runs(self, blocks: list[int]) -> Iterator[range]:
        """Yield the runs of withdrawn blocks that include these: pages may lie across two blocks."""
        withdrawn, done = set(self._withdrawn), set[int]()
        for block in blocks:
            if block in done:
                continue
            first = last = block
            while first - 1 in withdrawn:
                first -= 1
            while last + 1 in withdrawn:
                last += 1
            done.update(range(first, last + 1))
            yield range(first, last + 1)

    def _withdraw_all(self) -> None:
        self.release_all()
        self.withdraw(self.num_blocks)
