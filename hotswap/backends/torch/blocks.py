"""The books of KV memory: who holds which block, and what the blocks that nobody holds still know.

A block is *held* by one request or by several that share its prefix, *cached* when nobody holds it but its
content may serve again, or *free*. Held blocks are counted by holder; cached ones go, those let go longest
ago first, when free ones run out. Contents are known by what came before them too (see `prefix`), so a block
found by its key can stand for the very tokens it was computed from, and for no others.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["BlockPool", "Content", "Copy"]


@dataclass(frozen=True, slots=True)
class Content:
    """What a block has keys and values of.

    Attributes:
        key: Stands for `parent` and `tokens`, and so for everything that the values depend on.
        parent: The key of the block before.
        tokens: From the block's first slot on; fewer than fit where a request ended amid the block.
    """

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]

    def overlap(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, from the first on, the block has."""
        for at, (mine, theirs) in enumerate(zip(self.tokens, tokens, strict=False)):
            if mine != theirs:
                return at
        return min(len(self.tokens), len(tokens))


@dataclass(frozen=True, slots=True)
class Copy:
    """The first `num_tokens` slots of block `source` go to block `target`, whose other slots are cleared."""

    source: int
    target: int
    num_tokens: int


class BlockPool:
    """Blocks 1 to `num_blocks`, each free, cached or held; everything here is a few dictionary look-ups.

    Block 0 belongs to nobody; rows that only pad a batch write there.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(1, num_blocks + 1))
        self._holders: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # let go longest ago first
        self._contents: dict[int, Content] = {}
        self._by_key: dict[bytes, int] = {}
        self._by_start: dict[tuple[bytes, int], int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `take` could hand out now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content may serve again."""
        return len(self._cached)

    def is_held(self, block: int) -> bool:
        """Whether any request holds the block."""
        return block in self._holders

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks whose content is lost; the caller has checked `num_free`."""
        return [self._take() for _ in range(count)]

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to blocks that are held or cached."""
        for block in blocks:
            self._cached.pop(block, None)
            self._holders[block] = self._holders.get(block, 0) + 1

    def give(self, blocks: Sequence[int]) -> None:
        """Take one holder away from each of a request's blocks; those without one are cached or free.

        The last goes first, because a block without those before it is of no use.
        """
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            del self._holders[block]
            if block in self._contents:
                self._cached[block] = None
            else:
                self._free.append(block)

    def num_freed_by(self, tables: Iterable[Sequence[int]]) -> int:
        """How many more blocks would be free if the requests with these block tables let go of them."""
        counts = Counter(block for table in tables for block in table)
        return sum(self._holders[block] == count for block, count in counts.items())

    def publish(self, block: int, content: Content) -> None:
        """Let a held block be found by its content, which will not change for as long as it is there.

        Nothing happens if another block can be found that has as much.
        """
        start = (content.parent, content.tokens[0])
        rival = self._by_start.get(start)
        if content.key in self._by_key or (
            rival is not None and self._contents[rival].overlap(content.tokens) == len(content.tokens)
        ):
            return
        self._contents[block] = content
        self._by_key[content.key] = self._by_start[start] = block

    def find(self, key: bytes) -> int | None:
        """Return the block of which `key` is the content's, if there is one."""
        return self._by_key.get(key)

    def find_start(self, parent: bytes, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Return a block that has the first of `tokens` after `parent`, and how many of them it has.

        Of several it is the one published last, whatever the others have.
        """
        block = self._by_start.get((parent, tokens[0])) if tokens else None
        return None if block is None else (block, self._contents[block].overlap(tokens))

    def _take(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self._holders[block] = 1
        return block

    def _forget(self, block: int) -> None:
        content = self._contents.pop(block)
        del self._by_key[content.key]
        start = (content.parent, content.tokens[0])
        if self._by_start.get(start) == block:
            del self._by_start[start]

    def __repr__(self) -> str:
        return (
            f"<BlockPool [{self.num_blocks} blocks: {len(self._holders)} held, {len(self._cached)} cached, "
            f"{len(self._free)} free]>"
        )
