"""The KV block allocator: reference counts of blocks, and an LRU prefix cache of released ones.

A block is *in use* by one or several requests that share a prefix, *cached* if no request uses it but its
content can be reused, or *free*. When no block is free, the least recently released cached block is
reallocated. A pool that shrinks *withdraws* blocks that no request uses; it grows by taking them back. The
key of a content covers all tokens before it (see `prefix`), so a block found by its key
holds exactly the keys and values of that prefix.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappush

__all__ = ["BlockPool", "Content", "Copy", "runs_of"]


@dataclass(frozen=True, slots=True)
class Content:
    """The tokens whose keys and values a block contains.

    Attributes:
        key: The hash of `parent` and `tokens`, and so of everything that the values depend on.
        parent: The key of the block before.
        tokens: Token ids from the block's first slot on; fewer than the block has slots if a request ended
            within it.
    """

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]

    def overlap(self, tokens: Sequence[int]) -> int:
        """Return the length of the common prefix of `tokens` and the block's tokens."""
        for at, (mine, theirs) in enumerate(zip(self.tokens, tokens, strict=False)):
            if mine != theirs:
                return at
        return min(len(self.tokens), len(tokens))


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies the first `num_tokens` slots of block `source` to block `target`; clears the other slots."""

    source: int
    target: int
    num_tokens: int


def runs_of(blocks: Iterable[int]) -> list[range]:
    """Return the runs of consecutive numbers among ascending ones."""
    found: list[range] = []
    for block in blocks:
        if found and found[-1].stop == block:
            found[-1] = range(found[-1].start, block + 1)
        else:
            found.append(range(block, block + 1))
    return found


class BlockPool:
    """Blocks 1 to `most_blocks`, each free, cached, in use or withdrawn; most methods are a few look-ups.

    Block 0 is never allocated; padding rows of a batch write to it.

    Args:
        num_blocks: The blocks that are not withdrawn at first.
        most_blocks: The blocks that there are. Default: `None`, `num_blocks`.

    Attributes:
        kept_since_s: The time (`time.monotonic`, as of event loops) since which the pool has lost no content
            of a block that was released later.
    """

    def __init__(self, num_blocks: int, most_blocks: int | None = None) -> None:
        self.most_blocks = num_blocks if most_blocks is None else most_blocks
        self._free = deque(range(1, num_blocks + 1))
        self._withdrawn = list(range(num_blocks + 1, self.most_blocks + 1))  # a heap
        self._ref_counts: dict[int, int] = {}
        self.kept_since_s = time.monotonic()
        # With the times of their release, least recently released first.
        self._cached: OrderedDict[int, float] = OrderedDict()
        self._contents: dict[int, Content] = {}
        self._by_key: dict[bytes, int] = {}
        self._by_start: dict[tuple[bytes, int], int] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks that are not withdrawn."""
        return self.most_blocks - len(self._withdrawn)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could return now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that no request uses and whose content can be reused."""
        return len(self._cached)

    @property
    def least_blocks(self) -> int:
        """Blocks that the pool always has, and so a request can have: all, in a pool of one size."""
        return self.num_blocks

    @property
    def reachable_blocks(self) -> int:
        """Blocks that the pool can grow to."""
        return self.num_blocks

    def begin(self, weight_bytes: int, state_bytes: int) -> None:
        """Take what the pool of a model has at least, which serves next.

        Args:
            weight_bytes: The weights of the model.
            state_bytes: The recurrent states of its requests.

        Raises:
            OutOfMemory: not one block fits beside them into what the engine always has.
        """

    def close(self) -> None:
        """Give back all memory, once nothing uses the blocks."""

    def grow(self, count: int) -> bool:
        """Add at least `count` free blocks, or none and return false: as a pool of one size always does."""
        return False

    def settle(self, *, num_running: int, is_waiting: bool) -> None:
        """Give back blocks that others want, unless requests lacked some since the last call.

        Args:
            num_running: The running requests, each of which may need a block soon.
            is_waiting: Whether requests wait.
        """

    def resize(self, num_blocks: int) -> int:
        """Bring the pool as near to a size as is possible without taking a block from a request.

        Returns the number of blocks reached. A pool that shrank does not grow beyond that size while others
        want memory, and shrinks to it as requests release blocks.
        """
        return self.num_blocks

    def withdraw(self, count: int, group: int = 1) -> list[int]:
        """Withdraw up to `count` groups of blocks that no request uses, and return their blocks.

        Free ones first, the highest numbers first; then those with cached blocks, whose content is lost: the
        least recently released first, a group as its last one.

        Args:
            count: How many groups.
            group: How many blocks a group has: the first those from 0 on, and so none that can be withdrawn
                unless a group is one block.
        """
        idle = Counter(block // group for block in (*self._free, *self._cached))
        released = {block // group: at for at, block in enumerate(self._cached)}
        whole = (number for number, size in idle.items() if size == group)
        chosen = sorted(whole, key=lambda number: (released.get(number, -1), -number))[:count]
        taken = set(chosen)
        self._free = deque(block for block in self._free if block // group not in taken)
        blocks = [number * group + at for number in chosen for at in range(group)]
        for block in blocks:
            if block in self._cached:
                self._lose(block, self._cached.pop(block))
            heappush(self._withdrawn, block)
        return blocks

    def is_referenced(self, block: int) -> bool:
        """Whether any request uses the block."""
        return block in self._ref_counts

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with a reference count of 1; the caller has checked `num_free`.

        The content of cached blocks among them is lost.
        """
        return [self._allocate() for _ in range(count)]

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of some blocks that are in use or cached."""
        for block in blocks:
            self._cached.pop(block, None)
            self._ref_counts[block] = self._ref_counts.get(block, 0) + 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference from each block of a table; blocks without one become cached or free.

        In reverse order: a cached block is reallocated before those that precede it, without which it could
        not be found.
        """
        now_s = time.monotonic()
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            del self._ref_counts[block]
            if block in self._contents:
                self._cached[block] = now_s
            else:
                self._free.append(block)

    def release_all(self) -> None:
        """Drop all references, once no request is left: each block becomes cached or free."""
        for block in list(self._ref_counts):
            self._ref_counts[block] = 1
            self.release([block])

    def num_freed_by(self, tables: Iterable[Sequence[int]]) -> int:
        """How many more blocks would be free if these block tables were released."""
        counts = Counter(block for table in tables for block in table)
        return sum(self._ref_counts[block] == count for block, count in counts.items())

    def publish(self, block: int, content: Content) -> None:
        """Register the content of a block in use, which must not change from now on.

        Does nothing if the pool can find another block with at least this content.
        """
        start = (content.parent, content.tokens[0])
        rival = self._by_start.get(start)
        if content.key in self._by_key or (
            rival is not None and self._contents[rival].overlap(content.tokens) == len(content.tokens)
        ):
            return
        self._contents[block] = content
        self._by_key[content.key] = self._by_start[start] = block

    def retract(self, block: int) -> None:
        """Unregister the content of a block in use, if it was published: it is not what it should be."""
        if block in self._contents:
            self._forget(block)

    def find(self, key: bytes) -> int | None:
        """Return the block whose content has `key`; `None` if there is none."""
        return self._by_key.get(key)

    def content(self, block: int) -> Content | None:
        """Return the content of a block; `None` if it was not published."""
        return self._contents.get(block)

    def cached_ends(self) -> list[Content]:
        """Return the contents of the cached blocks that no other follows, those released last first."""
        parents = {content.parent for content in self._contents.values()}
        cached = [self._contents[block] for block in reversed(self._cached)]
        return [content for content in cached if content.key not in parents]

    def find_start(self, parent: bytes, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Return a block that follows `parent` and begins with `tokens[0]`, and how many tokens it shares.

        Of several blocks it is the one published last, even if another shares more. `None` if there is none.
        """
        block = self._by_start.get((parent, tokens[0])) if tokens else None
        return None if block is None else (block, self._contents[block].overlap(tokens))

    def _allocate(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, released_s = self._cached.popitem(last=False)
            self._lose(block, released_s)
        self._ref_counts[block] = 1
        return block

    def _lose(self, block: int, released_s: float) -> None:
        self.kept_since_s = max(self.kept_since_s, released_s)
        self._forget(block)

    def _forget(self, block: int) -> None:
        content = self._contents.pop(block)
        del self._by_key[content.key]
        start = (content.parent, content.tokens[0])
        if self._by_start.get(start) == block:
            del self._by_start[start]

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} [{self.num_blocks} blocks: {len(self._ref_counts)} in use, "
            f"{len(self._cached)} cached, {len(self._free)} free]>"
        )
