"""Kernels: for GPUs in Triton, each with a path in plain torch that gives the same, and for CPUs in numba.

They know tensors and nothing of fleets. A kernel is a folder: `kernel` holds what Triton compiles, `launch`
what callers call, `reference` the truth that both are tested against, `table.json` what was measured to be
best and `sweep` how. Nothing here imports triton or numba before a kernel is asked for, so everything imports
where there is none. See `docs/kernels.md`.
"""

from __future__ import annotations

__all__: list[str] = []
