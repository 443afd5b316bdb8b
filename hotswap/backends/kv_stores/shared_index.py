"""What a `SharedKVStore` holds: an index in each process, kept up to date by the log."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from hotswap.backends.kv_index import KVIndex, StoredBlock
from hotswap.backends.kv_stores.shared_directory import BlockFile, SharedDirectory, first_of, member_of
from hotswap.backends.kv_stores.shared_log import Op, SharedLog
from hotswap.errors import HotswapError, StoreBusy, StoreError, TierFull
from hotswap.request import ModelId

__all__ = ["SharedIndex"]

Block = StoredBlock[BlockFile]

# How long a caller that cannot wait waits for another process, and how long one that can.
_SHORTLY_S: Final = 0.01
_WAIT_S: Final = 10.0
# What a block takes in the log beside its tokens, at most.
_BLOCK_BYTES: Final = 4096


class SharedIndex(KVIndex[BlockFile]):
    """A `KVIndex` of the blocks of all processes that use a directory, in one of these.

    In a `locked` block it is what it is in all of them, and what is changed is told to them at its end;
    elsewhere it is as it was then. Leases end, and reserved bytes are given back, without the lock.

    Args:
        path: The directory.
        capacity_bytes: The budget.
    """

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.directory = SharedDirectory(path)
        self._log = SharedLog(path, capacity_bytes)
        self._depth = 0
        self._was_late = False
        self._ops: list[str] = []  # to be told
        self._reserved_untold = 0
        self._untold_bytes = 0
        self._member = self._num_members = self._num_files = 0
        self._reserved: dict[int, int] = {}  # by process, also of those that have none
        self._before: dict[bytes, Block] = {}
        self._told = self._counts()

    # ------------------------------------------------------------------ processes

    def open(self) -> None:
        """Join the processes that use the directory. Blocking.

        Raises:
            ConfigError: the directory, or the budget, is not that of such a store.
            StoreError: the directory cannot be used, or its log is damaged.
        """
        self.directory.open()
        try:
            if not self.directory.try_lock(_WAIT_S):
                raise self.busy(_WAIT_S)
            try:
                self._log.open()
                self._catch_up()
                self._member = self._num_members + 1
                self.directory.lease(first_of(self._member))
                self._reserved[self._member], self._num_members = 0, self._member
                self._tell("join", self._member)
                self._end_dead()
                self._commit()
            finally:
                self.directory.unlock()
        except BaseException:
            self._leave()
            raise

    def close(self) -> None:
        """Leave them; their blocks and those of this process stay. Blocking."""
        with suppress(HotswapError), self.locked(_WAIT_S) as is_locked:
            if is_locked:
                self._end(self._member)
        self._leave()

    def unlink(self) -> None:
        """Join, and remove all that there is. Blocking.

        Raises:
            StoreBusy: another process uses it.
        """
        self.open()
        try:
            with self.locked(_WAIT_S) as is_locked:
                if not is_locked or any(map(self._is_alive, self._reserved)):
                    raise StoreBusy(
                        f"{str(self.directory.path)!r} is used by another process; end that first."
                    )
                self.directory.remove()
        finally:
            self.close()

    def busy(self, waited_s: float) -> StoreBusy:
        """The error of a caller that has waited for the lock."""
        return StoreBusy(
            f"{str(self.directory.path)!r} has been locked by another process for {waited_s:g} s. If that is "
            "stopped, let it go on or end it."
        )

    def new_file(self) -> BlockFile:
        """Return a file for a block, which has a number that none had before."""
        self._num_files += 1
        return BlockFile(first_of(self._member) + self._num_files)

    def free(self, file: BlockFile) -> None:
        """Have the file of a block be deleted."""
        if file.is_there:
            file.is_there = False
            self.directory.free(file.number, self.new_file().number)

    def _leave(self) -> None:
        with suppress(OSError):
            self.directory.delete_freed()
        self.directory.close()
        self._log.close()

    def _is_alive(self, member: int) -> bool:
        return member != self._member and self.directory.is_leased(first_of(member))

    def _end_dead(self) -> None:
        """Take what processes had reserved that have ended."""
        for member in list(self._reserved):
            if member != self._member and not self._is_alive(member):
                self._end(member)

    def _end(self, member: int) -> None:
        """Take what a process had reserved, with the files of it that no block has."""
        stored = {block.place.number for block in self}
        self.directory.delete(lambda number: member_of(number) == member and number not in stored)
        self.used_bytes -= self._reserved.pop(member, 0)
        self._tell("end", member)

    # ------------------------------------------------------------------ the lock

    @property
    def is_locked(self) -> bool:
        """Whether it is what it is in all processes, and may be changed."""
        return self._depth > 0

    @contextmanager
    def locked(self, limit_s: float = _SHORTLY_S) -> Generator[bool]:
        """A block with the lock, or without if another process keeps it; tells which.

        After one wait in vain none is long until the lock was free again.

        Raises:
            StoreError: the log is damaged, or cannot be written.
        """
        if not self._depth and not self._begin(limit_s):
            yield False
            return
        self._depth += 1
        try:
            yield True
        finally:
            self._depth -= 1
            if not self._depth:
                try:
                    self._commit()
                finally:
                    self.directory.unlock()

    def tell_others(self) -> None:
        """Tell what was not told yet, unless another process has the lock; then it is told later."""
        if self._reserved_untold and not self._depth:
            with suppress(HotswapError), self.locked(0.0):
                pass

    def _begin(self, limit_s: float) -> bool:
        is_locked = self.directory.try_lock(0.0 if self._was_late and limit_s <= _SHORTLY_S else limit_s)
        self._was_late = not is_locked and (limit_s > 0 or self._was_late)
        if is_locked:
            try:
                self._catch_up()
                self._end_dead()
            except BaseException:
                self.directory.unlock()
                raise
        return is_locked

    def _catch_up(self) -> None:
        """Make what other processes have changed."""
        is_anew = False
        for op in self._log.read():
            if op is None:
                is_anew = True
                self._clear()
            else:
                self._make(op)
        if is_anew:
            self._before.clear()
            self._count_reserved(self._member, self._reserved_untold)
            self.used_bytes += self._reserved_untold
        self._told = self._counts()

    def _commit(self) -> None:
        """Tell the other processes what was changed."""
        if self._counts() != self._told:
            self._tell("count", *self._counts())
        if self._reserved_untold:
            self._tell("reserve", self._member, self._reserved_untold)
            self._reserved_untold = 0
        ops, self._ops, self._untold_bytes = self._ops, [], 0
        if ops:
            self._log.append(ops)

    def _tell(self, name: str, *values: object) -> None:
        text = json.dumps([name, *values], separators=(",", ":"))
        self._ops.append(text)
        self._untold_bytes += len(text) + 1

    def _counts(self) -> tuple[float, int, int]:
        return self._floor, self._num_uses, self.num_evicted

    # ------------------------------------------------------------------ a shorter log

    @property
    def is_long(self) -> bool:
        """Whether the log should be made shorter."""
        return self._log.is_long

    def begin_shortening(self) -> Iterator[str] | None:
        """Lock the directory for `shorten`, and return what it takes; `None` if it is locked."""
        with self.locked(0.0) as is_locked:
            if not is_locked:
                return None
        if not self._begin(0.0):
            return None
        reserved, num_members, counts = dict(self._reserved), self._num_members, self._counts()
        return _all_of(list(self), reserved, num_members, counts)

    def shorten(self, ops: Iterator[str]) -> None:
        """Replace the log by a shorter one, and unlock the directory. Blocking, in any thread."""
        try:
            self._log.replace(ops)
        finally:
            self.directory.unlock()

    # ------------------------------------------------------------------ changes of other processes

    def _clear(self) -> None:
        self._before = self._blocks
        self._blocks, self._children, self._evictable = {}, {}, []
        self._num_blocks, self._num_bytes = Counter[ModelId](), Counter[ModelId]()
        self.used_bytes, self._num_members, self._reserved = 0, 0, {}

    def _make(self, op: Op) -> None:
        match op:
            case ["add", member, *values]:
                block = self._block(*values)
                self._count_reserved(member, -block.size_bytes)
                self._insert(block)
                self._offer(block)
            case ["lose", key]:
                if (found := self.get(bytes.fromhex(key))) is not None:
                    self._take_out(found)
            case ["use", runs, worth, floor, number]:
                for at, block in enumerate(self._in_runs(runs), number):
                    block.worth = max(block.worth, worth)
                    block.rank = floor + block.worth, at
                    self._offer(block)
            case ["reserve", member, size]:
                self._count_reserved(member, size)
                self.used_bytes += size
            case ["join", member]:
                self._num_members = max(self._num_members, member)
                self._reserved[member] = 0
            case ["end", member]:
                self.used_bytes -= self._reserved.pop(member, 0)
            case ["count", floor, num_uses, num_evicted]:
                self._floor, self._num_uses, self.num_evicted = floor, num_uses, num_evicted
            case _:
                raise StoreError(f"{str(self.directory.path)!r} tells of {op!r:.40}, which is unknown.")

    def _block(
        self,
        number: int,
        crc: int,
        key: str,
        parent: str,
        tokens: list[int],
        model: str,
        size: int,
        worth: float,
        rank: list[float],
    ) -> Block:
        block = self._before.get(bytes.fromhex(key))
        if block is None or block.place.number != number:  # else it may be leased here
            file = BlockFile(number, crc, is_there=True)
            keys = bytes.fromhex(key), bytes.fromhex(parent)
            block = StoredBlock(*keys, tuple(tokens), ModelId(model), file, size)
        block.worth, block.rank = worth, (rank[0], int(rank[1]))
        return block

    def _in_runs(self, runs: list[tuple[str, int]]) -> Iterator[Block]:
        for key, length in runs:
            run, block = list[Block](), self.get(bytes.fromhex(key))
            while block is not None and len(run) < length:
                run.append(block)
                block = self.get(block.parent)
            yield from reversed(run)

    # ------------------------------------------------------------------ changes of this process

    def use(self, blocks: Iterable[Block], worth: float = 0.0) -> None:
        if not self._depth:
            return
        try:
            self._log.ensure(self._untold_bytes + _BLOCK_BYTES)
        except TierFull:  # what makes room needs what is left
            return
        runs, number = list[tuple[str, int]](), self._num_uses + 1
        blocks = list(blocks)
        for at, block in enumerate(blocks):
            follows = at and block.parent == blocks[at - 1].key
            length = runs.pop()[1] if follows else 0
            runs.append((block.key.hex(), length + 1))
        super().use(blocks, worth)
        if runs:
            self._tell("use", runs, worth, self._floor, number)

    def lease(self, block: Block) -> None:
        super().lease(block)
        if block.num_leases == 1:
            self.directory.lease(block.place.number)

    def release(self, block: Block) -> None:
        super().release(block)
        if not block.num_leases:
            self.directory.release(block.place.number)

    def reserve(self, size_bytes: int, worth: float) -> list[Block] | None:
        if not self._depth:
            return None
        evicted = super().reserve(size_bytes, worth)
        if evicted is not None:
            self._tell_of_lost(evicted)
            self._reserve(size_bytes)
        return evicted

    def refuse(self, size_bytes: int, worth: float) -> None:
        if self._depth:
            super().refuse(size_bytes, worth)

    def unreserve(self, size_bytes: int) -> None:
        super().unreserve(size_bytes)
        self._reserve(-size_bytes)

    def add(self, block: Block) -> Iterable[Block]:
        assert self._depth, "a block is added without the lock"
        self._log.ensure(self._untold_bytes + _BLOCK_BYTES + 24 * len(block.tokens))
        superfluous = super().add(block)
        self._count_reserved(self._member, -block.size_bytes)
        self._tell("add", self._member, *_values(block))
        self._tell_of_lost(superfluous)
        return superfluous

    def lose(self, block: Block) -> None:
        with self.locked() as is_locked:
            if is_locked and self.get(block.key) is block:
                super().lose(block)
                self._tell_of_lost([block])

    def pop(self) -> Block | None:
        block = super().pop()
        if block is not None:
            self._tell_of_lost([block])
        return block

    def _reserve(self, size_bytes: int) -> None:
        self._count_reserved(self._member, size_bytes)
        self._reserved_untold += size_bytes

    def _count_reserved(self, member: int, size_bytes: int) -> None:
        self._reserved[member] = self._reserved.get(member, 0) + size_bytes

    def _tell_of_lost(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._tell("lose", block.key.hex())

    def _first_to_go(self) -> Block | None:
        """Return the first that no process leases; those that others lease stay in their turn."""
        leased = list[tuple[tuple[float, int], bytes]]()
        while (block := super()._first_to_go()) is not None and self._is_leased_elsewhere(block):
            leased.append(heapq.heappop(self._evictable))
        for entry in leased:
            heapq.heappush(self._evictable, entry)
        return block

    def _is_covered(self, block: Block, by: Block) -> bool:
        return super()._is_covered(block, by) and not self._is_leased_elsewhere(block)

    def _is_leased_elsewhere(self, block: Block) -> bool:
        return self.directory.is_leased(block.place.number)


def _values(block: Block) -> tuple[object, ...]:
    file, keys = block.place, (block.key.hex(), block.parent.hex())
    return (
        file.number,
        file.crc,
        *keys,
        [*map(int, block.tokens)],
        block.model,
        block.size_bytes,
        block.worth,
        block.rank,
    )


def _all_of(
    blocks: list[Block], reserved: dict[int, int], num_members: int, counts: tuple[float, int, int]
) -> Iterator[str]:
    """Return the changes that make an index from nothing."""
    yield json.dumps(["join", num_members])
    yield json.dumps(["end", num_members])
    for member, size in reserved.items():
        yield json.dumps(["join", member])
        yield json.dumps(["reserve", member, size])
    yield json.dumps(["reserve", 0, sum(block.size_bytes for block in blocks)])
    for block in blocks:
        yield json.dumps(["add", 0, *_values(block)])
    yield json.dumps(["end", 0])
    yield json.dumps(["count", *counts])
