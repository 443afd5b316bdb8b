"""The way in which a bound model multiplies by the weights of its experts, among those of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

__all__ = ["choose_experts", "expert_layers"]

# PyTorch's grouped product refuses matrices whose rows are no multiple of this, on every device.
_ROW_BYTES = 16


def expert_layers(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the modules of a model that have the weights of experts."""
    return tuple(module for module in model.modules() if _has_experts(module))


def choose_experts(model: Any, layers: Sequence[nn.Module]) -> None:
    """Have a bound model multiply all experts at once, or one by one if PyTorch cannot multiply them at once.

    Args:
        model: A model of transformers, bound to its weights.
        layers: Its `expert_layers`.
    """
    stacks = [stack for layer in layers for stack in _stacks(layer)]
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
