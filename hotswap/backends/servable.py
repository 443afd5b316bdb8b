"""The checks of a request before it is admitted."""

from __future__ import annotations

from collections.abc import Collection

from hotswap.errors import InvalidRequest, PromptTooLong
from hotswap.request import ModelId, Request
from hotswap.sampling import Sampling

__all__ = ["check_servable", "most_tokens"]


def check_servable(
    request: Request,
    model: ModelId,
    *,
    context: int,
    vocabulary: int,
    kv_tokens: int,
    no_grammar: str = "",
    unsupported: Collection[str] = (),
) -> None:
    """Refuse a request that could not be served to its end, before it takes any resource.

    Args:
        request: The request.
        model: The model that is loaded, for errors.
        context: The longest request that it serves, in tokens.
        vocabulary: Its token ids are less than this.
        kv_tokens: Tokens that all KV blocks hold.
        no_grammar: Why requests cannot be held to a grammar; empty where they can.
        unsupported: Fields of `Sampling` that the engine does not know; none may differ from its default.

    Raises:
        InvalidRequest: it has all its tokens already, or names some that the model does not have, or asks
            for several samples, or a grammar.
        PromptTooLong: it fills the context, or would outgrow `kv_tokens`.
    """
    if request.remaining_tokens < 1:
        raise InvalidRequest(f"Request {request.id!r} has all its tokens; it needs no engine any more.")
    if request.sampling.has_grammar and no_grammar:
        raise InvalidRequest(f"Request {request.id!r} is to be held to a grammar, but {no_grammar}.")
    if request.sampling.n > 1:
        raise InvalidRequest(
            f"Request {request.id!r} asks an engine for {request.sampling.n} samples; ask a fleet, or send a "
            "request for each (`Sampling.sample`)."
        )
    default = Sampling()
    for name in unsupported:
        if getattr(request.sampling, name) != getattr(default, name):
            raise InvalidRequest(f"Request {request.id!r} asks for {name}, which this engine has not.")
    request.check_vocabulary(vocabulary)
    request.check_prompt_logprobs()
    if request.num_tokens >= context:
        raise PromptTooLong(
            f"Request {request.id!r} has {request.num_tokens} tokens, but the context of {model!r} holds "
            f"{context}; shorten the prompt."
        )
    # The last token is sampled and never computed.
    if (most := most_tokens(request, context) - 1) > kv_tokens:
        raise PromptTooLong(
            f"Request {request.id!r} may grow to {most} tokens, but the KV blocks hold {kv_tokens}; lower "
            "max_tokens or give the engine more of them."
        )


def most_tokens(request: Request, context: int) -> int:
    """How long a request may grow, prompt included."""
    return min(len(request.prompt) + request.sampling.max_tokens, context)
