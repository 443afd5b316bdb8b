"""One shard as pieces that threads read in any order, with the checksum of the whole."""

from __future__ import annotations

import threading
from typing import Literal, TypeAlias

from hotswap.backends.stores.bandwidth import Meter
from hotswap.backends.stores.crc import combine, crc32
from hotswap.backends.stores.fields import CONVERT_AGAIN
from hotswap.backends.stores.files import BlockFile
from hotswap.backends.stores.layout import Checksum
from hotswap.errors import ShardCorrupt
from hotswap.model import Shard

__all__ = ["Pieces", "Verify", "check_shard"]

Verify: TypeAlias = Literal["load", "never"]


# Size of one read request. Requests of this size from several threads were 7 to 10 % faster than longer ones
# where we measured: the kernel splits a longer one and waits for all its parts. And the bytes are still in
# the processor's cache when the checksum is taken.
_REQUEST_BYTES = 512 << 10


class Pieces:
    """The pieces of a shard: `read` each once, from any thread; the last read checks the whole shard."""

    def __init__(
        self, file: BlockFile, shard: Shard, piece_bytes: int, *, meter: Meter, verify: Verify
    ) -> None:
        self.shard = shard
        self.piece_bytes = piece_bytes
        self._file = file
        self._meter = meter
        self._sums: list[int] | None = [0] * len(self) if verify == "load" else None
        self._num_unread = len(self)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return -(-self.shard.size_bytes // self.piece_bytes)

    def span(self, index: int) -> slice:
        """The bytes of the shard that belong to a piece."""
        start = index * self.piece_bytes
        return slice(start, min(start + self.piece_bytes, self.shard.size_bytes))

    def read(self, index: int, data: memoryview) -> None:
        """Read a piece into `data`. Blocking.

        Raises:
            ShardCorrupt: the file is too short or was changed meanwhile; at the last read, the checksum of
                the shard differs from its index.
            StoreError: the read failed.
        """
        offset, value = self.shard.file_offset_bytes + self.span(index).start, 0
        with self._meter.reading(len(data)):
            for start in range(0, len(data), _REQUEST_BYTES):
                with data[start : start + _REQUEST_BYTES] as part:
                    self._file.read(part, offset + start)
                    if self._sums is not None:
                        value = crc32(part, value)
        if self._sums is not None:
            self._sums[index] = value
        with self._lock:
            self._num_unread -= 1
            last = not self._num_unread
        if last:
            self._check()

    def _check(self) -> None:
        self._file.check_unchanged()
        if self._sums is None:
            return
        whole = 0
        for index, value in enumerate(self._sums):
            span = self.span(index)
            whole = combine(whole, value, span.stop - span.start)
        check_shard(self.shard, f"crc32:{whole:08x}")


def check_shard(shard: Shard, checksum: Checksum | str) -> None:
    """Raise `ShardCorrupt` if the bytes read are not those that were written."""
    if str(checksum) != shard.checksum:
        raise ShardCorrupt(
            f"The bytes of {shard.file!r} of model {shard.model!r} have changed: their checksum is "
            f"{checksum}, the index says {shard.checksum}. {CONVERT_AGAIN}"
        )
