"""Finds the layers of a model that keep recurrent states, and makes them continue the states of a step.

transformers' models have one interface for states: a cache with `update_conv_state` and
`update_recurrent_state`. Between the two calls a mixer calls functions of its module by name, which compute
the convolution and the recurrence. A mixer is recognized by these names, and its `forward` is copied with
functions of hotswap under them (`functions`). Whether that is the same computation is decided by the check of
a load (`preflight`), not by names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final, cast

from torch import Tensor, nn

from hotswap.backends.torch.batch_invariant import BatchInvariantMode
from hotswap.backends.torch.recurrent.functions import CONVOLUTION, RECURRENCES, REPLACED, step_states

__all__ = ["Mixer", "attach"]

_CACHE_METHODS: Final = frozenset(
    {"get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state"}
)
_CACHES: Final = ("cache", "cache_params", "past_key_values")  # the first is that of transformers 5.24
_MASK: Final = "attention_mask"


@dataclass(frozen=True, slots=True, eq=False)
class Mixer:
    """A layer that keeps recurrent states.

    Attributes:
        module: The module.
        layer: Its number.
    """

    module: nn.Module
    layer: int


class _StepCache:
    """Stands for transformers' cache within a mixer: it has no states, so that prompts are computed."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return no state: the convolution continues that of the step."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return no state: the recurrence continues that of the step."""

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, **others: Any) -> Tensor:
        """Return the new rows without those before: the convolution has them."""
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, **others: Any) -> Tensor:
        """Do nothing: the recurrence has changed the state."""
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether earlier states could be restored."""
        return False


@dataclass(frozen=True, slots=True)
class _Form:
    """The `forward` of one class of mixers, with functions of hotswap, and the name of its cache argument."""

    forward: Callable[..., Any]
    cache: str


def attach(module: nn.Module) -> tuple[Mixer, ...]:
    """Make the mixers of a model continue the states of the steps in which they run; return them.

    Outside of steps they compute as before. None is attached, and the result is empty, if the model keeps
    states in any way that is not known.
    """
    kinds = {type(part) for part in module.modules()}
    forms = {kind: _form_of(kind) for kind in kinds if _names_of(kind) & _CACHE_METHODS}
    found: list[tuple[Mixer, _Form]] = []
    for part in module.modules():
        if type(part) not in forms:
            continue
        form, layer = forms[type(part)], cast("object", getattr(part, "layer_idx", None))
        if form is None or not isinstance(layer, int):
            return ()
        found.append((Mixer(part, layer), form))
    for mixer, form in found:
        vars(mixer.module)["forward"] = _continuing(mixer, form)
    return tuple(mixer for mixer, _ in found)


def _names_of(kind: type[nn.Module]) -> frozenset[str]:
    """Return the names that the `forward` of a class uses."""
    forward: object = inspect.unwrap(kind.forward)
    return frozenset(forward.__code__.co_names) if isinstance(forward, FunctionType) else frozenset()


def _form_of(kind: type[nn.Module]) -> _Form | None:
    """Return the `forward` of a class of mixers for steps; `None` if it keeps states in another way."""
    names, forward = _names_of(kind), inspect.unwrap(kind.forward)
    assert isinstance(forward, FunctionType), "it has names"
    parameters = inspect.signature(forward).parameters
    cache = next((name for name in _CACHES if name in parameters), None)
    recurrences = names & RECURRENCES.keys()
    if cache is None or CONVOLUTION not in names or "update_conv_state" not in names:
        return None
    if len(recurrences) != ("update_recurrent_state" in names):
        return None
    made = FunctionType(
        forward.__code__,
        forward.__globals__ | {name: REPLACED[name] for name in (CONVOLUTION, *recurrences)},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return _Form(made, cache)


def _continuing(mixer: Mixer, form: _Form) -> Callable[..., Any]:
    module, cache = mixer.module, _StepCache()
    original = type(module).forward

    def forward(hidden_states: Tensor, *args: Any, **named: Any) -> Any:
        states = step_states()
        if states is None:
            return original(module, hidden_states, *args, **named)
        assert not args, "transformers names all arguments but the hidden states"
        states.layer = mixer.layer
        named[form.cache] = cache
        named[_MASK] = None  # padding rows belong to no request
        with BatchInvariantMode() if states.watches else nullcontext():
            return form.forward(module, hidden_states, **named)

    return forward
