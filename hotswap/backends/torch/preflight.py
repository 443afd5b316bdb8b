"""Before an architecture serves: does it do what the engine assumes, and does it compute what it should?

Many architectures call attention through transformers' interface and still keep state elsewhere, call it
twice, or build masks of their own; served as if they did not, they give wrong tokens without a word.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any, cast

import torch
from torch import Tensor

from hotswap.backends.torch.attention import MaskPattern
from hotswap.backends.torch.forward import Piece, assemble
from hotswap.backends.torch.kv import KVCache, LayerShape, blocks_for
from hotswap.backends.torch.modeling import Skeleton
from hotswap.errors import UnsupportedModel

__all__ = ["STEPS", "difference", "preflight", "prompts_of", "reference", "tolerance_of"]

# Two requests, cut into uneven chunks that share steps and then decode: (request, tokens) in each step.
STEPS = (((0, 9),), ((0, 8), (1, 5)), ((1, 8), (0, 4)), ((0, 1), (1, 1)), ((0, 1),))
_SOME = 9  # tokens of a prompt whose logits those after them must not change
_LENGTHS = tuple(sum(n for step in STEPS for i, n in step if i == request) for request in (0, 1))

# Largest difference of a logit from the reference, as a share of the largest logit. bf16 and fp16 keep 8 and
# 11 bits, of which a few dozen layers that round in another order use up some; a wrong mask or position is
# off by far more.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def preflight(
    skeleton: Skeleton, device: torch.device, *, block_tokens: int, invariant: bool
) -> tuple[LayerShape, ...]:
    """Return what each layer of a bound skeleton keeps of a token, having checked that it can be served.

    Every layer must call attention once in a pass, and logits computed in chunks and batches must equal those
    of the model's own eager attention.

    Raises:
        UnsupportedModel: they do not.
    """
    cache = KVCache(sum(blocks_for(n, block_tokens) for n in _LENGTHS), block_tokens, device)
    try:
        theirs = reference(skeleton, device)
        with torch.inference_mode():
            mine = _in_chunks(skeleton, cache, invariant)
    except (UnsupportedModel, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as exc:  # whatever a model that is no causal decoder trips over
        masks = MaskPattern.__name__ in str(exc)
        why = (
            "computes with attention masks as tensors"
            if masks
            else f"fails on a row of several requests ({exc})"
        )
        raise _unsupported(skeleton, device, why) from exc
    _compare(skeleton, device, mine, theirs)
    return tuple(cache.layers[index] for index in range(skeleton.num_layers))


def reference(skeleton: Skeleton, device: torch.device) -> list[Tensor]:
    """The logits that a preflight expects: those of the model's own attention, one request at a time."""
    prompts = prompts_of(skeleton.vocabulary)
    with torch.inference_mode(), skeleton.eager():
        whole = [_eager(skeleton, torch.tensor([prompt], device=device)) for prompt in prompts]
    ends = [0] * len(prompts)
    logits: list[Tensor] = []
    for request, count in (chunk for step in STEPS for chunk in step):
        ends[request] += count
        logits.append(whole[request][ends[request] - 1])
    return logits


def prompts_of(vocabulary: int) -> list[list[int]]:
    """The requests that `STEPS` cuts into chunks."""
    return [[(7919 * at + 31 * length) % vocabulary for at in range(length)] for length in _LENGTHS]


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest `difference` at which logits computed in `dtype` are those that were expected."""
    return _TOLERANCE.get(dtype, 1e-3)


def difference(mine: Tensor, theirs: Tensor) -> float:
    """The largest difference of a logit, as a share of the largest logit."""
    return float((mine.float() - theirs.float()).abs().max() / theirs.float().abs().max().clamp(min=1e-6))


def _unsupported(skeleton: Skeleton, device: torch.device, symptom: str) -> UnsupportedModel:
    why = _cause(skeleton, device) or symptom
    return UnsupportedModel(f"The {skeleton.config.model_type!r} model {why}; serve it with another engine.")


def _cause(skeleton: Skeleton, device: torch.device) -> str:
    """What about the model itself explains that it cannot be served, found by running it once more."""
    ids = torch.tensor(prompts_of(skeleton.vocabulary)[:1], device=device)
    try:
        with torch.inference_mode(), skeleton.eager():
            whole, part = _eager(skeleton, ids), _eager(skeleton, ids[:, :_SOME])
            states = _states(skeleton.module(input_ids=ids, use_cache=True))
    except Exception:  # then what was seen must explain itself
        return ""
    if difference(part, whole[:_SOME]) > tolerance_of(skeleton.dtype):
        return "is not causal: a token changes the logits of those before it"
    return f"keeps {' and '.join(states)} beside keys and values" if states else ""


def _states(output: Any) -> list[str]:
    """What the model's own cache holds beside keys and values."""
    layers: Any = getattr(getattr(output, "past_key_values", None), "layers", ())
    kinds = {"conv_states": "convolution states", "recurrent_states": "recurrent states"}
    kinds["indexer_keys"] = "keys of an index"
    return [words for name, words in kinds.items() if any(_holds(getattr(at, name, None)) for at in layers)]


def _holds(part: object) -> bool:
    if isinstance(part, dict):
        return any(state is not None for state in cast("dict[int, object]", part).values())
    return part is not None


def _in_chunks(skeleton: Skeleton, cache: KVCache, invariant: bool) -> list[Tensor]:
    """The logits at the end of every chunk, in the order of the steps."""
    prompts, free = prompts_of(skeleton.vocabulary), iter(range(1, cache.num_blocks + 1))
    blocks = [[next(free) for _ in range(blocks_for(len(p), cache.block_tokens))] for p in prompts]
    ends = [0] * len(prompts)
    logits: list[Tensor] = []
    for step in STEPS:
        pieces: list[Piece] = []
        for request, count in step:
            start, ends[request] = ends[request], ends[request] + count
            pieces.append(Piece(prompts[request][start : start + count], start, blocks[request], True))
        batch = assemble(pieces, cache, invariant=invariant)
        logits += batch.logits(skeleton.module)
        if sorted(batch.step.layers) != list(range(skeleton.num_layers)):
            raise _unsupported(skeleton, cache.device, _called(batch.step.layers, skeleton.num_layers))
    return logits


def _called(layers: Items[int], expected: int) -> str:
    """How the calls of attention, by layer, differ from one call of each layer."""
    seen = len(set(layers))
    if not layers:
        return "does not call attention through transformers' interface"
    if len(layers) > seen:
        return f"calls attention {len(layers)} times in a pass through {seen} layers"
    return f"calls attention through transformers' interface in {seen} layers where it has {expected}"


def _eager(skeleton: Skeleton, ids: Tensor) -> Tensor:
    out: Any = skeleton.module(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return cast("Tensor", out.logits[0])


def _compare(skeleton: Skeleton, device: torch.device, mine: Items[Tensor], theirs: Items[Tensor]) -> None:
    tolerance = tolerance_of(skeleton.dtype)
    error = difference(torch.stack(list(mine)), torch.stack(list(theirs)))
    if not error <= tolerance:  # also when it is not a number
        symptom = (
            f"computed in chunks differs by {error:.1e} of its largest logit from its own attention, where "
            f"{tolerance:.0e} is allowed: it places tokens, or masks keys, by row and not by position"
        )
        raise _unsupported(skeleton, device, symptom)
