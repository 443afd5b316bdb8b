"""Tensors that end where memory ends: whoever touches what lies behind one dies by SIGSEGV."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

__all__ = ["guarded"]

_LIBC = ctypes.CDLL(None, use_errno=True)


def guarded(tensor: Tensor) -> Tensor:
    """Return a copy whose last byte is the last before a page that nobody may read or write."""
    size = max(1, tensor.numel() * tensor.itemsize)
    body = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, body + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if _LIBC.mprotect(ctypes.c_void_p(start + body), mmap.PAGESIZE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=body - size)
    copy = copy[: tensor.numel() * tensor.itemsize].view(tensor.dtype).view(tensor.shape)
    copy.copy_(tensor)
    return copy
