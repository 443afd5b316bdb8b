"""Tensor parallelism by transformers' own plan, on plain tensors.

transformers has a plan per architecture: a parallel style for each kind of layer. Conversion shards the
weights by it (`hotswap.backends.stores.slicing`). This module adds each style's communication to the layers'
`forward`. So a rank computes its shard with unmodified modules, and head counts follow from the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from hotswap.backends.stores.slicing import generic_name
from hotswap.backends.torch.parallel.collectives import Group
from hotswap.errors import UnsupportedModel

__all__ = ["check_plan", "install"]

_Forward: TypeAlias = Callable[..., Any]

# Styles without communication in inference.
_NOTHING = frozenset(
    {
        "colwise",
        "local_params",
        "mla_kv_a_proj",
        "packed_colwise",
        "replicate",
        "replicated_with_grad_allreduce",
    }
)
_GATHERED = frozenset({"colwise_gather_output", "colwise_rep"})
_SUMMED = frozenset({"all_reduce", "moe_tp_experts"})
_ROWWISE = frozenset({"rowwise", "rowwise_rep", "rowwise_split_input"})
_EMBEDDING = frozenset({"embedding_rowwise", "embedding_colwise"})


def check_plan(module: Any) -> None:
    """Raise `UnsupportedModel` if a model's plan contains an unsupported style."""
    for name, style in _styles(module).items():
        if style not in _NOTHING | _GATHERED | _SUMMED | _ROWWISE | _EMBEDDING:
            raise UnsupportedModel(
                f"The tensor-parallel plan of {type(module).__name__} has style {style!r} for {name!r}, "
                "which this engine does not support; serve the model with tp=1."
            )


def install(module: Any, group: Group, whole: Mapping[str, tuple[int, ...]]) -> None:
    """Wrap the layers of a model with the communication of their styles; call it once per model.

    The output head keeps its slice of the vocabulary: each rank writes its slice of the logits to the shared
    memory.

    Args:
        module: The model, with the shapes of one rank.
        group: The ranks of the stage.
        whole: The full shapes of the tensors.
    """
    head = module.get_output_embeddings()
    for name, style in _styles(module).items():
        layer = module.get_submodule(name)
        if layer is not head:
            layer.forward = _around(layer, style, group, whole.get(f"{name}.weight", ()))


def _styles(module: Any) -> dict[str, str]:
    plan: dict[str, str] = dict(getattr(module, "tp_plan", None) or {})
    return {name: plan[key] for name, _ in module.named_modules() if (key := generic_name(name)) in plan}


def _around(layer: nn.Module, style: str, group: Group, whole: tuple[int, ...]) -> _Forward:
    forward: _Forward = layer.forward
    if style in _SUMMED:
        return lambda *args, **kwargs: group.sum(forward(*args, **kwargs))
    if style in _ROWWISE:
        return _rowwise(layer, group, splits=style == "rowwise_split_input")
    if style in _GATHERED:
        return lambda *args, **kwargs: group.gather(forward(*args, **kwargs), whole[0])
    if style == "embedding_rowwise":
        return _vocabulary(forward, group, whole[0])
    if style == "embedding_colwise":
        return lambda *args, **kwargs: group.gather(forward(*args, **kwargs), whole[1])
    return forward


def _rowwise(layer: nn.Module, group: Group, *, splits: bool) -> _Forward:
    forward: _Forward = layer.forward

    def summed(hidden: Tensor) -> Tensor:
        # The bias is added once, after the sum.
        parameters: dict[str, Any] = layer._parameters  # pyright: ignore[reportPrivateUsage]
        bias = parameters.get("bias")
        if bias is None:
            return group.sum(forward(group.slice_of(hidden) if splits else hidden))
        parameters["bias"] = None
        try:
            out = forward(group.slice_of(hidden) if splits else hidden)
        finally:
            parameters["bias"] = bias
        total: Tensor = group.sum(out) + bias
        return total

    return summed


def _vocabulary(forward: _Forward, group: Group, size: int) -> _Forward:
    """Return an embedding with a sharded vocabulary: each rank looks up its tokens, and rows are summed."""
    width = -(-size // group.size)
    start = group.part * width
    num_mine = max(0, min(width, size - start))

    def embed(ids: Tensor) -> Tensor:
        local = ids - start
        foreign = (local < 0) | (local >= num_mine)
        rows: Tensor = forward(local.masked_fill(foreign, 0))
        return group.sum(rows.masked_fill(foreign[..., None], 0))

    return embed
