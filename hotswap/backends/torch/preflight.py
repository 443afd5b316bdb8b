"""Before an architecture serves: does it do what the engine assumes, and does it compute what it should?

Many architectures call attention through transformers' interface and still keep state elsewhere, call it
twice, or build masks of their own; served as if they did not, they give wrong tokens without a word.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any, cast

import torch
from torch import Tensor

from hotswap.backends.torch.forward import Piece, assemble
from hotswap.backends.torch.kv import KVCache, LayerShape, blocks_for
from hotswap.backends.torch.modeling import Skeleton
from hotswap.errors import UnsupportedModel

__all__ = ["preflight"]

# Two requests, cut into uneven chunks that share steps and then decode: (request, tokens) in each step.
_STEPS = (((0, 9),), ((0, 8), (1, 5)), ((1, 8), (0, 4)), ((0, 1), (1, 1)), ((0, 1),))
_LENGTHS = tuple(sum(n for step in _STEPS for i, n in step if i == request) for request in (0, 1))

# Largest difference of a logit from the reference, as a share of the largest logit. bf16 and fp16 keep 8 and
# 11 bits, of which a few dozen layers that round in another order use up some; a wrong mask or position is
# off by far more.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def preflight(
    skeleton: Skeleton, device: torch.device, *, block_tokens: int, min_rows: int
) -> tuple[LayerShape, ...]:
    """Return what each layer of a bound skeleton keeps of a token, having checked that it can be served.

    Every layer must call attention once in a pass, and logits computed in chunks and batches must equal those
    of the model's own eager attention.

    Raises:
        UnsupportedModel: they do not.
    """
    prompts = [_prompt(length, skeleton.vocabulary) for length in _LENGTHS]
    cache = KVCache(sum(blocks_for(n, block_tokens) for n in _LENGTHS), block_tokens, device)
    try:
        with torch.inference_mode():
            mine = _in_chunks(skeleton, prompts, cache, min_rows)
            reference = _at_once(skeleton, prompts, device)
    except (UnsupportedModel, torch.OutOfMemoryError):
        raise
    except Exception as exc:  # whatever a model that is no causal decoder trips over
        raise _unsupported(skeleton, f"fails on a row of several requests ({exc})") from exc
    _compare(skeleton, mine, reference)
    return tuple(cache.layers[index] for index in range(skeleton.num_layers))


def _unsupported(skeleton: Skeleton, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"The {skeleton.config.model_type!r} model {why}; serve it with another engine.")


def _prompt(length: int, vocabulary: int) -> list[int]:
    return [(7919 * at + 31 * length) % vocabulary for at in range(length)]


def _in_chunks(skeleton: Skeleton, prompts: Items[list[int]], cache: KVCache, min_rows: int) -> list[Tensor]:
    """The logits at the end of every chunk, in the order of the steps."""
    free = iter(range(1, cache.num_blocks + 1))
    blocks = [[next(free) for _ in range(blocks_for(len(p), cache.block_tokens))] for p in prompts]
    ends = [0] * len(prompts)
    logits: list[Tensor] = []
    for step in _STEPS:
        pieces: list[Piece] = []
        for request, count in step:
            start, ends[request] = ends[request], ends[request] + count
            pieces.append(Piece(prompts[request][start : start + count], start, blocks[request], True))
        batch = assemble(pieces, cache, min_rows=min_rows)
        logits += batch.logits(skeleton.module)
        if sorted(batch.step.layers) != list(range(skeleton.num_layers)):
            raise _unsupported(
                skeleton,
                f"has {skeleton.num_layers} layers, of which {len(set(batch.step.layers))} called attention "
                f"{len(batch.step.layers)} times, where each should once",
            )
    return logits


def _at_once(skeleton: Skeleton, prompts: Items[list[int]], device: torch.device) -> list[Tensor]:
    """The same logits from the model's own attention, one request at a time."""
    with skeleton.eager():
        whole = [_eager(skeleton, torch.tensor([prompt], device=device)) for prompt in prompts]
    ends = [0] * len(prompts)
    logits: list[Tensor] = []
    for request, count in (chunk for step in _STEPS for chunk in step):
        ends[request] += count
        logits.append(whole[request][ends[request] - 1])
    return logits


def _eager(skeleton: Skeleton, ids: Tensor) -> Tensor:
    out: Any = skeleton.module(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return cast("Tensor", out.logits[0])


def _compare(skeleton: Skeleton, mine: Items[Tensor], reference: Items[Tensor]) -> None:
    tolerance = _TOLERANCE.get(skeleton.dtype, 1e-3)
    ours, theirs = torch.stack(list(mine)).float(), torch.stack(list(reference)).float()
    error = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6))
    if not error <= tolerance:  # also when it is not a number
        raise _unsupported(
            skeleton,
            f"computed in chunks differs by {error:.1e} of its largest logit from its own attention, where "
            f"{tolerance:.0e} is allowed: it keeps state, or masks keys, in a way of its own",
        )
