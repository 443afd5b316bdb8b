"""Positions for layers that scale queries by them and take them from their row: Llama 4's temperature tuning.

Such a layer counts from the number of tokens in its cache on, which is right for a row of one request. In a
step it gets a cache that keeps nothing and tells where the tokens of each request are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hotswap.backends.torch.attention import Step, current
from hotswap.backends.torch.fused import Fused

__all__ = ["tell_positions"]


class _Positions:
    """Stands for the cache of a layer in a step."""

    def __init__(self, step: Step) -> None:
        assert step.positions is not None, "`assemble` sets them"
        self._positions = step.positions

    def get_seq_length(self, layer: int = 0) -> Tensor:
        """Return what the layer adds to the numbers of its rows: `[T]`."""
        return self._positions - torch.arange(len(self._positions), device=self._positions.device)

    def update(self, keys: Tensor, values: Tensor, *others: object, **named: object) -> tuple[Tensor, Tensor]:
        """Return keys and values as they are: attention appends them to the KV cache."""
        return keys, values


def tell_positions(model: nn.Module) -> tuple[Fused, ...]:
    """Replace the `forward` of layers that take positions from their row; return what was attached."""
    made: list[Fused] = []
    for layer in model.modules():
        if getattr(layer, "attn_temperature_tuning", False) and hasattr(layer, "floor_scale"):
            made.append(Fused(layer, _with_positions(layer.forward)))
            made[-1].attach()
    return tuple(made)


def _with_positions(forward: Callable[..., Any]) -> Callable[..., Any]:
    parameters = inspect.signature(forward).parameters
    cache = "cache" if "cache" in parameters else "past_key_values"  # the latter before transformers 5.24

    def positioned(*given: Any, **named: Any) -> Any:
        step = current()
        if step is not None and named.get(cache) is None:
            named[cache] = _Positions(step)
        return forward(*given, **named)

    return positioned
