"""Tensors followed by an inaccessible page: an access beyond the end crashes the process."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch
from torch import Tensor

_libc: Any = ctypes.CDLL(None, use_errno=True)
_PROT_NONE = 0


def guarded(tensor: Tensor) -> Tensor:
    """Return a copy whose last byte is followed by an inaccessible page."""
    size = tensor.numel() * tensor.element_size()
    mapped = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, mapped + mmap.PAGESIZE)
    window = (ctypes.c_char * size).from_buffer(pages, mapped - size)
    if _libc.mprotect(ctypes.c_void_p(ctypes.addressof(window) + size), mmap.PAGESIZE, _PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect")
    # The tensor keeps the window alive, and the window the pages.
    return torch.frombuffer(window, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
