"""The check of a loaded model, once per architecture: compares the engine's logits with the model's own.

Many architectures call attention through transformers' interface and still keep state elsewhere, call it
twice per layer, or build their own masks. Without this check the engine would silently serve wrong tokens.

Experts are chosen as in the reference, and the scores that they are chosen by are compared (`routing`):
otherwise two nearly equal scores would have sound models refused by chance.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from hotswap.backends.torch.attention import MaskPattern
from hotswap.backends.torch.forward import Piece, assemble
from hotswap.backends.torch.kv import KVCache, LayerShape, blocks_for
from hotswap.backends.torch.modeling import Skeleton
from hotswap.backends.torch.recurrent.states import StatePool, StepStates
from hotswap.backends.torch.routing import Choices, Comparison, HeldChoices, RecordedChoices
from hotswap.backends.torch.step_options import StepOptions
from hotswap.errors import UnsupportedModel

__all__ = [
    "STEPS",
    "Reference",
    "difference",
    "preflight",
    "prompts_of",
    "reference",
    "symptom_of_scores",
    "tolerance_of",
]

log = logging.getLogger("hotswap")

# Two requests in uneven chunks that share steps, then decodes: the (request, number of tokens) of each step.
STEPS = (((0, 9),), ((0, 8), (1, 5)), ((1, 8), (0, 4)), ((0, 1), (1, 1)), ((0, 1),))
_SOME = 9  # the first tokens of a prompt, whose logits must not depend on later tokens
_LENGTHS = tuple(sum(n for step in STEPS for i, n in step if i == request) for request in (0, 1))

# The maximum difference of a logit from the reference, relative to the largest logit, and of the scores of a
# router, by their root mean squares. bf16 and fp16 have 8
# and 11 bits, and a few dozen layers that round in another order change some; a wrong mask or position
# changes far more.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def preflight(skeleton: Skeleton, device: torch.device, steps: StepOptions) -> tuple[LayerShape, ...]:
    """Check that a bound skeleton can be served exactly, and return what a request keeps in each layer.

    Every layer must call attention once per pass, or continue its recurrent states. The logits computed in
    chunks and batches must equal those of the model's own eager attention, with the experts that it chooses,
    as must the scores of routers.

    Args:
        skeleton: The model.
        device: Its device.
        steps: How its steps are computed.

    Raises:
        UnsupportedModel: the check failed.
    """
    size = steps.block_tokens
    num_blocks = sum(blocks_for(n, size) for n in _LENGTHS)
    cache = KVCache(num_blocks, size, device, by_kernels=steps.by_kernels)
    states = StatePool(len(_LENGTHS), device) if skeleton.mixers else None
    try:
        expected = reference(skeleton, device)
        with torch.inference_mode():
            mine, comparison = _in_chunks(skeleton, cache, steps.invariant, expected.choices, states)
    except (UnsupportedModel, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as exc:  # a model that is no causal decoder may fail with any error
        masks = MaskPattern.__name__ in str(exc)
        why = (
            "computes with attention masks as tensors"
            if masks
            else f"fails on a row of several requests ({exc})"
        )
        raise _unsupported(skeleton, device, why) from exc
    _compare(skeleton, device, mine, expected.logits, comparison)
    return _kept(skeleton, cache, states)


@dataclass(frozen=True, slots=True)
class Reference:
    """What a model computes with its own attention, one request at a time.

    Attributes:
        logits: The logits at the end of every chunk, in the order of `STEPS`.
        choices: The choices of routers, by request.
    """

    logits: list[Tensor]
    choices: list[Choices]


def reference(skeleton: Skeleton, device: torch.device) -> Reference:
    """Return what is expected: the logits of the model's own attention, and the experts that it chooses."""
    prompts = prompts_of(skeleton.vocabulary)
    recorders = [RecordedChoices(len(prompt)) for prompt in prompts]
    whole: list[Tensor] = []
    with torch.inference_mode(), skeleton.eager():
        for prompt, recorder in zip(prompts, recorders, strict=True):
            with recorder:
                whole.append(_eager(skeleton, torch.tensor([prompt], device=device)))
    ends = [0] * len(prompts)
    logits: list[Tensor] = []
    for request, count in (chunk for step in STEPS for chunk in step):
        ends[request] += count
        logits.append(whole[request][ends[request] - 1])
    return Reference(logits, [recorder.choices for recorder in recorders])


def prompts_of(vocabulary: int) -> list[list[int]]:
    """Return the prompts of the requests in `STEPS`."""
    return [[(7919 * at + 31 * length) % vocabulary for at in range(length)] for length in _LENGTHS]


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the largest accepted `difference` of logits computed in `dtype`."""
    return _TOLERANCE.get(dtype, 1e-3)


def difference(mine: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of a logit, relative to the largest logit."""
    return float((mine.float() - theirs.float()).abs().max() / theirs.float().abs().max().clamp(min=1e-6))


def _unsupported(skeleton: Skeleton, device: torch.device, symptom: str) -> UnsupportedModel:
    why = _cause(skeleton, device) or symptom
    return UnsupportedModel(f"The {skeleton.config.model_type!r} model {why}; serve it with another engine.")


def _cause(skeleton: Skeleton, device: torch.device) -> str:
    """Return the property of the model that explains a failed check, by another run; empty if unknown."""
    ids = torch.tensor(prompts_of(skeleton.vocabulary)[:1], device=device)
    try:
        with torch.inference_mode(), skeleton.eager():
            whole, part = _eager(skeleton, ids), _eager(skeleton, ids[:, :_SOME])
            states = _states(skeleton.module(input_ids=ids, use_cache=True))
    except Exception:  # the caller's symptom is reported instead
        return ""
    if difference(part, whole[:_SOME]) > tolerance_of(skeleton.dtype):
        return "is not causal: a token changes the logits of those before it"
    return f"keeps {' and '.join(states)} beside keys and values" if states else ""


