# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Of transformers, whose Conv1D has no types.
"""Which layers of a model can have adapters: linear ones that get every row of a step, and the last one."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hotswap.backends.torch.attention import current

__all__ = ["Target", "observed", "targets"]


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A linear layer: the module, its widths, and whether it gets only the rows that sample."""

    layer: nn.Module
    width_in: int
    width_out: int
    kept_rows: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """That of the weights that are bound."""
        return cast("Tensor", self.layer.weight).dtype


@contextmanager
def observed(module: nn.Module) -> Generator[set[str]]:
    """Note, while steps run in the block, the linear layers that got rows in any other way than all in order.

    An expert of a mixture that sees some of the rows cannot know whose they are.
    """
    layers = [(name, layer) for name, layer, _, _ in _linear_layers(module)]
    odd = {name for name, _ in layers}
    seen: dict[str, bool] = {}
    handles = [layer.register_forward_pre_hook(_watch(name, seen)) for name, layer in layers]
    try:
        yield odd
    finally:
        for handle in handles:
            handle.remove()
        odd -= {name for name, in_order in seen.items() if in_order}


def targets(module: nn.Module, odd: Set[str]) -> dict[str, Target]:
    """Return the layers that can have adapters, by name; `odd` are those that `observed` has ruled out."""
    models: Any = module
    head = models.get_output_embeddings()
    return {
        name: Target(layer, width_in, width_out, layer is head)
        for name, layer, width_in, width_out in _linear_layers(module)
        if name not in odd or layer is head
    }


def _linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module, int, int]]:
    named: Iterator[tuple[str, nn.Module]] = module.named_modules()
    for name, layer in named:
        if type(layer) is nn.Linear:
            yield name, layer, layer.in_features, layer.out_features
        elif isinstance(layer, Conv1D):
            shape = cast("tuple[int, int]", tuple(layer.weight.shape))  # [in, out]
            yield name, layer, *shape


def _watch(name: str, seen: dict[str, bool]) -> Any:
    def look(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        step = current()
        if step is not None:
            in_order = given[0].shape[:-1].numel() == len(step.blocks)
            seen[name] = in_order and seen.get(name, True)

    return look
