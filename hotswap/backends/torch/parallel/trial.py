"""Before ranks serve an architecture: is it one that they can, and do they compute what it should?

As the preflight of a single process (`hotswap.backends.torch.preflight`), carried out by all ranks: steps in
chunks and batches are compared with the model's own attention on whole prompts, both over stages and parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hotswap.backends.torch.forward import Piece, Work
from hotswap.backends.torch.kv import LayerShape, blocks_for
from hotswap.backends.torch.parallel.messages import OpenCache, Step
from hotswap.backends.torch.parallel.processes import Ranks
from hotswap.backends.torch.preflight import STEPS, difference, prompts_of, tolerance_of
from hotswap.errors import UnsupportedModel

__all__ = ["TRIAL_ROWS", "run_trial"]

# Rows of logits that a trial needs.
TRIAL_ROWS = 2


def run_trial(
    ranks: Ranks,
    logits: Tensor,
    *,
    kind: str,
    num_layers: int,
    vocabulary: int,
    block_tokens: int,
    dtype: torch.dtype,
) -> tuple[tuple[LayerShape, ...], ...]:
    """Return what the layers of each rank keep of a token, having checked that ranks can serve the model.

    Blocking. Needs no KV blocks, and leaves some behind.

    Args:
        ranks: Bound to the model.
        logits: `[slots, rows, num_logits]` in fp32, shared with them.
        kind: The architecture, for messages.
        num_layers: Of the model.
        vocabulary: The number of token ids.
        block_tokens: Tokens of a KV block.
        dtype: What the model computes in.

    Raises:
        UnsupportedModel: they cannot; or a rank raised it, and the ranks must be started anew.
        InstanceLost: a rank failed otherwise.
    """
    prompts = prompts_of(vocabulary)
    blocks, num_blocks = _deal_blocks(prompts, block_tokens)
    ranks.call([OpenCache(num_blocks, block_tokens)] * ranks.grid.size)
    ends = [0] * len(prompts)
    paged: list[Tensor] = []
    whole: list[Tensor] = []
    shapes: tuple[tuple[LayerShape, ...], ...] = ()
    for step in STEPS:
        pieces: list[Piece] = []
        for request, count in step:
            start, ends[request] = ends[request], ends[request] + count
            pieces.append(Piece(prompts[request][start : ends[request]], start, blocks[request], True))
        shapes = _step(ranks, pieces, kind, num_layers)
        paged += logits[0, : len(pieces)].clone()
        for request, _ in step:
            piece = Piece(prompts[request][: ends[request]], 0, blocks[request], True)
            ranks.finish(ranks.submit(Step(Work((piece,)), 0, is_trial=True, eager=True)), is_trial=True)
            whole.append(logits[0, 0].clone())
    _compare(torch.stack(paged), torch.stack(whole), kind, tolerance_of(dtype))
    return shapes


def _deal_blocks(prompts: Sequence[Sequence[int]], block_tokens: int) -> tuple[list[list[int]], int]:
    dealt: list[list[int]] = []
    last = 0
    for prompt in prompts:
        first, last = last + 1, last + blocks_for(len(prompt), block_tokens)
        dealt.append(list(range(first, last + 1)))
    return dealt, last


def _step(
    ranks: Ranks, pieces: Sequence[Piece], kind: str, num_layers: int
) -> tuple[tuple[LayerShape, ...], ...]:
    answers = ranks.finish(ranks.submit(Step(Work(tuple(pieces)), 0, is_trial=True)), is_trial=True)
    for place, answer in zip(ranks.grid.places, answers, strict=True):
        expected = list(place.layers(num_layers))
        if sorted(answer.called) != expected:
            raise UnsupportedModel(
                f"The {kind!r} model has {len(expected)} layers on {place}, which called attention "
                f"{len(answer.called)} times, where each should once; serve it with another engine."
            )
    return tuple(answer.layers for answer in answers)


def _compare(paged: Tensor, whole: Tensor, kind: str, tolerance: float) -> None:
    error = difference(paged, whole)
    if not error <= tolerance:  # also when it is not a number
        raise UnsupportedModel(
            f"The {kind!r} model computed in chunks differs by {error:.1e} of its largest logit from its own "
            f"attention, where {tolerance:.0e} is allowed: it keeps state, or masks keys, in a way of its "
            "own; serve it with another engine."
        )
