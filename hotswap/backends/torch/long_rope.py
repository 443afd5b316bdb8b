"""RoPE whose factors depend on the length of a text: `longrope`, as in Phi-3 and Phi-4-mini.

Such a model has two sets of factors, for texts of at most `original_max_position_embeddings` tokens and for
longer ones. transformers chooses one set for a whole row, by the greatest position in it, which is right for
a row of one request. In a step each token gets the set that `generate` gives it for its request alone, so one
long request changes no other.

When a text grows beyond that length, `generate` does one of two things. Most models keep the keys that they
have, and take the factors for long texts from then on. The Phi family computes all keys anew. hotswap does
the same as the model does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn

from hotswap.backends.torch.attention import current
from hotswap.backends.torch.fused import Fused
from hotswap.errors import UnsupportedModel

__all__ = ["LongRope", "choose_factors"]

_LONG = "longrope"
_LIMIT = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class LongRope:
    """When a model takes its factors for long texts.

    Attributes:
        limit: The length, in tokens, of the longest text with the factors for short ones.
        recomputes: Whether all keys are computed anew when a text grows beyond it; else earlier keys stay.
    """

    limit: int
    recomputes: bool

    def length(self, num_prompt: int, num_tokens: int) -> int:
        """Return the length by which factors are chosen for the tokens that a request has now.

        A token at position *p* gets the factors for a text of the greater of this and *p* + 1 tokens.

        Args:
            num_prompt: Tokens of the prompt.
            num_tokens: Tokens of the prompt and generated ones.
        """
        return num_tokens if self.recomputes else num_prompt

    def is_long(self, num_prompt: int, num_tokens: int) -> bool:
        """Whether the first tokens of a request have the factors for long texts."""
        return self.length(num_prompt, num_tokens) > self.limit


def choose_factors(model: nn.Module) -> tuple[tuple[Fused, ...], LongRope | None]:
    """Replace the `forward` of modules that choose factors for a row; return what was attached, and when.

    Raises:
        UnsupportedModel: the layers of the model have different limits.
    """
    made: list[Fused] = []
    limits: set[int] = set()
    for module in model.modules():
        if _LONG not in _kinds(module):
            continue
        found = _limits(module)
        limits |= found
        made.append(Fused(module, _by_request(module.forward, max(found))))
    if not made:
        return (), None
    if len(limits) > 1:
        kind = cast("Any", model).config.model_type
        raise UnsupportedModel(
            f"The {kind!r} model has layers that take their RoPE factors for long texts from different "
            f"lengths on ({sorted(limits)}); serve it with another engine."
        )
    for fused in made:
        fused.attach()
    return tuple(made), LongRope(limits.pop(), _recomputes(model))


def _kinds(module: nn.Module) -> frozenset[str]:
    kinds: object = getattr(module, "rope_type", None)
    if isinstance(kinds, Mapping):
        return frozenset(cast("Mapping[str, str]", kinds).values())
    return frozenset({kinds}) if isinstance(kinds, str) else frozenset()


def _limits(module: nn.Module) -> set[int]:
    """Return the limits in the config of a module, which may have one for each kind of layer."""
    parameters: dict[str, Any] = cast("Any", module).config.rope_parameters
    each = [parameters] if _LIMIT in parameters else [one for one in parameters.values() if one]
    return {int(one[_LIMIT]) for one in each if one.get("rope_type") == _LONG}


def _recomputes(model: nn.Module) -> bool:
    """Whether `generate` drops the keys of a text that grows beyond the limit."""
    prepare: object = getattr(type(model), "prepare_inputs_for_generation", None)
    prepare = inspect.unwrap(prepare) if callable(prepare) else None
    asks = isinstance(prepare, FunctionType) and _LIMIT in prepare.__code__.co_names + _texts(prepare)
    return asks and hasattr(cast("Any", model).config, _LIMIT)


def _texts(function: FunctionType) -> tuple[str, ...]:
    return tuple(value for value in function.__code__.co_consts if isinstance(value, str))


def _by_request(forward: Callable[..., Any], limit: int) -> Callable[..., Any]:
    def rotations(x: Tensor, position_ids: Tensor, *given: Any, **named: Any) -> Any:
        step = current()
        if step is None or step.lengths is None:
            return forward(x, position_ids, *given, **named)
        # transformers looks at the greatest position: short texts have none from the limit on, and another
        # one beyond it makes a row long.
        short = forward(x, position_ids.clamp(max=limit - 1), *given, **named)
        beyond = torch.full_like(position_ids[:, :1], limit)
        long = forward(x, torch.cat([position_ids, beyond], 1), *given, **named)
        is_long = (step.lengths > limit)[None, :, None]
        return tuple(torch.where(is_long, b[:, :-1], a) for a, b in zip(short, long, strict=True))

    return rotations
