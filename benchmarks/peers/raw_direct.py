"""The limit: every byte of the files read directly by a few threads, into aligned buffers used over and over.

The buffers lie in huge pages where the kernel gives them: a direct read into small pages is cut into requests
of as many pages as the device takes segments, which made it three times slower on a disk we measured.

With `sink="drop"` the bytes are let go in the ring, which is all that a disk can do; with `"copy"` each piece
is copied on into a resident flat buffer, which is the least that a loader has to do.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.race import Peer, Race, Source, flat_buffer

DISTRIBUTIONS: tuple[str, ...] = ()

_HUGE_BYTES = 2 << 20
_Array: TypeAlias = npt.NDArray[np.uint8]


class Contestant(Peer):
    """Options: `threads`, `chunk_bytes` (a multiple of 4096), `sink`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._chunk_bytes = int(options["chunk_bytes"])
        threads = int(options["threads"])
        self._ring = [_huge_buffer(self._chunk_bytes) for _ in range(threads)]
        self._threads = ThreadPoolExecutor(threads)

    def files(self, source: Source) -> list[Path]:
        return source.flat_files

    def load(self, source: Source, race: Race) -> None:
        copied = self.options["sink"] == "copy"
        buffer = flat_buffer(source.buffer_bytes if copied else 0).fill_(0)
        flat: _Array = buffer.numpy()
        race.start()
        size = 0
        for file in source.flat_files:
            size += self._read_file(file, flat[size:] if copied else None, race)
        if not copied:
            return race.finish({}, size_bytes=size)
        places = source.places() if race.checks else {}
        return race.finish({name: place.view(buffer) for name, place in places.items()}, size_bytes=size)

    def _read_file(self, file: Path, flat: _Array | None, race: Race) -> int:
        fd = _open(file, race)
        try:
            size = os.fstat(fd).st_size
            turns = count()  # `next` on it is one step of the interpreter: each thread takes the next piece
            offsets = (iter(lambda: next(turns) * self._chunk_bytes, None) for _ in self._ring)

            def work(piece: _Array, mine: Iterator[int]) -> None:
                for offset in mine:
                    if offset >= size:
                        return
                    _read(fd, piece, offset, min(self._chunk_bytes, size - offset))
                    if flat is not None:
                        end = min(offset + self._chunk_bytes, size)
                        np.copyto(flat[offset:end], piece[: end - offset])

            list(self._threads.map(work, self._ring, offsets))
            return size
        finally:
            os.close(fd)


def _open(file: Path, race: Race) -> int:
    """Open for direct reads; where the file system refuses them, buffered, which the result then says."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        race.note(direct=False)
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    race.note(direct=True)
    return fd


def _read(fd: int, piece: _Array, offset: int, size: int) -> None:
    done = 0
    while done < size:
        got = os.preadv(fd, [piece[done:size].data], offset + done)
        if not got:
            raise EOFError(f"the file ended at byte {offset + done}")
        done += got


def _huge_buffer(size: int) -> _Array:
    """Memory that begins on a huge page, and is there."""
    memory = mmap.mmap(-1, size + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _HUGE_BYTES
    buffer = whole[start : start + size]
    buffer.fill(0)
    return buffer
