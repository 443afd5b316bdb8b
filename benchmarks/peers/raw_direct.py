"""The limit: every byte of the files read directly by a few threads, and nothing else done.

Into which `memory`, in huge pages where the kernel gives them (a direct read into small pages is cut into
requests of as many pages as the device takes segments, which made it three times slower where we measured):

    gone       a few aligned buffers, used over and over: what a disk can do
    fresh      a flat buffer made under the clock, as every loader makes its memory
    existing   a flat buffer whose pages are there, as that of an engine that reuses its memory
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.timed_run import Peer, Source, TimedRun, flat_buffer

DISTRIBUTIONS: tuple[str, ...] = ()

_Array: TypeAlias = npt.NDArray[np.uint8]


class Contestant(Peer):
    """Options: `threads`, `chunk_bytes` (a multiple of 4096), `memory`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._chunk_bytes = int(options["chunk_bytes"])
        threads = int(options["threads"])
        kept = options["memory"] == "gone"
        self._ring = [flat_buffer(self._chunk_bytes if kept else 0).fill_(0).numpy() for _ in range(threads)]
        self._threads = ThreadPoolExecutor(threads)

    def files(self, source: Source) -> list[Path]:
        return source.flat_files

    def into(self, source: Source) -> None:
        """Reads where it shall, without a copy."""

    def load(self, source: Source, run: TimedRun) -> None:
        memory = self.options["memory"]
        existing = flat_buffer(source.buffer_bytes).fill_(0) if memory == "existing" else None
        run.start()
        fresh = flat_buffer(source.buffer_bytes) if memory == "fresh" else None
        buffer = fresh if existing is None else existing
        flat: _Array | None = None if buffer is None else buffer.numpy()
        size = 0
        for file in source.flat_files:
            size += self._read_file(file, None if flat is None else flat[size:], run)
        if buffer is None or not run.checks:
            return run.finish({}, size_bytes=size)
        places = {name: place.view(buffer) for name, place in source.places().items()}
        return run.finish(places, size_bytes=size)

    def _read_file(self, file: Path, flat: _Array | None, run: TimedRun) -> int:
        fd = _open(file, run)
        try:
            size = os.fstat(fd).st_size
            turns = count()  # `next` on it is one step of the interpreter: each thread takes the next piece
            offsets = (iter(lambda: next(turns) * self._chunk_bytes, None) for _ in self._ring)

            def work(piece: _Array, mine: Iterator[int]) -> None:
                for offset in mine:
                    if offset >= size:
                        return
                    length = min(self._chunk_bytes, size - offset)
                    _read(fd, piece if flat is None else flat[offset:], offset, length)

            list(self._threads.map(work, self._ring, offsets))
            return size
        finally:
            os.close(fd)


def _open(file: Path, run: TimedRun) -> int:
    """Open for direct reads; where the file system refuses them, buffered, which the result then says."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        run.note(direct=False)
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    run.note(direct=True)
    return fd


def _read(fd: int, piece: _Array, offset: int, size: int) -> None:
    done = 0
    while done < size:
        got = os.preadv(fd, [piece[done:size].data], offset + done)
        if not got:
            raise EOFError(f"the file ended at byte {offset + done}")
        done += got