def _states(output: Any) -> list[str]:
    """Return the kinds of state in the model's own cache besides keys and values."""
    layers: Any = getattr(getattr(output, "past_key_values", None), "layers", ())
    kinds = {"conv_states": "convolution states", "recurrent_states": "recurrent states"}
    kinds["indexer_keys"] = "keys of an index"
    return [
        words for name, words in kinds.items() if any(_is_filled(getattr(at, name, None)) for at in layers)
    ]


def _is_filled(part: object) -> bool:
    if isinstance(part, dict):
        return any(state is not None for state in cast("dict[int, object]", part).values())
    return part is not None


def _in_chunks(
    skeleton: Skeleton, cache: KVCache, invariant: bool, choices: Items[Choices], states: StatePool | None
) -> tuple[list[Tensor], Comparison]:
    """Return the logits at the end of every chunk, with the experts in `choices`."""
    prompts, free = prompts_of(skeleton.vocabulary), iter(range(1, cache.num_blocks + 1))
    blocks = [[next(free) for _ in range(blocks_for(len(p), cache.block_tokens))] for p in prompts]
    ends = [0] * len(prompts)
    logits: list[Tensor] = []
    comparison = Comparison()
    for step in STEPS:
        pieces: list[Piece] = []
        held: list[tuple[Choices, range]] = []
        for request, count in step:
            start, ends[request] = ends[request], ends[request] + count
            tokens = prompts[request][start : start + count]
            length = len(prompts[request]) if skeleton.long_rope else 0  # the reference has no cache
            pieces.append(Piece(tokens, start, blocks[request], True, slot=request, length=length))
            held.append((choices[request], range(start, start + count)))
        batch = assemble(pieces, cache, invariant=invariant, states=states)
        with HeldChoices(held, batch.ids.shape[1], comparison):
            logits += batch.logits(skeleton.module)
        calls = batch.step.layers
        if batch.step.states is not None:
            _check_states(skeleton, cache.device, calls, batch.step.states)
        elif sorted(calls) != list(range(skeleton.num_layers)):
            raise _unsupported(skeleton, cache.device, _called(calls, skeleton.num_layers))
    return logits, comparison


def _check_states(skeleton: Skeleton, device: torch.device, calls: Items[int], states: StepStates) -> None:
    """Refuse a model unless each mixer continued its states, and attention ran at most once a layer."""
    if len(calls) > len(set(calls)):
        raise _unsupported(skeleton, device, _called(calls, skeleton.num_layers))
    if set(states.taken) != {mixer.layer for mixer in skeleton.mixers}:
        raise _unsupported(
            skeleton,
            device,
            f"continues recurrent states in {len(states.taken)} of {len(skeleton.mixers)} layers",
        )


def _kept(skeleton: Skeleton, cache: KVCache, states: StatePool | None) -> tuple[LayerShape, ...]:
    """Return what a request keeps in each layer; a layer without attention keeps no keys and values."""
    if states is None:
        return tuple(cache.layers[index] for index in range(skeleton.num_layers))
    without = LayerShape(kv_heads=0, key_dim=0, value_dim=0, dtype=skeleton.dtype)
    return tuple(
        replace(cache.layers.get(index, without), states=states.shapes(index))
        for index in range(skeleton.num_layers)
    )


def _called(layers: Items[int], expected: int) -> str:
    """Describe how the attention calls differ from one call per layer."""
    seen = len(set(layers))
    if not layers:
        return "does not call attention through transformers' interface"
    if len(layers) > seen:
        return f"calls attention {len(layers)} times in a pass through {seen} layers"
    return f"calls attention through transformers' interface in {seen} layers where it has {expected}"


def _eager(skeleton: Skeleton, ids: Tensor) -> Tensor:
    out: Any = skeleton.module(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return cast("Tensor", out.logits[0])


def _compare(
    skeleton: Skeleton,
    device: torch.device,
    mine: Items[Tensor],
    theirs: Items[Tensor],
    comparison: Comparison,
) -> None:
    tolerance = tolerance_of(skeleton.dtype)
    error = difference(torch.stack(list(mine)), torch.stack(list(theirs)))
    if not error <= tolerance:  # also if it is NaN
        symptom = (
            f"computed in chunks differs by {error:.1e} of its largest logit from its own attention, where "
            f"{tolerance:.0e} is allowed: it computes positions or masks from rows instead of position ids"
        )
        raise _unsupported(skeleton, device, symptom)
    if symptom := symptom_of_scores(comparison, skeleton.dtype):
        raise _unsupported(skeleton, device, symptom)
    if comparison.num_others:
        log.info(
            "Model type %r: %d of %d choices of experts in the check of the load were so close that rounding "
            "decides; the check held them, and scores differ by %.1e.",
            skeleton.config.model_type,
            comparison.num_others,
            comparison.num_choices,
            comparison.error,
        )


def symptom_of_scores(comparison: Comparison, dtype: torch.dtype) -> str:
    """Return how the scores of routers differ from those of the reference; empty if they agree."""
    tolerance = tolerance_of(dtype)
    if comparison.error <= tolerance:
        return ""
    return (
        f"computed in chunks chooses its experts by scores that differ by {comparison.error:.1e} of their "
        f"size from those with its own attention, where {tolerance:.0e} is allowed"
    )
