"""Compute kernels: Triton for GPUs, each with an equivalent in plain torch, and numba for CPUs.

Kernels take tensors and do not depend on fleets or engines. Each kernel is a package: `kernel` has the
compiled functions, `launch` or `call` the public API, `reference` the definition in float64 that the tests
compare with, `table.json` the measured tiles and `sweep` the search that found them. Triton and numba are
imported by the first use of a kernel only, so every module imports without them. See `docs/kernels.md`.
"""

from __future__ import annotations

__all__: list[str] = []
