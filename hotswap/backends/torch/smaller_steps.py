"""A step that ran out of memory, computed and sampled again in parts.

Parts give the tokens that the step would have given: each writes the keys and values that the next one reads.
Recurrent states are changed by a part of a step that failed, so that models which keep them compute their
requests anew instead.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hotswap.backends.torch.device import is_out_of_memory
from hotswap.backends.torch.distribution import Workspace
from hotswap.backends.torch.forward import Forward, Piece, Work
from hotswap.backends.torch.masks import Mask
from hotswap.backends.torch.sampling import Choice, Sampler, sample

__all__ = ["compute_in_parts", "sample_in_parts"]

_log = logging.getLogger("hotswap")

# A step is halved so many times: to a sixteenth.
_MOST_HALVINGS = 4


def compute_in_parts(forward: Forward, work: Work) -> Tensor:
    """Compute a step that ran out of memory, in parts, each once or again in halves.

    Args:
        forward: The model; it keeps no recurrent states, and has no step in flight.
        work: The step.

    Returns:
        The logits of the rows that the step needed, in its order.

    Raises:
        Exception: a part failed that cannot be smaller, or by another error than a lack of memory.
    """
    parts = list(_computed(forward, work, _MOST_HALVINGS))
    return torch.cat(parts)


def sample_in_parts(
    logits: Tensor,
    samplers: Sequence[Sampler],
    indices: Sequence[int],
    space: Workspace,
    masks: Sequence[Mask | None] = (),
) -> list[Choice]:
    """Return the next token of each request as `sample` does; in halves where memory lacks for all rows.

    A row's token depends on no other row, and `sample` does not change the logits.

    Raises:
        Exception: one row failed, or all by another error than a lack of memory.
    """
    try:
        return sample(logits, samplers, indices, space, masks)
    except Exception as exc:
        if len(samplers) == 1 or not is_out_of_memory(exc):
            raise
    _log.warning("Sampling of %d rows ran out of memory; it goes on with half of them.", len(samplers))
    half = len(samplers) // 2
    parts = (slice(0, half), slice(half, None))
    return [
        choice
        for part in parts
        for choice in sample_in_parts(logits[part], samplers[part], indices[part], space, masks[part])
    ]


def _computed(forward: Forward, work: Work, halvings: int) -> Iterator[Tensor]:
    for half in _halves(work):
        forward.submit(half)
        try:
            logits = forward.result()
        except Exception as exc:
            if halvings == 1 or half.num_tokens == 1 or not is_out_of_memory(exc):
                raise
        else:
            yield logits
            continue
        yield from _computed(forward, half, halvings - 1)


def _halves(work: Work) -> tuple[Work, ...]:
    """Return a step as two, with about half of its tokens each; the first also prepares the blocks."""
    left, first, second = work.num_tokens // 2, list[Piece](), list[Piece]()
    for piece in work.pieces:
        part = min(left, len(piece.tokens))
        left -= part
        if part:
            first.append(piece if part == len(piece.tokens) else _part(piece, 0, part))
        if part < len(piece.tokens):
            second.append(piece if not part else _part(piece, part, len(piece.tokens)))
    rest = Work(tuple(second))
    return (replace(work, pieces=tuple(first)), rest) if first else (replace(work, pieces=rest.pieces),)


def _part(piece: Piece, begin: int, end: int) -> Piece:
    return replace(
        piece,
        tokens=piece.tokens[begin:end],
        start=piece.start + begin,
        samples=piece.samples and end == len(piece.tokens),
        num_scored=max(0, min(piece.num_scored, end) - begin),
    )
