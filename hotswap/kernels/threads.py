"""Runs a CPU kernel in several threads: PyTorch's OpenMP workers, or a thread pool without OpenMP.

OpenMP workers spin for a while after each parallel region of PyTorch. Other threads would compete with them
for the processors, so kernels run on the workers themselves.
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

__all__ = ["float_bits", "run_threads"]


def run_threads(kernel: Any, arguments: Iterable[int], parts: int) -> None:
    """Run a kernel in several threads, including the calling one, and wait for all of them.

    The kernel distributes its work by an atomic counter among its arguments.

    Args:
        kernel: A result of `compiled_for_c`.
        arguments: int64 arguments; all threads get the address of the first and share them.
        parts: Number of threads.

    Raises:
        MemoryError: a thread did not reach the end of the kernel. Running out of memory is the only error
            that kernels can raise; numba has printed it to stderr.
    """
    memory = array("q", (0, *arguments))  # the number of unfinished calls, then the arguments
    where, _ = memory.buffer_info()
    if parts <= 1:
        kernel.ctypes(where)
    elif (begin := _openmp_parallel()) is not None:
        begin(kernel.address, where, parts, 0)
    else:
        _run_in_threads(kernel.ctypes, where, parts)
    if memory[0]:
        raise MemoryError(
            "A kernel could not allocate its scratch memory; free some, or serve smaller batches."
        )


@cache
def float_bits(number: float) -> int:
    """Return the bits of a float32 as a signed integer: kernels take integer arguments only."""
    return int(struct.unpack("i", struct.pack("f", number))[0])


@cache
def _openmp_parallel() -> Callable[[int, int, int, int], None] | None:
    """Return `GOMP_parallel` of the OpenMP library that PyTorch uses; `None` if there is none."""
    if "OpenMP" not in torch.__config__.parallel_info():
        return None
    for path in _libraries():
        begin: Any = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if begin is not None:
            begin.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            begin.restype = None
            return begin  # type: ignore[no-any-return]  # of ctypes, which has no types for it
    return None


def _libraries() -> list[str]:
    """Return the OpenMP library of PyTorch as a list of one path; empty if it cannot be identified."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return []
    return _of_torch({line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/")})


def _of_torch(loaded: Iterable[str]) -> list[str]:
    """Select PyTorch's OpenMP library among the loaded files; other packages load their own."""
    names = ("libgomp", "libiomp", "libomp")
    found = [path for path in loaded if Path(path).name.startswith(names)]
    home = Path(torch.__file__).parent
    ours = [path for path in found if {home, home.with_name("torch.libs")} & set(Path(path).parents)]
    return ours if len(ours) == 1 else found if len(found) == 1 else []


def _run_in_threads(kernel: Callable[[int], None], argument: int, parts: int) -> None:
    futures = [_helpers(parts - 1).submit(kernel, argument) for _ in range(1, parts)]
    try:
        kernel(argument)
    finally:  # no thread may run on after the tensors are freed
        for future in futures:
            future.cancel()
        failed = [future.exception() for future in futures if not future.cancelled()]
    for error in failed:
        if error is not None:
            raise error


@cache
def _helpers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="hotswap-kernel")


os.register_at_fork(after_in_child=_helpers.cache_clear)  # the threads do not exist in a forked child
