"""The vector instructions that CPU kernels may use.

Like PyTorch, hotswap's kernels respect `ATEN_CPU_CAPABILITY`: with `avx2` they do not use AVX-512 and AMX.
oneDNN and numba have variables of their own (`docs/engine.md`).
"""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["instructions"]

_LONG = ("avx512", "avx10", "amx")


@cache
def instructions() -> frozenset[str]:
    """Return the instruction sets of this CPU, by the names of `torch.cpu.get_capabilities`."""
    found = (name for name, present in torch.cpu.get_capabilities().items() if present is True)
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        return frozenset(found)
    return frozenset(name for name in found if not name.startswith(_LONG))
