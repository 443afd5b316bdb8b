"""Pipeline parallelism for unmodified models: a stage runs its own layers and skips those of other stages.

The list of layers keeps its length, since models look up the kind of a layer by its index. The layers of
other stages keep their attributes, and their `forward` is replaced. The stage's first layer gets the received
hidden state as its input, so the model's embeddings have no effect; the first layer of the next stage ends
the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from hotswap.backends.torch.attention import current
from hotswap.backends.torch.parallel.grid import RankPosition
from hotswap.errors import ConfigError, UnsupportedModel

__all__ = ["StageEnd", "StageInput", "find_layers", "install", "needed", "residual_dtype"]

# Arguments of layers that every stage computes itself, from positions alone.
_COMPUTED_BY_EVERY_STAGE = frozenset(
    {"attention_mask", "cache_position", "position_embeddings", "position_ids"}
)


class StageEnd(Exception):
    """Ends a pass after a stage's last layer; not an error. Has the hidden state `[1, T, hidden_size]`."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass(slots=True)
class StageInput:
    """The input of a stage's first layer: a hidden state `[1, T, hidden_size]`."""

    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Layers:
    """The list of a model's layers, and its name in the model."""

    name: str
    modules: nn.ModuleList


def find_layers(module: Any, num_layers: int) -> Layers:
    """Return the layers of a model.

    Raises:
        UnsupportedModel: the model has no list of `num_layers` modules.
    """
    named: Iterator[tuple[str, nn.Module]] = module.named_modules()
    for name, found in named:
        if isinstance(found, nn.ModuleList) and len(found) == num_layers:
            return Layers(name, found)
    raise UnsupportedModel(
        f"{type(module).__name__} has no list of {num_layers} layers to divide into stages; serve it with "
        "pp=1."
    )


def residual_dtype(module: Any, num_layers: int, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the hidden state between the layers of a model that computes in `dtype`."""
    layers: Iterator[nn.Module] = iter(find_layers(module, num_layers).modules)
    is_fp32 = any(getattr(layer, "residual_in_fp32", False) for layer in layers)
    return torch.float32 if is_fp32 else dtype


def needed(module: Any, num_layers: int, position: RankPosition) -> Callable[[str], bool]:
    """Return a predicate of tensor names: whether a stage needs the tensor.

    A stage needs the tensors of its layers and those outside the list of layers, except embeddings and the
    output head if it does not use them.

    Raises:
        ConfigError: there are fewer layers than stages.
    """
    if position.grid.pp == 1:
        return lambda _: True
    if position.grid.pp > num_layers:
        raise ConfigError(f"{num_layers} layers cannot fill {position.grid.pp} stages; lower pp.")
    lead = find_layers(module, num_layers).name + "."
    mine = {str(layer) for layer in position.layers(num_layers)}
    unused = _unused(module, position)

    def is_needed(name: str) -> bool:
        if name.startswith(lead):
            return name.removeprefix(lead).partition(".")[0] in mine
        return name not in unused

    return is_needed


def install(module: Any, num_layers: int, position: RankPosition, stage_input: StageInput) -> None:
    """Make a model run the layers of one stage, with `stage_input` as the input of the first."""
    if position.grid.pp == 1:
        return
    mine = position.layers(num_layers)
    for index, layer in enumerate(find_layers(module, num_layers).modules):
        if index < mine.start:
            layer.forward = _skip
        elif index >= mine.stop:
            layer.forward = _end
        elif index == mine.start and not position.is_first:
            layer.forward = _enter(layer.forward, stage_input)


def _unused(module: Any, position: RankPosition) -> set[str]:
    """Return the names of the embeddings and of the output head if a stage does not use them."""
    inner, outer = module.get_input_embeddings(), module.get_output_embeddings()
    idle = [] if position.is_first else [inner]
    if outer is not None and not position.is_last:
        idle.append(outer)
    ids = {id(layer) for layer in idle}
    named = cast("Iterator[tuple[str, nn.Module]]", module.named_modules(remove_duplicate=False))
    return {
        f"{name}.{key}"
        for name, layer in named
        if id(layer) in ids
        for key, _ in layer.named_parameters(recurse=False)
    }


def _skip(hidden: Any = None, *_: Any, **named: Any) -> tuple[Any, ...]:
    # Some models take the first element of a layer's result, or two; the others accept the tuple, since it is
    # unused.
    return named.get("hidden_states", hidden), None


def _end(hidden: Any = None, *others: Any, **named: Any) -> None:
    hidden = named.get("hidden_states", hidden)
    known = _COMPUTED_BY_EVERY_STAGE | {"hidden_states"}
    unknown = [key for key, value in named.items() if key not in known and _carries_state(value)]
    fails = unknown or any(_carries_state(other) for other in others) or not isinstance(hidden, Tensor)
    # In the model's own attention, outside of steps, masks are tensors too.
    if fails and current() is not None:
        raise UnsupportedModel(
            "A layer gets more from the layers before it than a hidden state "
            f"({', '.join(unknown) or 'unnamed'}), which stages do not send; serve the model with pp=1."
        )
    raise StageEnd(hidden)


def _carries_state(value: object) -> bool:
    return isinstance(value, Tensor | Mapping | list)


def _enter(forward: Callable[..., Any], stage_input: StageInput) -> Callable[..., Any]:
    def enter(hidden: Any = None, *others: Any, **named: Any) -> Any:
        assert stage_input.hidden is not None, "a later stage has received its input"
        if "hidden_states" in named:
            return forward(**{**named, "hidden_states": stage_input.hidden})
        return forward(stage_input.hidden, *others, **named)

    return enter
