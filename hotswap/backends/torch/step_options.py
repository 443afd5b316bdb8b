"""How an engine in one process computes its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["GpuSteps", "StepOptions"]

GpuSteps = Literal["gathered", "in_place", "graphs"]
"""How steps run on a GPU; see `TorchEngine`."""


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How an engine in one process computes steps.

    Attributes:
        block_tokens: Tokens per KV block.
        invariant: Whether steps are batch-invariant to the bit.
        gpu_steps: How they run on a GPU.
    """

    block_tokens: int
    invariant: bool
    gpu_steps: GpuSteps = "gathered"

    @property
    def by_kernels(self) -> bool:
        """Whether attention on a GPU may read KV blocks by Triton kernels."""
        return self.gpu_steps != "gathered"
