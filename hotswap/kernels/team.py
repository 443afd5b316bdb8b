"""Several threads at one kernel: on PyTorch's own OpenMP workers, or on threads kept for it.

After a product of PyTorch's its workers wait for the next one by turning in circles. Other threads would
compete with them for the processors, so kernels are better computed by the workers themselves.
"""

from __future__ import annotations

import ctypes
import os
import struct
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

__all__ = ["float_bits", "run_together"]


def run_together(kernel: Any, asked: Iterable[int], parts: int) -> None:
    """Run a kernel that claims its work in several threads, this one among them, until none is left.

    Args:
        kernel: What `compiled_for_c` made.
        asked: What is asked; the kernel gets the address of the first, and threads share it.
        parts: How many threads there are to be.

    Raises:
        MemoryError: a thread has not come to the end of the kernel. Memory that it does not find is all that
            kernels can fail for; numba has written what it was to stderr.
    """
    memory = array("q", (0, *asked))  # how many threads have begun and not ended, then what is asked
    where, _ = memory.buffer_info()
    if parts <= 1:
        kernel.ctypes(where)
    elif (begin := _begin_team()) is not None:
        begin(kernel.address, where, parts, 0)
    else:
        _run_in_threads(kernel.ctypes, where, parts)
    if memory[0]:
        raise MemoryError(
            "A kernel found no memory for what it works with; free some, or serve smaller batches."
        )


@cache
def float_bits(number: float) -> int:
    """The bits of a number as float32, as a signed integer: what is asked of a kernel is integers alone."""
    return int(struct.unpack("i", struct.pack("f", number))[0])


@cache
def _begin_team() -> Callable[[int, int, int, int], None] | None:
    """How OpenMP begins a parallel region, in the library that PyTorch uses; `None` if that is unknown."""
    if "OpenMP" not in torch.__config__.parallel_info():
        return None
    for path in _libraries():
        begin: Any = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if begin is not None:
            begin.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            begin.restype = None
            return begin  # type: ignore[no-any-return]
    return None


def _libraries() -> list[str]:
    """The OpenMP library that PyTorch has loaded; none where others are loaded too and it is not clear."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return []
    return _of_torch({line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/")})


def _of_torch(loaded: Iterable[str]) -> list[str]:
    """Which of the files that are loaded is PyTorch's OpenMP; other packages bring theirs along."""
    names = ("libgomp", "libiomp", "libomp")
    found = [path for path in loaded if Path(path).name.startswith(names)]
    home = Path(torch.__file__).parent
    ours = [path for path in found if {home, home.with_name("torch.libs")} & set(Path(path).parents)]
    return ours if len(ours) == 1 else found if len(found) == 1 else []


def _run_in_threads(kernel: Callable[[int], None], argument: int, parts: int) -> None:
    futures = [_helpers(parts - 1).submit(kernel, argument) for _ in range(1, parts)]
    try:
        kernel(argument)
    finally:  # none may still be at work when the tensors go
        for future in futures:
            future.cancel()
        failed = [future.exception() for future in futures if not future.cancelled()]
    for error in failed:
        if error is not None:
            raise error


@cache
def _helpers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="hotswap-kernel")


os.register_at_fork(after_in_child=_helpers.cache_clear)  # a child has none of the threads
