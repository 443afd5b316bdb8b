"""How far a node is with a shard that it reads from peers or from storage, and whom it may hand it on to."""

from __future__ import annotations

from enum import Enum, auto

from anyio.lowlevel import checkpoint

from hotswap.backends.crc import crc32
from hotswap.backends.stores.layout import is_checksum
from hotswap.model import Shard

__all__ = ["Reading", "rank_of"]


_TURN_BYTES = 1 << 20


class _Source(Enum):
    NONE = auto()  # it looks for a peer
    PEER = auto()
    STORAGE = auto()


def rank_of(node: str, shard: Shard) -> tuple[int, str]:
    """The rank of a node among those that begin a shard at the same time: the highest reads the storage.

    It differs by shard, so that nodes share that work.
    """
    name = f"{node}\0{shard.model}\0{shard.file}\0{shard.buffer_offset_bytes}"
    return crc32(name.encode(), 0), node


class Reading:
    """One read of a shard by a node.

    Attributes:
        shard: What is read.
        destination: Where its bytes go; `None` for memory of links and of the storage.
        position: How many of its bytes were read.
        value: The CRC-32 of what came from peers so far.
        sources: The peers that gave bytes.
        has_lent: Whether any of them were lent.
        may_wait: Whether a peer that was asked might give it soon.
        asked: The peers that were asked since it looks for one.
        failed: The peers that could not go on with it.
        noted: The peers that have asked for it meanwhile, and are ranked higher.
    """

    def __init__(self, node: str, shard: Shard, destination: memoryview | None = None) -> None:
        self.shard, self.destination = shard, destination
        self.position = self.value = 0
        self.sources: set[str] = set()
        self.asked: set[str] = set()
        self.failed: set[str] = set()
        self.noted: set[str] = set()
        self.has_checksum = is_checksum(shard.checksum)
        self._node, self._source = node, _Source.NONE
        self.has_lent = self.may_wait = False

    @property
    def is_complete(self) -> bool:
        """Whether all its bytes were read."""
        return self.position == self.shard.size_bytes

    @property
    def matches(self) -> bool:
        """Whether a shard that came from peers has its checksum, if it has one that is known here."""
        return not self.has_checksum or self.shard.checksum == f"crc32:{self.value:08x}"

    def seek(self) -> None:
        """It looks for a peer, from its present byte on."""
        self._source = _Source.NONE
        self.asked.clear()
        self.may_wait = False

    def follow(self, peer: str) -> None:
        """It reads from a peer."""
        self._source = _Source.PEER

    def lead(self) -> None:
        """It reads from the storage: others may follow it."""
        self._source = _Source.STORAGE

    def leads(self, reader: str) -> bool:
        """Whether a node that is as far may follow this one; one that is ranked higher is noted."""
        if self._source is not _Source.NONE:
            return self._source is _Source.STORAGE
        if rank_of(self._node, self.shard) > rank_of(reader, self.shard):
            return True
        self.noted.add(reader)
        return False

    @property
    def follows(self) -> bool:
        """Whether it reads from a peer."""
        return self._source is _Source.PEER

    async def count(self, peer: str, data: memoryview) -> None:
        """Add bytes that a peer gave, a part in each turn of the event loop."""
        for at in range(0, len(data), _TURN_BYTES):
            await checkpoint()
            self.value = crc32(data[at : at + _TURN_BYTES], self.value)
        self.position += len(data)
        self.sources.add(peer)

    def restart(self) -> bool:
        """Begin anew after damage; false if bytes were lent, so that it cannot."""
        if self.has_lent:
            return False
        self.position = self.value = 0
        self.sources.clear()
        return True
