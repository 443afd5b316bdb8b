"""Compiles the kernels for this CPU before they are needed, in several processes.

The machine code goes to numba's cache folder (`compiling`), where every later process of this user finds it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

import torch

from hotswap.errors import BackendMissing, ConfigError
from hotswap.kernels import packed_linear

__all__ = ["DTYPES", "Kernel", "Warmed", "kernels_for", "warm"]

DTYPES = ("float32", "bfloat16")
"""The dtypes that models are served in on a CPU."""

# Each process takes about 400 MB, most of it PyTorch.
_MOST_PROCESSES = 4
# The slowest to compile come first, so that processes end together.
_PACKAGES = ("paged_attention", "packed_linear", "recurrent", "low_rank", "fused")


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernels of one package for one dtype.

    Attributes:
        package: Its name in `hotswap.kernels`.
        dtype: The name of the dtype, such as `"float32"`.
    """

    package: str
    dtype: str

    def compile(self) -> None:
        """Compile them in this process, or load them from the cache."""
        package: Any = import_module(f"hotswap.kernels.{self.package}")
        package.compile_for(getattr(torch, self.dtype))


@dataclass(frozen=True, slots=True)
class Warmed:
    """A kernel that is ready.

    Attributes:
        kernel: The kernel.
        seconds: How long it took; some hundredths of a second if it was in the cache.
    """

    kernel: Kernel
    seconds: float


def kernels_for(dtypes: Sequence[str] = DTYPES) -> list[Kernel]:
    """Return the kernels that this CPU uses for dtypes.

    Raises:
        ConfigError: no kernel supports one of the dtypes.
    """
    known = {str(dtype).removeprefix("torch.") for dtype in import_module("hotswap.kernels.low_rank").DTYPES}
    if unknown := set(dtypes) - known:
        raise ConfigError(
            f"There are no kernels for {sorted(unknown)[0]!r}; give {', '.join(sorted(known))}."
        )
    return [Kernel(package, dtype) for package in _PACKAGES for dtype in dtypes if _supports(package, dtype)]


def _supports(package: str, dtype: str) -> bool:
    if package == "packed_linear":
        return packed_linear.supported(getattr(torch, dtype))
    return getattr(torch, dtype) in import_module(f"hotswap.kernels.{package}").DTYPES


def warm(kernels: Sequence[Kernel], *, processes: int | None = None) -> Iterator[Warmed]:
    """Compile kernels, and yield each as it is ready. Blocks for about ten seconds on two idle cores.

    Args:
        kernels: Those to compile.
        processes: How many processes compile at once; by default one per core, at most four.

    Raises:
        BackendMissing: numba is not installed.
    """
    if find_spec("numba") is None:
        raise BackendMissing("Kernels for CPUs are compiled by numba; pip install 'hotswap[torch]'.")
    count = processes or min(_MOST_PROCESSES, len(os.sched_getaffinity(0)), len(kernels))
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_timed, kernel) for kernel in kernels]):
            yield done.result()


def _timed(kernel: Kernel) -> Warmed:
    import_module("hotswap.kernels.compiling")  # and numba: its import is not the kernel's time
    began_s = time.perf_counter()
    kernel.compile()
    return Warmed(kernel, time.perf_counter() - began_s)
