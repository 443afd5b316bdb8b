"""Pipeline parallelism by taking layers out: a stage runs its own layers of an unmodified model.

The list of layers keeps its length, since models look up kinds of layers by position; those of other stages
keep their attributes and only do nothing. The first own layer is given the hidden state that was received,
so whatever a model does to its embeddings does not matter; the first layer of the next stage ends the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from hotswap.backends.torch.attention import current
from hotswap.backends.torch.parallel.places import Place
from hotswap.errors import ConfigError, UnsupportedModel

__all__ = ["StageEnd", "StageInput", "find_layers", "install", "needed"]

# What layers are told that every stage computes for itself, from positions alone.
_OWN = frozenset({"attention_mask", "cache_position", "position_embeddings", "position_ids"})


class StageEnd(Exception):
    """Ends a pass after a stage's last layer: no error. Carries the hidden state `[1, T, hidden_size]`."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass(slots=True)
class StageInput:
    """The hidden state `[1, T, hidden_size]` that the first own layer of a stage begins with."""

    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Layers:
    """The list of a model's layers, and the name it has there."""

    name: str
    modules: nn.ModuleList


def find_layers(module: Any, num_layers: int) -> Layers:
    """Return the layers of a model.

    Raises:
        UnsupportedModel: it has no list of as many layers as its config says.
    """
    named: Iterator[tuple[str, nn.Module]] = module.named_modules()
    for name, found in named:
        if isinstance(found, nn.ModuleList) and len(found) == num_layers:
            return Layers(name, found)
    raise UnsupportedModel(
        f"{type(module).__name__} has no list of {num_layers} layers that stages could share; serve it with "
        "pp=1."
    )


def needed(module: Any, num_layers: int, place: Place) -> Callable[[str], bool]:
    """Return whether a stage needs the tensor of a name: those of its layers, and what stands around them.

    Raises:
        ConfigError: there are fewer layers than stages.
    """
    if place.grid.pp == 1:
        return lambda _: True
    if place.grid.pp > num_layers:
        raise ConfigError(f"{num_layers} layers cannot fill {place.grid.pp} stages; lower pp.")
    lead = find_layers(module, num_layers).name + "."
    mine = {str(layer) for layer in place.layers(num_layers)}
    unused = _unused(module, place)

    def is_needed(name: str) -> bool:
        if name.startswith(lead):
            return name.removeprefix(lead).partition(".")[0] in mine
        return name not in unused

    return is_needed


def install(module: Any, num_layers: int, place: Place, entrance: StageInput) -> None:
    """Make a model run the layers of one stage, beginning with what `entrance` holds."""
    if place.grid.pp == 1:
        return
    mine = place.layers(num_layers)
    for index, layer in enumerate(find_layers(module, num_layers).modules):
        if index < mine.start:
            layer.forward = _skip
        elif index >= mine.stop:
            layer.forward = _end
        elif index == mine.start and not place.is_first:
            layer.forward = _enter(layer.forward, entrance)


def _unused(module: Any, place: Place) -> set[str]:
    """Names of the embeddings and of the output head where a stage has no use for them."""
    inner, outer = module.get_input_embeddings(), module.get_output_embeddings()
    idle = [] if place.is_first else [inner]
    if outer is not None and not place.is_last:
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
    # In a tuple for models that take the first of what a layer returns; to the others it does not matter.
    return (named.get("hidden_states", hidden),)


def _end(hidden: Any = None, *others: Any, **named: Any) -> None:
    hidden = named.get("hidden_states", hidden)
    told = {key: value for key, value in named.items() if key not in _OWN | {"hidden_states"}}
    strange = [key for key, value in told.items() if _carries_state(value)]
    odd = strange or any(_carries_state(other) for other in others) or not isinstance(hidden, Tensor)
    # In a model's own attention, outside of a step, layers are told masks as tensors.
    if odd and current() is not None:
        raise UnsupportedModel(
            "A layer is told more by those before it than a hidden state "
            f"({', '.join(strange) or 'unnamed'}), which stages do not send; serve the model with pp=1."
        )
    raise StageEnd(hidden)


def _carries_state(value: object) -> bool:
    return isinstance(value, Tensor | Mapping | list)


def _enter(forward: Callable[..., Any], entrance: StageInput) -> Callable[..., Any]:
    def enter(hidden: Any = None, *others: Any, **named: Any) -> Any:
        assert entrance.hidden is not None, "a stage that is not the first was given nothing"
        if "hidden_states" in named:
            return forward(**{**named, "hidden_states": entrance.hidden})
        return forward(entrance.hidden, *others, **named)

    return enter
