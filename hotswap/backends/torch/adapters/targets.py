# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Of transformers, whose Conv1D has no types.
"""Finds the layers that can have adapters: linear layers whose input is every row of a step, and the head."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hotswap.backends.torch.attention import Step, current

__all__ = ["Target", "observed", "targets"]


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A linear layer that can have adapters.

    Attributes:
        layer: The module.
        width_in: Its input width.
        width_out: Its output width.
        kept_rows: Whether its input is only the rows that sample, as for the output head.
    """

    layer: nn.Module
    width_in: int
    width_out: int
    kept_rows: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the bound weights."""
        return cast("Tensor", self.layer.weight).dtype


@dataclass(slots=True, eq=False)
class _Calls:
    """The number of steps that called a layer, and whether its input always had all rows of the step."""

    num_steps: int = 0
    got_all_rows: bool = True
    last: Step | None = None

    def note(self, step: Step, num_rows: int) -> None:
        self.num_steps += step is not self.last
        self.got_all_rows &= num_rows == len(step.blocks)
        self.last = step


@contextmanager
def observed(module: nn.Module) -> Generator[set[str]]:
    """Record, for the steps within the block, the linear layers whose input was not all rows of each step.

    An expert of a mixture gets some of the rows, without their requests. Only numbers of rows are compared: a
    layer that gets all rows in another order would not be detected. The set is complete after the block.
    """
    layers = [(name, layer) for name, layer, _, _ in _linear_layers(module)]
    odd = {name for name, _ in layers}
    seen = {name: _Calls() for name in odd}
    handles = [layer.register_forward_pre_hook(_watch(seen[name])) for name, layer in layers]
    try:
        yield odd
    finally:
        for handle in handles:
            handle.remove()
        num_steps = max((calls.num_steps for calls in seen.values()), default=0)
        odd -= {name for name, calls in seen.items() if calls.got_all_rows and calls.num_steps == num_steps}


def targets(module: nn.Module, odd: Set[str]) -> dict[str, Target]:
    """Return the layers that can have adapters, by name; `odd` are the layers that `observed` recorded."""
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


def _watch(calls: _Calls) -> Any:
    def look(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        step = current()
        if step is not None:
            calls.note(step, given[0].shape[:-1].numel())

    return look
