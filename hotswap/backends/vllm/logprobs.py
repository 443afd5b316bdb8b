"""Log-probabilities as vLLM tells them, as `Token` and `PromptLogprobs` have them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hotswap.backends.vllm.inside.sampling import NOTHING_LEFT
from hotswap.errors import HotswapError, InstanceError, InvalidRequest
from hotswap.request import Request, ScoredPrompt, TokenLogprob

__all__ = ["error_in", "of_prompt", "of_token"]


def error_in(told: Mapping[int, Any], token: int) -> HotswapError | None:
    """Return why a token is none, from what vLLM tells of its position; `None` if it is one.

    Args:
        told: vLLM's `Logprob` of each token; empty if it tells nothing.
        token: The token.
    """
    if not told:
        return None
    if told[token].logprob == NOTHING_LEFT:
        return InvalidRequest(
            "The request's grammar, suppressed, forced and bad words leave no token that may come; allow "
            "at least one."
        )
    if math.isnan(told[token].logprob):
        return InstanceError(
            "The largest logit of the request is not a number; its weights or its adapter may be damaged, or "
            "the dtype too small for them."
        )
    return None


def of_token(
    request: Request, told: Mapping[int, Any], token: int
) -> tuple[float | None, tuple[TokenLogprob, ...]]:
    """Return the log-probability of a token and those of the most probable ones, if they were asked for."""
    count = request.sampling.logprobs
    if count is None:
        return None, ()
    top = (TokenLogprob(id=id, logprob=logprob) for _, id, logprob in _ranked(told, count))
    return told[token].logprob, tuple(top)


def of_prompt(request: Request, told: Sequence[Mapping[int, Any]]) -> ScoredPrompt | None:
    """Return the log-probabilities of a prompt; `None` if vLLM tells none."""
    count = request.sampling.prompt_logprobs
    if count is None or not told:
        return None
    first, *rest = request.prompt
    scored = ScoredPrompt(first)
    for token, entry in zip(rest, told[1:], strict=True):
        ranked = _ranked(entry, count)
        scored.add(token, entry[token].logprob, [top[1] for top in ranked], [top[2] for top in ranked])
    return scored


def _ranked(told: Mapping[int, Any], count: int) -> list[tuple[int, int, float]]:
    """The ranks, ids and log-probabilities of the most probable tokens, most probable first.

    vLLM tells of the token, too, whose rank is larger if it is none of them.
    """
    return sorted((entry.rank, id, entry.logprob) for id, entry in told.items() if entry.rank <= count)
