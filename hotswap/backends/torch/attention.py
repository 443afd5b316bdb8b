"""Attention over paged keys and values, called by every layer of an unmodified transformers model.

A step is one row of tokens `[1, T]`; the tokens of a request are contiguous. Layers call `paged_attention`
through transformers' attention interface. A context variable holds the current step, so that several
engines can run steps on their own threads.

On a CPU a kernel of hotswap reads the KV blocks in place. The bits of a row depend neither on the rest of the
batch nor on how its prompt was cut into chunks (`hotswap.kernels.paged_attention`). On GPUs with Triton
kernels read them in place too, after a trial (`device_attention`). Otherwise the blocks of a segment are
gathered, and PyTorch multiplies them (`gathered`).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from hotswap.backends.torch.adapters.plan import Adaptation
from hotswap.backends.torch.device_attention import DeviceRows, LayerKind, attend_on_device, is_right
from hotswap.backends.torch.gathered import Gathering, Heads
from hotswap.backends.torch.kv import KVCache
from hotswap.backends.torch.mask_pattern import MaskFunction, MaskPattern, Paged
from hotswap.backends.torch.recurrent.states import StepStates
from hotswap.errors import UnsupportedModel
from hotswap.kernels.paged_attention import DTYPES, attend

__all__ = [
    "IMPLEMENTATION",
    "MaskFunction",
    "MaskPattern",
    "Paged",
    "Step",
    "current",
    "register",
    "running",
]

IMPLEMENTATION = "hotswap_paged"

# Arguments that models pass and that have no effect here.
_IGNORED_ARGUMENTS = frozenset(
    {
        "cache_position",
        "dropout",
        "is_causal",
        "layer_idx",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "sliding_window",
        "use_cache",
    }
)


@dataclass(slots=True, eq=False)
class Step:
    """The metadata of one forward pass that its attention, recurrent and adapter layers read.

    Attributes:
        cache: The KV cache, to which keys and values are appended.
        blocks: `[T]`, the block to which each row's key and value are written; 0 for padding.
        offsets: `[T]`, the slot within that block.
        paged: On a CPU, the rows that attend; the other rows are padding.
        on_device: On GPUs with kernels, the same.
        gathering: On all devices but CPUs, the same for layers without a kernel.
        adapters: The plan of the rows that have adapters; `None` if there are none.
        positions: `[T]`, the position of each row in its request.
        states: The recurrent states of the requests; `None` for models without any.
        lengths: `[T]`, by which RoPE factors are chosen; `None` where these depend on no length.
        layers: The layers that have called attention, in order.
    """

    cache: KVCache
    blocks: Tensor
    offsets: Tensor
    paged: Paged | None = None
    on_device: DeviceRows | None = None
    gathering: Gathering | None = None
    adapters: Adaptation | None = None
    positions: Tensor | None = None
    states: StepStates | None = None
    lengths: Tensor | None = None
    layers: list[int] = field(default_factory=list[int])


_STEP: ContextVar[Step | None] = ContextVar("hotswap_step", default=None)


@contextmanager
def running(step: Step) -> Generator[None]:
    """Make `step` the current step of this thread within the block."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def current() -> Step | None:
    """Return the current step of this thread; `None` outside of steps, as in a model's own eager pass."""
    return _STEP.get()


def register() -> None:
    """Register the implementation with transformers. Idempotent."""
    attention: Any = AttentionInterface  # untyped in transformers
    masks: Any = AttentionMaskInterface
    attention.register(IMPLEMENTATION, paged_attention)
    masks.register(IMPLEMENTATION, _mask_pattern)


def _mask_pattern(*, mask_function: MaskFunction, **_: object) -> MaskPattern:
    return MaskPattern(mask_function)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskPattern | Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Append the step's keys and values to the cache, and attend to all cached tokens of each request.

    Args:
        module: The layer, identified by its `layer_idx`.
        query: `[1, heads, T, key_dim]`.
        key: `[1, kv_heads, T, key_dim]`.
        value: `[1, kv_heads, T, value_dim]`.
        attention_mask: The pattern that transformers' mask builder returned.
        scaling: The factor of the scores; `key_dim ** -0.5` if `None`.
        softcap: Scores are `softcap * tanh(scores / softcap)`; `None` leaves them as they are.
        s_aux: `[heads]`, the logit of an attention sink; `None` without sinks.
        others: Arguments without effect here; any other argument that is not `None` is refused.

    Returns:
        `[1, T, heads, value_dim]`, zero in padding rows, and `None` in place of attention weights.

    Raises:
        UnsupportedModel: the layer builds its own mask or passes an argument that is not supported.
    """
    step = _STEP.get()
    if step is None:
        raise RuntimeError(f"{IMPLEMENTATION!r} attention is for engine steps only.")
    if not isinstance(attention_mask, MaskPattern):
        raise UnsupportedModel(
            f"{type(module).__name__} builds its attention mask itself, which is not possible when "
            "requests share a row; serve the model with another engine."
        )
    if unknown := {name for name, given in others.items() if given is not None} - _IGNORED_ARGUMENTS:
        raise UnsupportedModel(
            f"{type(module).__name__} passes {sorted(unknown)} to attention, which would be ignored; "
            "serve the model with another engine."
        )
    if not key.shape[2] == value.shape[2] == len(step.blocks):
        raise UnsupportedModel(
            f"{type(module).__name__} gives attention {key.shape[2]} keys for a row of {len(step.blocks)} "
            "tokens, of which the engine keeps one each; serve the model with another engine."
        )
    layer = int(getattr(module, "layer_idx"))  # noqa: B009 - nn.Module has types for tensors and modules only
    step.layers.append(layer)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads = Heads(query.shape[1], key.shape[1], scale, softcap, s_aux)
    by_kernel = step.on_device is not None and is_right(_kind(step.cache, heads, key, value))
    step.cache.write(layer, key, value, step.blocks, step.offsets, by_kernel=by_kernel)
    if step.paged is None:
        if step.on_device is not None and by_kernel:
            return attend_on_device(step.cache, layer, step.on_device, heads, query, attention_mask), None
        assert step.gathering is not None, "a step reads the KV cache in one of three ways"
        return step.gathering.attend(layer, heads, query, attention_mask.hidden), None
    if key.dtype not in DTYPES:
        raise UnsupportedModel(
            f"{type(module).__name__} computes in {key.dtype} on a CPU; give float32 weights."
        )
    keys, values = step.cache.pools(layer)
    seen = attention_mask.seen(step.paged)
    out = attend(
        query[0].transpose(0, 1),
        keys,
        values,
        step.paged.rows,
        seen,
        scale=scale,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.to(query.dtype).unsqueeze(0), None


def _kind(kv: KVCache, heads: Heads, key: Tensor, value: Tensor) -> LayerKind:
    return LayerKind(
        device=kv.device,
        dtype=key.dtype,
        block_tokens=kv.block_tokens,
        num_heads=heads.num_heads,
        kv_heads=heads.kv_heads,
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        softcap=heads.softcap,
        has_sinks=heads.sinks is not None,
    )
