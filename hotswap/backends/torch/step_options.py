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
        max_tokens: The largest token budget of a step.
        max_requests: The maximum number of running requests.
    """

    block_tokens: int
    invariant: bool
    gpu_steps: GpuSteps = "gathered"
    max_tokens: int = 256
    max_requests: int = 64

    @property
    def by_kernels(self) -> bool:
        """Whether attention on a GPU may read KV blocks by Triton kernels."""
        return self.gpu_steps != "gathered"
