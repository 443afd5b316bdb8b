"""Kernels for GPUs, written in Triton, each with a path in plain torch that gives the same on any device.

They know tensors and nothing of fleets. A kernel is a folder: `kernel` holds what Triton compiles, `launch`
what callers call, `reference` the truth that both are tested against, `table.json` what was measured to be
best and `sweep` how. Nothing here imports triton before a GPU asks for it, so everything imports where there
is none. See `docs/kernels.md`.
"""

from __future__ import annotations

__all__: list[str] = []
