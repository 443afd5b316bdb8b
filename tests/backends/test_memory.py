"""`aligned_buffer`: zeros of one's own, that begin where devices want it, or a typed error."""

from __future__ import annotations

import os

import pytest

from hotswap.backends.memory import address_of, aligned_buffer

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
