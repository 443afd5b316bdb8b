"""`aligned_buffer`: zeros that begin where devices want it, or a typed error. `allocate`: room in a file."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotswap.backends.memory import address_of, aligned_buffer, allocate

MIB = 1 << 20


@pytest.mark.parametrize("huge", [True, False])
@pytest.mark.parametrize("size_bytes", [1, 5000, 2 * MIB - 1, 2 * MIB, 5 * MIB + 3])
def test_it_is_writable_zeros_from_a_page_on(size_bytes: int, huge: bool) -> None:
    buffer = aligned_buffer(size_bytes, huge=huge)
    assert len(buffer) == size_bytes
    assert not any(buffer)
    assert address_of(buffer) % (2 * MIB if huge and size_bytes >= 2 * MIB else 4096) == 0
    buffer[:] = b"x" * size_bytes


def test_nothing_may_be_asked_for() -> None:
    assert len(aligned_buffer(0)) == 0


@pytest.mark.parametrize("size_bytes", [100, 4 * MIB])
def test_a_fork_has_a_copy(size_bytes: int) -> None:
    buffer = aligned_buffer(size_bytes)
    if (child := os.fork()) == 0:
        buffer[0] = 1
        os._exit(0)
    os.waitpid(child, 0)
    assert buffer[0] == 0


def test_no_room_is_a_memory_error() -> None:
    for size_bytes in (1 << 60, 1 << 70):
        with pytest.raises(MemoryError, match="no room"):
            aligned_buffer(size_bytes)


@pytest.fixture
def file() -> Iterator[int]:
    """A file in memory of 9 MiB and a little, all of it a hole."""
    opened = os.memfd_create("hotswap-test")
    os.ftruncate(opened, 9 * MIB + 100)
    yield opened
    os.close(opened)


@pytest.mark.parametrize(("start", "size_bytes"), [(0, 9 * MIB + 100), (MIB, 5 * MIB), (3 * MIB, 4096)])
def test_a_part_of_a_file_is_allocated_and_keeps_its_bytes(file: int, start: int, size_bytes: int) -> None:
    os.pwrite(file, b"kept", start + 10)
    allocate(file, start, size_bytes)
    assert os.fstat(file).st_blocks * 512 >= size_bytes
    with mmap.mmap(file, 0) as mapped:
        assert mapped[start + 10 : start + 14] == b"kept"
        assert not any(mapped[start + 14 : start + size_bytes])
    assert os.fstat(file).st_size == 9 * MIB + 100


def test_another_process_may_fill_what_is_allocated_again(file: int) -> None:
    allocate(file, 0, 9 * MIB)
    filled = os.urandom(9 * MIB)
    with mmap.mmap(file, 0) as mapped:
        mapped[: 9 * MIB] = filled
        allocate(file, 0, 9 * MIB)
        assert mapped[: 9 * MIB] == filled


def test_a_full_file_system_is_an_error(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
        try:
            with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
                allocate(file.fileno(), 0, 8 * MIB)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_what_is_allocated_lies_in_huge_pages_where_the_kernel_joins_pages(file: int) -> None:
    other = os.memfd_create("hotswap-test")
    os.posix_fallocate(other, 0, 8 * MIB)
    mapped = map_at_huge_page(other)
    os.close(other)
    if LIBC.madvise(ctypes.c_void_p(address_of(mapped)), ctypes.c_size_t(8 * MIB), 25):
        pytest.skip(f"this kernel joins no pages now: {os.strerror(ctypes.get_errno())}")
    allocate(file, 0, 9 * MIB)
    mapped = map_at_huge_page(file)
    assert not any(mapped)
    assert kib_in_huge_pages(mapped) == 8192


LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p


def map_at_huge_page(file: int) -> memoryview:
    """Map the first 8 MiB of a file where a huge page may begin."""
    room = aligned_buffer(8 * MIB)
    place, size_bytes, offset = ctypes.c_void_p(address_of(room)), ctypes.c_size_t(8 * MIB), ctypes.c_long(0)
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | 0x10  # MAP_FIXED
    assert LIBC.mmap(place, size_bytes, access, flags, file, offset) == place.value
    return room


def kib_in_huge_pages(mapped: memoryview) -> int:
    """Return how much of a mapping of shared memory the kernel has mapped by huge pages."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(f"{address_of(mapped):x}-"))
    return next(int(line.split()[1]) for line in lines[start:] if line.startswith("ShmemPmdMapped"))
