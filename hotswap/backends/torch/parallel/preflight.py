"""The preflight of a model on ranks: compares their logits with those of the model's own attention.

Like the preflight in one process (`hotswap.backends.torch.preflight`), run by all ranks: the logits of chunks
and batches are compared with those of the model's own attention on whole prompts, which ranks compute too.
Each rank holds the experts that its routers choose there, and compares their scores.
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

__all__ = ["PREFLIGHT_ROWS", "run_preflight"]

# The rows of logits that a preflight needs.
PREFLIGHT_ROWS = 2


def run_preflight(
    ranks: Ranks,
    logits: Tensor,
    *,
    kind: str,
    vocabulary: int,
    block_tokens: int,
    dtype: torch.dtype,
) -> tuple[tuple[LayerShape, ...], ...]:
    """Check that ranks can serve a model exactly; return what a request keeps in each layer of each rank.

    Blocking. Allocates KV blocks and states on the ranks and does not free them.

    Args:
        ranks: The ranks, bound to the model.
        logits: `[slots, rows, num_logits]` in fp32, shared with them.
        kind: The architecture, for messages.
        vocabulary: The number of token ids.
        block_tokens: Tokens per KV block.
        dtype: The dtype that the model computes in.

    Raises:
        UnsupportedModel: the check failed, or a rank raised it; the ranks must be restarted.
        InstanceLost: a rank failed otherwise.
    """
    prompts = prompts_of(vocabulary)
    blocks, num_blocks = _deal_blocks(prompts, block_tokens)
    ranks.call([OpenCache(num_blocks, block_tokens, len(prompts))] * ranks.grid.size)
    ends = [0] * len(prompts)
    paged: list[Tensor] = []
    whole: list[Tensor] = []
    shapes: tuple[tuple[LayerShape, ...], ...] = ()
    for step in STEPS:
        pieces: list[Piece] = []
        for request, count in step:
            start, ends[request] = ends[request], ends[request] + count
            tokens = prompts[request][start : ends[request]]
            pieces.append(Piece(tokens, start, blocks[request], True, slot=request))
            piece = Piece(prompts[request][: ends[request]], 0, blocks[request], True)
            number = ranks.submit(Step(Work((piece,)), 0, is_preflight=True, eager=True))
            ranks.finish(number, is_preflight=True)
            whole.append(logits[0, 0].clone())
        number = ranks.submit(Step(Work(tuple(pieces)), 0, is_preflight=True))
        shapes = tuple(answer.layers for answer in ranks.finish(number, is_preflight=True))
        paged += logits[0, : len(pieces)].clone()
    _compare(torch.stack(paged), torch.stack(whole), kind, tolerance_of(dtype))
    return shapes


def _deal_blocks(prompts: Sequence[Sequence[int]], block_tokens: int) -> tuple[list[list[int]], int]:
    dealt: list[list[int]] = []
    last = 0
    for prompt in prompts:
        first, last = last + 1, last + blocks_for(len(prompt), block_tokens)
        dealt.append(list(range(first, last + 1)))
    return dealt, last


def _compare(paged: Tensor, whole: Tensor, kind: str, tolerance: float) -> None:
    error = difference(paged, whole)
    if not error <= tolerance:  # also if it is NaN
        raise UnsupportedModel(
            f"The {kind!r} model computed in chunks differs by {error:.1e} of its largest logit from its own "
            f"attention, where {tolerance:.0e} is allowed: it keeps state outside attention or builds "
            "its own masks; serve it with another engine."
        )
