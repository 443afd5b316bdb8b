"""A stand-in for a GPU's virtual memory management: addresses of this process, to which pages are mapped.

A part without memory is one that nothing may read or write, as on a GPU: the kernel ends a process that does.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch
from torch import Tensor

from hotswap.backends.torch.device_pages import PagedRange, PageDriver
from hotswap.errors import OutOfMemory

__all__ = ["HostDriver"]

_NO_ACCESS, _FIXED = 0, 0x10
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class HostDriver(PageDriver):
    """Host memory in granules, with as much of it as a device would have.

    Attributes:
        parts: The sizes of what is mapped, by address.
        reserved: The sizes of what is reserved, by address.
        num_waits: How often it was waited for the device.
    """

    def __init__(self, granule_bytes: int = mmap.PAGESIZE, *, total_bytes: int = 1 << 40) -> None:
        self.granule_bytes, self.total_bytes = granule_bytes, total_bytes
        self.parts: dict[int, int] = {}
        self.reserved: dict[int, int] = {}
        self.num_waits = 0

    def reserve(self, size_bytes: int) -> int:
        assert size_bytes > 0
        assert size_bytes % self.granule_bytes == 0
        address = _libc.mmap(None, size_bytes, _NO_ACCESS, _PRIVATE, -1, 0)
        assert isinstance(address, int)
        self.reserved[address] = size_bytes
        return address

    def free(self, address: int, size_bytes: int) -> None:
        assert self.reserved.pop(address) == size_bytes
        assert not any(address <= part < address + size_bytes for part in self.parts)
        assert _libc.munmap(address, size_bytes) == 0

    def map(self, address: int, size_bytes: int) -> None:
        assert size_bytes > 0
        assert any(
            start <= address and address + size_bytes <= start + size for start, size in self.reserved.items()
        )
        assert not any(
            part < address + size_bytes and address < part + size for part, size in self.parts.items()
        )
        assert address % mmap.PAGESIZE == size_bytes % self.granule_bytes == 0
        if sum(self.parts.values()) + size_bytes > self.total_bytes:
            raise OutOfMemory("The device has no memory left.")
        flags = _PRIVATE | _FIXED
        assert _libc.mmap(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address
        ctypes.memset(address, 0xFF, size_bytes)  # NaN in all dtypes
        self.parts[address] = size_bytes

    def unmap(self, address: int, size_bytes: int) -> None:
        assert self.parts.pop(address) == size_bytes
        assert _libc.mmap(address, size_bytes, _NO_ACCESS, _PRIVATE | _FIXED, -1, 0) == address

    def wait(self) -> None:
        self.num_waits += 1

    def tensor(self, pages: PagedRange) -> Tensor:
        memory: Any = (ctypes.c_ubyte * pages.size_bytes).from_address(pages.address)
        memory.pages = pages  # lives as long as the tensor
        return torch.frombuffer(memory, dtype=torch.uint8)
