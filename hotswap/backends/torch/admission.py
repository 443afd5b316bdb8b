"""Converts a `Request` into the `Sequence` that the batcher schedules."""

from __future__ import annotations

from collections.abc import Callable

from hotswap.backends.servable import most_tokens
from hotswap.backends.torch.adapters.slots import AdapterSlot
from hotswap.backends.torch.arrival import Announced
from hotswap.backends.torch.loading import LoadedModel
from hotswap.backends.torch.masks import Constraint
from hotswap.backends.torch.prefix import root_key
from hotswap.backends.torch.prompt_logprobs import PromptScores
from hotswap.backends.torch.sampling import Sampler
from hotswap.backends.torch.sequence import Sequence
from hotswap.request import Request

__all__ = ["to_sequence"]


def to_sequence(
    request: Request,
    ticket: int,
    model: LoadedModel,
    adapter: AdapterSlot | None,
    *,
    weights: str,
    constraint: Constraint | None = None,
    announced: Callable[[Request, bytes], Announced | None] = lambda request, root: None,
) -> Sequence:
    """Return the sequence of a request.

    Generation continues after the tokens that the request has generated elsewhere.

    Args:
        request: The request.
        ticket: Its number in order of arrival.
        model: The model that is served.
        adapter: The slot of its adapter; `None` without one.
        weights: Identifies the weights that compute it, for `root_key`.
        constraint: The state of its grammar after these tokens; `None` without one.
        announced: Returns what was announced of it, given the request and its root key; `None` if nothing.
    """
    free = request.sampling.ignore_eos and constraint is None  # a complete grammar ends the generation
    eos = frozenset[int]() if free else model.eos_token_ids
    stop_ids = eos | frozenset(request.sampling.stop_token_ids)
    tokens = list(request.tokens)
    root = root_key(weights, b"" if adapter is None else adapter.key)
    rope, long_root = model.long_rope, b""
    if rope is not None:  # keys of equal tokens differ with the factors that their first tokens have
        long_root = root_key(f"{weights} long", b"" if adapter is None else adapter.key)
        root = long_root if rope.is_long(len(request.prompt), len(tokens)) else root
    arriving = announced(request, root)
    return Sequence(
        ticket=ticket,
        tokens=tokens,
        num_prompt=len(request.prompt),
        max_tokens=most_tokens(request, model.context),
        sampler=Sampler(request.sampling, sorted(stop_ids), tokens, len(request.prompt), constraint),
        stop_ids=stop_ids,
        min_tokens=request.sampling.min_tokens,
        adapter=adapter,
        priority=request.priority,
        root=root,
        keys=[] if arriving is None else list(arriving.keys),
        scores=_scores(request),
        has_arrived=arriving is not None and bool(arriving.keys or arriving.arrival),
        arrival=None if arriving is None else arriving.arrival,
        long_rope=rope,
        long_root=long_root,
    )


def _scores(request: Request) -> PromptScores | None:
    """Return what is to be told of the prompt; `None` also where a client with a token has been told."""
    count = request.sampling.prompt_logprobs
    return None if count is None or request.generated else PromptScores(request.prompt, count)
