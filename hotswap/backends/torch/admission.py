"""What a request must be to be served, and what it becomes inside the engine."""

from __future__ import annotations

from hotswap.backends.torch.adapters.plan import RankRange
from hotswap.backends.torch.batcher import Sequence
from hotswap.backends.torch.loading import LoadedModel
from hotswap.backends.torch.prefix import root_key
from hotswap.backends.torch.sampling import Sampler
from hotswap.errors import InvalidRequest, PromptTooLong
from hotswap.request import Request

__all__ = ["check_servable", "to_sequence"]


def check_servable(request: Request, model: LoadedModel, *, kv_tokens: int) -> None:
    """Refuse what could not be served to its end, before it takes anything.

    Raises:
        InvalidRequest: it has all its tokens already, or some that the model does not know.
        PromptTooLong: it fills the context, or would outgrow `kv_tokens`.
    """
    if request.remaining_tokens < 1:
        raise InvalidRequest(f"Request {request.id!r} has all its tokens; it needs no engine any more.")
    tokens = request.tokens
    if min(tokens) < 0 or max(tokens) >= model.vocabulary:
        raise InvalidRequest(
            f"Request {request.id!r} has token {max(tokens) if min(tokens) >= 0 else min(tokens)}, but the "
            f"vocabulary of {model.card.id!r} has {model.vocabulary}; use the model's own tokenizer."
        )
    if len(tokens) >= model.context:
        raise PromptTooLong(
            f"Request {request.id!r} has {len(tokens)} tokens, but the context of {model.card.id!r} holds "
            f"{model.context}; shorten the prompt."
        )
    # The last token is sampled and never computed.
    if (most := _max_tokens(request, model) - 1) > kv_tokens:
        raise PromptTooLong(
            f"Request {request.id!r} may grow to {most} tokens, but the KV blocks hold {kv_tokens}; lower "
            "max_tokens or give the engine more of them."
        )


def to_sequence(
    request: Request, ticket: int, model: LoadedModel, adapter: RankRange | None, *, epoch: int
) -> Sequence:
    """Return the request as the batcher sees it, to be computed by the weights of load `epoch`.

    It goes on after what it has generated.
    """
    eos = frozenset[int]() if request.sampling.ignore_eos else model.eos_token_ids
    stop_ids = eos | frozenset(request.sampling.stop_token_ids)
    tokens = list(request.tokens)
    return Sequence(
        ticket=ticket,
        tokens=tokens,
        num_prompt=len(request.prompt),
        max_tokens=_max_tokens(request, model),
        sampler=Sampler(request.sampling, sorted(stop_ids), tokens),
        stop_ids=stop_ids,
        min_tokens=request.sampling.min_tokens,
        adapter=adapter,
        priority=request.priority,
        root=root_key(epoch, 0 if adapter is None else adapter.serial),
    )


def _max_tokens(request: Request, model: LoadedModel) -> int:
    return min(len(request.prompt) + request.sampling.max_tokens, model.context)
