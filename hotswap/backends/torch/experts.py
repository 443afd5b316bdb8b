"""The way in which a bound model multiplies by the weights of its experts, among those of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

__all__ = ["choose_experts"]

# PyTorch's grouped product refuses matrices whose rows are no multiple of this, on every device.
_ROW_BYTES = 16


def choose_experts(model: Any) -> None:
    """Have a bound model multiply all experts at once, or one by one if PyTorch cannot multiply them at once.

    Args:
        model: A model of transformers, bound to its weights.
    """
    stacks = [stack for holder in model.modules() if _has_experts(holder) for stack in _stacks(holder)]
    if not stacks:
        return
    is_aligned = all(_is_aligned(stack) for stack in stacks)
    model.set_experts_implementation("grouped_mm" if is_aligned else "eager")


def _has_experts(holder: nn.Module) -> bool:
    """Whether transformers can compute the experts of a module in several ways."""
    return hasattr(holder, "is_transposed") and hasattr(holder, "has_gate")


def _stacks(holder: nn.Module) -> list[Tensor]:
    return [weight for weight in holder.parameters(recurse=False) if weight.ndim == 3]


def _is_aligned(stack: Tensor) -> bool:
    """Whether the rows of `[experts, out, in]`, of its transposed, and of what it multiplies are aligned."""
    return all(size * stack.itemsize % _ROW_BYTES == 0 for size in stack.shape[1:])
