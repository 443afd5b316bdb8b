"""What a KV store holds and what goes first: blocks by key, leases, and eviction by worth for each byte.

Of the blocks that none follows and that are not leased, the one of the least rank goes first. The rank of a
block is the worth that it was put with, in seconds over bytes, plus the highest rank that was evicted before
its last use (GreedyDual-Size: Cao and Irani, "Cost-aware WWW proxy caching algorithms", USITS 1997). So worth
ages, and among equal blocks the one used longest ago goes first.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Generic, TypeVar

from hotswap.kv_store import KVPrefix
from hotswap.migration import KVLayout
from hotswap.request import ModelId
from hotswap.store_view import StoredKV

__all__ = ["Found", "KVIndex", "Places", "StoredBlock", "states_key"]

PlaceT = TypeVar("PlaceT")

# Blocks after one block that are looked at for a common beginning, those put last first.
_MOST_SIBLINGS = 16


@dataclass(slots=True, eq=False)
class StoredBlock(Generic[PlaceT]):
    """One block.

    Attributes:
        key: Its key.
        parent: The key before.
        tokens: Its tokens; fewer than a block has slots for the last one of a request. None for recurrent
            states, which are kept like a block after the one with the last token before them.
        model: The model that computed it.
        place: Where its content is.
        size_bytes: What it takes.
        worth: Seconds that it saves for each byte.
        num_leases: How many leases and puts keep it.
        rank: What it is evicted by, the least first.
    """

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]
    model: ModelId
    place: PlaceT
    size_bytes: int
    worth: float = 0.0
    num_leases: int = 0
    rank: tuple[float, int] = (0.0, 0)


@dataclass(frozen=True, slots=True)
class Places(Generic[PlaceT]):
    """Places of blocks of a prefix, from `first_block` on to the end of `num_tokens` first tokens.

    With them that of the recurrent states after these tokens, if it is meant too.
    """

    layout: KVLayout
    first_block: int
    num_tokens: int
    blocks: tuple[PlaceT, ...]
    states: tuple[PlaceT, ...] = ()


@dataclass(frozen=True, slots=True)
class Found(Generic[PlaceT]):
    """The stored beginning of a prefix: its blocks, of which the last may share only its first tokens.

    `states` are the recurrent states after the last token, for a model that has some.
    """

    blocks: tuple[StoredBlock[PlaceT], ...] = ()
    num_tokens: int = 0
    states: StoredBlock[PlaceT] | None = None


@dataclass(slots=True, eq=False)
class KVIndex(Generic[PlaceT]):
    """The blocks of one store under a budget of bytes. Synchronous: each method leaves every count right.

    A lease of a block protects those before it as well, for a block that another one follows is not evicted.

    Args:
        capacity_bytes: The most that the blocks take together.

    Attributes:
        used_bytes: What they take, reserved bytes included.
        num_evicted: Blocks evicted so far.
    """

    capacity_bytes: int
    used_bytes: int = field(init=False, default=0)
    num_evicted: int = field(init=False, default=0)
    _blocks: dict[bytes, StoredBlock[PlaceT]] = field(
        init=False, default_factory=dict[bytes, StoredBlock[PlaceT]]
    )
    _children: dict[bytes, dict[bytes, StoredBlock[PlaceT]]] = field(
        init=False, default_factory=dict[bytes, dict[bytes, StoredBlock[PlaceT]]]
    )
    _evictable: list[tuple[tuple[float, int], bytes]] = field(
        init=False, default_factory=list[tuple[tuple[float, int], bytes]]
    )
    _num_blocks: Counter[ModelId] = field(init=False, default_factory=Counter[ModelId])
    _num_bytes: Counter[ModelId] = field(init=False, default_factory=Counter[ModelId])
    _floor: float = field(init=False, default=0.0)  # the highest rank that was evicted
    _num_uses: int = field(init=False, default=0)

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[StoredBlock[PlaceT]]:
        return iter(self._blocks.values())

    # ------------------------------------------------------------------ look-ups

    def find(self, prefix: KVPrefix) -> Found[PlaceT]:
        """Return the stored beginning of a prefix."""
        blocks = self._full(prefix)
        num_tokens = len(blocks) * prefix.layout.block_tokens
        if (last := self._longest(prefix, len(blocks))) is not None:
            blocks.append(last[0])
            num_tokens += last[1]
        return Found(tuple(blocks), num_tokens)

    def find_with_states(self, prefix: KVPrefix) -> Found[PlaceT]:
        """Return the longest stored beginning of a prefix after which recurrent states are stored, too."""
        blocks = self._full(prefix)
        for at in range(len(blocks), -1, -1):
            tokens = prefix.tokens_of(at)
            whole = [
                (len(block.tokens), block, states)
                for block in self._children.get(prefix.parent(at), {}).values()
                if 0 < len(block.tokens) <= len(tokens)
                and block.tokens == tokens[: len(block.tokens)]
                and (states := self._blocks.get(states_key(block.key))) is not None
            ]
            if whole:
                count, block, states = max(whole, key=itemgetter(0))
                return Found((*blocks[:at], block), at * prefix.layout.block_tokens + count, states)
        return Found()

    def _full(self, prefix: KVPrefix) -> list[StoredBlock[PlaceT]]:
        """Return the stored full blocks from the start of a prefix on."""
        blocks: list[StoredBlock[PlaceT]] = []
        while len(blocks) < prefix.num_full and (block := self._blocks.get(prefix.key(len(blocks)))):
            blocks.append(block)
        return blocks

    def _longest(self, prefix: KVPrefix, at: int) -> tuple[StoredBlock[PlaceT], int] | None:
        """Return the stored block that shares the most first tokens with a block of the prefix, and those."""
        tokens, best = prefix.tokens_of(at), None
        siblings = self._children.get(prefix.parent(at)) if tokens else None
        if siblings:
            for block in islice(reversed(siblings.values()), _MOST_SIBLINGS):
                shared = _num_shared(block.tokens, tokens)
                if shared and (best is None or shared > best[1]):
                    best = block, shared
        return best

    def get(self, key: bytes) -> StoredBlock[PlaceT] | None:
        """Return the block with a key; `None` if it is not stored."""
        return self._blocks.get(key)

    def models(self) -> tuple[StoredKV, ...]:
        """Return what is stored of each model."""
        return tuple(
            StoredKV(model=model, num_blocks=count, size_bytes=self._num_bytes[model])
            for model, count in self._num_blocks.items()
            if count
        )

    # ------------------------------------------------------------------ leases and use

    def use(self, blocks: Iterable[StoredBlock[PlaceT]], worth: float = 0.0) -> None:
        """Count blocks as used now; from now on they are worth at least that much."""
        for block in blocks:
            block.worth = max(block.worth, worth)
            self._use(block)

    def lease(self, block: StoredBlock[PlaceT]) -> None:
        """Keep a block, and so those before it, until it is released as often."""
        block.num_leases += 1

    def release(self, block: StoredBlock[PlaceT]) -> None:
        """Let a leased block be evicted again."""
        assert block.num_leases > 0, "a block is released more often than leased"
        block.num_leases -= 1
        self._offer(block)

    def _use(self, block: StoredBlock[PlaceT]) -> None:
        self._num_uses += 1
        block.rank = self._floor + block.worth, self._num_uses
        self._offer(block)

    # ------------------------------------------------------------------ room

    def reserve(self, size_bytes: int, worth: float) -> list[StoredBlock[PlaceT]] | None:
        """Reserve bytes for a block of some worth; return the blocks that were evicted for it.

        `None` if there is no room: what is left is leased, or worth more. Nothing is changed then.
        """
        evicted, floor = list[StoredBlock[PlaceT]](), self._floor
        while self.used_bytes + size_bytes > self.capacity_bytes:
            victim = self._first_to_go()
            if victim is None or victim.rank[0] > self._floor + worth:
                self._put_back(evicted)
                self._floor = floor
                return None
            self._floor = max(self._floor, victim.rank[0])
            self.num_evicted += 1
            self.remove(victim)
            evicted.append(victim)
        self.used_bytes += size_bytes
        return evicted

    def refuse(self, size_bytes: int, worth: float) -> None:
        """Count bytes that found no room: blocks worth more age as if these had been kept, and evicted."""
        if self._first_to_go() is not None:
            self._floor += worth * size_bytes / self.capacity_bytes

    def _put_back(self, evicted: list[StoredBlock[PlaceT]]) -> None:
        """Keep blocks whose room is not enough, each by the rank that it had."""
        for block in evicted:
            self.num_evicted -= 1
            self.used_bytes += block.size_bytes
            self._insert(block)
        for block in evicted:
            self._offer(block)

    def unreserve(self, size_bytes: int) -> None:
        """Give reserved bytes back that no block takes."""
        self.used_bytes -= size_bytes

    def add(self, block: StoredBlock[PlaceT]) -> Iterable[StoredBlock[PlaceT]]:
        """Add a block for which its bytes are reserved; return those that it makes superfluous, removed.

        The block before it must be stored, unless it is the first.
        """
        assert block.key not in self._blocks, "a block is added twice"
        siblings = list(self._children.get(block.parent, {}).values())
        self._insert(block)
        self._use(block)
        superfluous = [one for one in siblings[-_MOST_SIBLINGS:] if self._is_covered(one, block)]
        for one in superfluous:
            self.remove(one)
        return superfluous

    def _insert(self, block: StoredBlock[PlaceT]) -> None:
        self._blocks[block.key] = block
        self._children.setdefault(block.parent, {})[block.key] = block
        self._num_blocks[block.model] += 1
        self._num_bytes[block.model] += block.size_bytes

    def _is_covered(self, block: StoredBlock[PlaceT], by: StoredBlock[PlaceT]) -> bool:
        shorter = 0 < len(block.tokens) < len(by.tokens) and by.tokens[: len(block.tokens)] == block.tokens
        return shorter and not block.num_leases and block.key not in self._children

    def remove(self, block: StoredBlock[PlaceT]) -> None:
        """Remove a block that none follows and that is not leased, with the bytes that it takes."""
        assert not block.num_leases, "a leased block is removed"
        assert block.key not in self._children, "a block is removed before those that follow it"
        self._take_out(block)

    def lose(self, block: StoredBlock[PlaceT]) -> None:
        """Remove a block whatever follows it, which is found again once such a block has been added again."""
        self._take_out(block)

    def _take_out(self, block: StoredBlock[PlaceT]) -> None:
        del self._blocks[block.key]
        siblings = self._children[block.parent]
        del siblings[block.key]
        if not siblings:
            del self._children[block.parent]
            if (before := self._blocks.get(block.parent)) is not None:
                self._offer(before)
        self._num_blocks[block.model] -= 1
        self._num_bytes[block.model] -= block.size_bytes
        self.used_bytes -= block.size_bytes

    def pop(self) -> StoredBlock[PlaceT] | None:
        """Remove and return the block that goes first; `None` once all that are left are leased."""
        block = self._first_to_go()
        if block is not None:
            self.remove(block)
        return block

    def _offer(self, block: StoredBlock[PlaceT]) -> None:
        """Have a block be evicted in its turn, if it may be."""
        if self._may_go(block):
            heapq.heappush(self._evictable, (block.rank, block.key))
            if len(self._evictable) > 2 * len(self._blocks) + 64:  # most entries are outdated
                self._evictable = [(b.rank, b.key) for b in self._blocks.values() if self._may_go(b)]
                heapq.heapify(self._evictable)

    def _first_to_go(self) -> StoredBlock[PlaceT] | None:
        while self._evictable:
            rank, key = self._evictable[0]
            block = self._blocks.get(key)
            if block is not None and block.rank == rank and self._may_go(block):
                return block
            heapq.heappop(self._evictable)
        return None

    def _may_go(self, block: StoredBlock[PlaceT]) -> bool:
        return not block.num_leases and block.key not in self._children and block.key in self._blocks

    def __repr__(self) -> str:
        used = f"{self.used_bytes:,} of {self.capacity_bytes:,} bytes"
        return f"<KVIndex [{len(self._blocks)} blocks, {used}]>"


def states_key(block: bytes) -> bytes:
    """Return the key of the recurrent states after the last token of the block with a key."""
    return hashlib.blake2b(block + b"states", digest_size=32).digest()


def _num_shared(mine: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the length of the common beginning."""
    if mine[: len(theirs)] == theirs[: len(mine)]:
        return min(len(mine), len(theirs))
    return next(at for at, (one, other) in enumerate(zip(mine, theirs, strict=False)) if one != other)
