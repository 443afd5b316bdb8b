"""One shard as pieces that threads read in any order into a ring of buffers, with its checksum."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Literal, TypeAlias

from hotswap.backends.crc import combine, crc32
from hotswap.backends.fields import CONVERT_AGAIN
from hotswap.backends.memory import address_of, aligned_buffer, can_pin, pin, unpin
from hotswap.backends.stores.bandwidth import Meter
from hotswap.backends.stores.files import BlockFile
from hotswap.backends.stores.layout import Checksum
from hotswap.errors import ShardCorrupt, StoreError
from hotswap.model import Shard

__all__ = ["BufferPool", "Pieces", "Ring", "Verify", "check_shard"]


class BufferPool:
    """Page-aligned buffers of one size, reused between reads: fresh memory costs more than a read.

    May be used from any thread. With `pin`, buffers are pinned for the device once the process uses one,
    which is slow.
    """

    def __init__(self, buffer_bytes: int, *, keep: int, pin: bool = False) -> None:
        self.buffer_bytes = buffer_bytes
        self.num_lent = 0
        self._keep = keep
        self._pin = pin
        self._lock = threading.Lock()
        self._spare: list[memoryview] = []
        self._pinned: dict[int, bool] = {}  # by address, those that were tried

    def take(self) -> memoryview:
        """Lend a buffer; its content is undefined."""
        with self._lock:
            buffer = self._spare.pop() if self._spare else aligned_buffer(self.buffer_bytes)
            if self._pin and can_pin() and address_of(buffer) not in self._pinned:
                self._pinned[address_of(buffer)] = pin(buffer)
            self.num_lent += 1
        return buffer

    def put(self, buffer: memoryview) -> None:
        """Return a buffer to the pool."""
        with self._lock:
            self.num_lent -= 1
            if len(self._spare) < self._keep:
                self._spare.append(buffer)
            else:
                self._free(buffer)

    def clear(self) -> None:
        """Free the spare buffers."""
        with self._lock:
            for buffer in self._spare:
                self._free(buffer)
            self._spare.clear()

    def is_pinned(self, buffer: memoryview) -> bool:
        """Whether a device may copy from a buffer of this pool asynchronously."""
        return bool(self._pinned) and self._pinned.get(address_of(buffer), False)

    def _free(self, buffer: memoryview) -> None:
        """Unpin; the memory itself is freed with the last view of it."""
        if self._pinned and self._pinned.pop(address_of(buffer), False):
            unpin(buffer)


class Ring:
    """Assigns pieces and buffers to reading threads, and hands finished pieces to the consumer in order.

    A thread claims a buffer together with the lowest unclaimed piece, so the next piece in order always has
    a buffer, however few there are. May be used from any thread; only `claim` waits.
    """

    def __init__(self, num_pieces: int, buffers: Sequence[memoryview]) -> None:
        self._num_pieces = num_pieces
        self._free = list(buffers)
        self._next = 0
        self._due = 0
        self._ready: dict[int, memoryview | StoreError] = {}
        self._consumer_waits = False
        self._stopped = False
        self._changed = threading.Condition()

    def claim(self) -> tuple[int, memoryview] | None:
        """Wait for a buffer, and return it with the piece to read; `None` when no piece is left."""
        with self._changed:
            while not self._over and not self._free:
                self._changed.wait()
            if self._over:
                return None
            index, self._next = self._next, self._next + 1
            return index, self._free.pop()

    def fill(self, index: int, outcome: memoryview | StoreError) -> bool:
        """Hand over a piece or the error of its read; return whether the consumer waits for it.

        After an error no further piece is claimed; the pieces before it still reach the consumer.
        """
        with self._changed:
            self._ready[index] = outcome
            if isinstance(outcome, StoreError):
                self.stop()
            wake = self._consumer_waits and index == self._due
            if wake:
                self._consumer_waits = False
            return wake

    def take(self) -> memoryview | StoreError | None:
        """Return the next piece in order; `None` if it is not ready: `fill` then returns true for it."""
        with self._changed:
            outcome = self._ready.pop(self._due, None)
            self._consumer_waits = outcome is None
            if outcome is not None:
                self._due += 1
            return outcome

    def put_back(self, buffer: memoryview) -> None:
        """Return the buffer of a consumed piece."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()

    def stop(self) -> None:
        """End the claims: each `claim` returns `None`."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @property
    def _over(self) -> bool:
        return self._stopped or self._next == self._num_pieces


Verify: TypeAlias = Literal["load", "never"]


# Size of one read request: each ends in a wait for a core. On a disk of 3.5 GB/s, beside processes on every
# core, requests of 512 KiB had 0.78 of the speed of a raw read, and these 0.99. On an idle machine with a
# slower disk small ones had been 7 to 10 % faster.
_REQUEST_BYTES = 4 << 20


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
