"""Host memory as devices and direct reads want it: on a page, in huge pages, pinned where CUDA is there."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import sys
import tempfile
from contextlib import suppress
from typing import Any

from anyio.lowlevel import checkpoint

__all__ = [
    "SIZE_SEALS",
    "address_of",
    "aligned_buffer",
    "allocate",
    "allocate_pages",
    "can_pin",
    "copy",
    "copy_in_turns",
    "discard",
    "map_shared",
    "pin",
    "populate",
    "unpin",
]

_log = logging.getLogger("hotswap.memory")

SIZE_SEALS: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if sys.platform == "linux" else 0

_HUGE_BYTES = 2 << 20
_TURN_BYTES = 1 << 20  # a fraction of a millisecond
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
# Linux alone has them.
_HUGE_PAGES: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_SMALL_PAGES: int | None = getattr(mmap, "MADV_NOHUGEPAGE", None)
# Which Python does not name: PROT_NONE, MAP_FIXED, MADV_POPULATE_WRITE, and MADV_COLLAPSE since Linux 6.1.
_NO_ACCESS, _FIXED, _POPULATE, _COLLAPSE = 0, 0x10, 23, 25
# Linux alone zeroes what is read afterwards.
_DISCARD: int | None = getattr(mmap, "MADV_DONTNEED", None) if sys.platform == "linux" else None

_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def aligned_buffer(size_bytes: int, *, huge: bool = True) -> memoryview:
    """Return writable anonymous memory that begins on a page, on a huge page where it is that long.

    Huge pages are worth it three times: their first touch costs a third, a direct read into small pages is
    cut into as many requests as the device's segments ask for, which halved its speed where we measured, and
    what is read from start to end comes up to a fifth faster. They are asked for where they are filled, so
    that no more is taken than was asked for. It is all zeros, and freed with the last view of it.

    Args:
        size_bytes: How much.
        huge: Whether huge pages are worth it: not where a little is written here and there, for clearing one
            takes a while.

    Raises:
        MemoryError: there is no such room.
    """
    aligned = huge and size_bytes >= _HUGE_BYTES
    try:
        # Private, because shared memory gets huge pages only where the whole machine was set up for it.
        memory = mmap.mmap(-1, max(size_bytes, 1) + aligned * _HUGE_BYTES, flags=_PRIVATE)
    except (OSError, ValueError, OverflowError) as exc:
        raise MemoryError(f"There is no room for {size_bytes:,} bytes of host memory.") from exc
    whole = memoryview(memory)
    start = -address_of(whole) % _HUGE_BYTES if aligned else 0
    with suppress(OSError):  # a kernel without huge pages
        if aligned and _HUGE_PAGES is not None:
            memory.madvise(_HUGE_PAGES, start, size_bytes // _HUGE_BYTES * _HUGE_BYTES)
        elif not huge and _SMALL_PAGES is not None:
            memory.madvise(_SMALL_PAGES)
    return whole[start : start + size_bytes]


def discard(address: int, size_bytes: int) -> None:
    """Return the whole pages within private anonymous memory to the system; they read zeros from now on.

    Pages are allocated again when they are written. Where a system cannot do this, nothing happens.
    """
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if _DISCARD is not None and start < end:
        _libc.madvise(start, end - start, _DISCARD)


def allocate_pages(address: int, size_bytes: int) -> None:
    """Have private anonymous memory get its pages now, not by the first write; slow, in a thread.

    What is in it stays, and may be written to meanwhile. Where a system cannot do this (before Linux 5.14),
    nothing happens.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and size_bytes:
        _libc.madvise(start, address + size_bytes - start, _POPULATE)


