"""`ElasticBlocks`: a block pool whose memory is leased, which grows for requests and shrinks for others."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from heapq import heappop, heappush

from hotswap.backends.torch.blocks import BlockPool
from hotswap.backends.torch.device_memory import LeasedMemory
from hotswap.backends.torch.kv import KVCache
from hotswap.errors import OutOfMemory

__all__ = ["ElasticBlocks"]

_log = logging.getLogger("hotswap")

# A pool grows by this part of its most blocks at once, as long as that takes nothing from others.
_GRAIN = 32


class ElasticBlocks(BlockPool):
    """The blocks of a KV cache whose addresses are reserved for the most blocks that it may have.

    The memory of block 0 and of blocks that are not withdrawn is leased. It comes and goes in *groups* of
    blocks, which are single blocks on a CPU. The pool has at least `least_blocks`, which fit into the floor
    of the lease beside the weights: a request that fits into them is never without memory. It grows when a
    request lacks blocks. When others want memory, groups that no request uses are withdrawn, unless requests
    here wait for some, and their memory returns to the system.

    Belongs to the engine's thread; to its event loop while no runner is attached.

    Args:
        cache: The memory of the blocks.
        memory: What the engine has of its device's budget.
    """

    def __init__(self, cache: KVCache, memory: LeasedMemory) -> None:
        self._group, self._group_bytes = cache.group_blocks, cache.group_blocks * cache.block_bytes
        self._most_groups = (cache.num_blocks + 1) // self._group
        super().__init__(0, self._blocks_of(self._most_groups))
        self._cache, self._memory = cache, memory
        # Groups whose memory is leased; the first has block 0, and is the first to come.
        self._num_groups = self._least_groups = self._state_bytes = 0
        self._limit: int | None = None  # of groups, after a resize, while others want memory
        self._is_short = False  # since the last `settle`

    @property
    def least_blocks(self) -> int:
        return self._blocks_of(self._least_groups)

    @property
    def reachable_blocks(self) -> int:
        return self._blocks_of(self._num_reachable)

    def begin(self, weight_bytes: int, state_bytes: int) -> None:
        floor, beside = self._memory.floor_bytes, weight_bytes + state_bytes
        least = min(self._most_groups, (floor - beside) // max(1, self._group_bytes))
        missing = max(0, least - self._num_groups)
        more = max(0, state_bytes - self._state_bytes + missing * self._group_bytes)
        if self._blocks_of(least) < 1 or not self._memory.take_kv(more):
            self._memory.forget_kv()
            raise OutOfMemory(
                f"Weights and recurrent states take {beside:,} bytes, and no KV blocks, which take "
                f"{self._group_bytes:,} bytes at a time, fit beside them into the {floor:,} bytes that the "
                "engine always has; raise its floor_bytes."
            )
        try:
            self._restore(missing)
        except OutOfMemory:
            self._memory.give(more)
            raise
        self._state_bytes, self._least_groups, self._limit = state_bytes, least, None

    def close(self) -> None:
        if not self._num_groups:
            return
        self._cache.discard([range(self.most_blocks + 1)])
        self._memory.forget_kv()
        size_bytes = self._state_bytes + self._num_groups * self._group_bytes
        self.release_all()
        self.withdraw(self.num_blocks)
        self._num_groups = self._state_bytes = 0
        self._memory.give(size_bytes)

    def grow(self, count: int) -> bool:
        groups, room = -(-count // self._group), self._room
        if 0 < groups <= room:
            more = min(room, max(groups, self._most_groups // _GRAIN))
            if self._add(more if more * self._group_bytes <= self._memory.available_bytes else groups):
                return True
        self._is_short = True
        return False

    def settle(self, *, num_running: int, is_waiting: bool) -> None:
        is_short, self._is_short = self._is_short and is_waiting, False
        if not is_short:
            self._memory.forget_kv()
        if self._limit is not None:
            if self._memory.is_wanted:
                self._give(self._num_groups - self._limit)
            else:
                self._limit = None
        if not is_short:
            owed = -(-self._memory.owed_bytes // max(1, self._group_bytes))
            idle = (self.num_free - num_running) // self._group
            self._give(min(owed, self._num_groups - self._least_groups, idle))

    def resize(self, num_blocks: int) -> int:
        wanted = -(-(min(num_blocks, self.most_blocks) + 1) // self._group)
        target = max(self._least_groups, wanted)
        self._limit = None
        if target < self._num_groups:
            self._limit = target
            self._give(self._num_groups - target)
        elif target > self._num_groups:
            available = self._memory.available_bytes // max(1, self._group_bytes)
            self._add(min(target - self._num_groups, available, self._room))
        return self.num_blocks

    def _blocks_of(self, num_groups: int) -> int:
        """Return how many blocks groups have beside block 0."""
        return max(0, num_groups * self._group - 1)

    @property
    def _num_reachable(self) -> int:
        """The groups that there could be if others had no more memory than their floors."""
        if not self._group_bytes:
            return self._most_groups
        return min(self._most_groups, self._num_groups + self._memory.reachable_bytes // self._group_bytes)

    @property
    def _room(self) -> int:
        """The groups by which the pool may grow, if the budget has memory for them."""
        limit = self._num_reachable if self._limit is None else min(self._limit, self._num_reachable)
        return limit - self._num_groups

    def _add(self, count: int) -> bool:
        if count <= 0 or not self._memory.take_kv(count * self._group_bytes):
            return False
        try:
            self._restore(count)
        except OutOfMemory as exc:  # something that has no lease uses the device
            self._memory.give(count * self._group_bytes)
            _log.warning("A KV pool did not grow, though its device_budget has memory left: %s", exc)
            return False
        return True

    def _restore(self, count: int) -> None:
        """Take back withdrawn groups, the lowest numbers first, with their memory.

        Raises:
            OutOfMemory: the device has not so much; nothing has changed.
        """
        groups, blocks = list[int](), list[int]()
        for _ in range(count):
            is_first = not (self._num_groups or groups)
            groups.append(0 if is_first else self._withdrawn[0] // self._group)
            blocks += (heappop(self._withdrawn) for _ in range(self._group - is_first))
        try:
            self._cache.populate(groups)
        except OutOfMemory:
            for block in blocks:
                heappush(self._withdrawn, block)
            raise
        self._free.extend(blocks)
        self._num_groups += count

    def _give(self, count: int) -> None:
        """Withdraw groups that no request uses, and give their memory back; first to the system."""
        if count <= 0:
            return
        blocks = self.withdraw(count, self._group)
        num_groups = len(blocks) // self._group
        if num_groups:
            self._cache.discard(self._runs(blocks))
            self._num_groups -= num_groups
            self._memory.give(num_groups * self._group_bytes)

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