def allocate(file: int, start: int, size_bytes: int) -> None:
    """Allocate a part of a file that is so long, so that a write to its mapping cannot fail. Blocking.

    Bytes that are there stay. A file in memory gets huge pages where the kernel has some to give (Linux 6.1),
    also where the file system gives small ones by itself, as `/dev/shm` mostly does. Allocating and filling
    it then takes six tenths of the processor time, and mapping, reading and unmapping it less than half.

    Raises:
        OSError: there is no room.
    """
    first = -(-start // _HUGE_BYTES) * _HUGE_BYTES
    huge_bytes = (start + size_bytes - first) // _HUGE_BYTES * _HUGE_BYTES
    if huge_bytes > 0 and sys.platform == "linux":
        for at in range(first, first + huge_bytes, _HUGE_BYTES):
            os.posix_fallocate(file, at, mmap.PAGESIZE)  # the kernel joins no pages where there is none
        _collapse(file, first, huge_bytes)
    os.posix_fallocate(file, start, size_bytes)


def _collapse(file: int, start: int, size_bytes: int) -> None:
    """Join the pages of a file to huge ones, as far as the kernel can; both numbers are multiples of one."""
    room = _libc.mmap(None, size_bytes + _HUGE_BYTES, _NO_ACCESS, _PRIVATE, -1, 0)
    if room == ctypes.c_void_p(-1).value:
        return
    place = room + -room % _HUGE_BYTES  # a huge page lies in memory as it lies in the file
    if _libc.mmap(place, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED | _FIXED, file, start) == place:
        _libc.madvise(place, size_bytes, _COLLAPSE)
    _libc.munmap(room, size_bytes + _HUGE_BYTES)


def address_of(data: memoryview) -> int:
    """Return where writable memory of at least one byte begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def copy(target: memoryview, source: memoryview) -> None:
    """Copy between memories of one length without holding the interpreter lock; `source` must be writable."""
    assert len(target) == len(source), f"copying {len(source)} bytes to {len(target)}"
    if len(source):
        ctypes.memmove(address_of(target), address_of(source), len(source))


async def copy_in_turns(target: memoryview, source: memoryview) -> None:
    """Copy between memories of one length on the event loop; cancelled, it has copied a part."""
    for at in range(0, len(source), _TURN_BYTES):
        target[at : at + _TURN_BYTES] = source[at : at + _TURN_BYTES]
        await checkpoint()


def map_shared(size_bytes: int) -> tuple[mmap.mmap, int]:
    """Map new memory that processes can share by its file, which the caller closes; it is all zeros.

    It has no name, and goes with the last process that has it open or mapped. Where the system has such files
    it is in memory, and its size is sealed: an end that could shorten it would end the others with SIGBUS.

    Raises:
        MemoryError: there is no such room.
    """
    try:
        file = _nameless_file()
        try:
            os.ftruncate(file, size_bytes)
            if SIZE_SEALS:
                fcntl.fcntl(file, fcntl.F_ADD_SEALS, SIZE_SEALS)
            return mmap.mmap(file, size_bytes), file
        except BaseException:
            os.close(file)
            raise
    except (OSError, ValueError) as exc:
        raise MemoryError(f"There is no shared memory of {size_bytes:,} bytes: {exc}.") from exc


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("hotswap", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def populate(data: memoryview) -> bool:
    """Have memory get all its pages, whatever is written to it meanwhile; slow, in a thread.

    Returns whether the system has done so (Linux 5.14). It must begin on a page.
    """
    return sys.platform == "linux" and not _libc.madvise(address_of(data), len(data), _POPULATE)


def can_pin() -> bool:
    """Whether `pin` would try to: memory to be pinned must be mapped for writing."""
    return _cuda() is not None


def pin(data: memoryview) -> bool:
    """Lock memory for asynchronous copies to every device, and say whether it is now; slow, in a thread.

    Nothing is pinned in a process that does not compute on a device by torch: it has nothing to copy there,
    and a context of CUDA, which pinning makes, forbids it to fork.
    """
    cuda = _cuda()
    if cuda is None or not len(data):
        return False
    portable = 1  # for every device, not the current one alone
    if status := int(cuda.cudaHostRegister(address_of(data), len(data), portable)):
        _log.warning(
            "%d bytes could not be pinned (CUDA error %d); copies will be slower.", len(data), status
        )
    return not status


def unpin(data: memoryview) -> None:
    """Unlock what `pin` has locked, before it is freed."""
    cuda = _cuda()
    if cuda is not None:
        cuda.cudaHostUnregister(address_of(data))


def _cuda() -> Any | None:
    """The CUDA runtime that torch has, if this process uses a device by it already."""
    torch: Any = sys.modules.get("torch")
    return torch.cuda.cudart() if torch is not None and torch.cuda.is_initialized() else None
