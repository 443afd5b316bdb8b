"""Tensor parallelism by the model's own plan, on plain tensors.

transformers keeps for each architecture a plan: a style for each kind of layer. Conversion cuts the weights
by it (`hotswap.backends.stores.slicing`); here the layers get what each style needs around them. A rank so
holds and computes its part with unmodified modules, and head counts follow from the tensors.
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

# Styles that need nothing around a layer where no gradients are wanted.
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
    """Raise `UnsupportedModel` if the plan of a model has layers of a style that is not known here."""
    for name, style in _styles(module).items():
        if style not in _NOTHING | _GATHERED | _SUMMED | _ROWWISE | _EMBEDDING:
            raise UnsupportedModel(
                f"The tensor-parallel plan of {type(module).__name__} runs {name!r} in the way {style!r}, "
                "which this engine does not know; serve the model with tp=1."
            )


def install(module: Any, group: Group, whole: Mapping[str, tuple[int, ...]]) -> None:
    """Put what their styles need around the layers of a model; once for each module.

    The output head keeps its slice of the vocabulary: logits are put together where they are wanted.

    Args:
        module: The model, with the shapes of one rank.
        group: The ranks that have its other parts.
        whole: The shapes of the tensors before they were cut.
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
    """Each rank looks up the tokens that it has; the others' rows are zero."""
    width = -(-size // group.size)
    start = group.part * width
    num_mine = max(0, min(width, size - start))

    def embed(ids: Tensor) -> Tensor:
        local = ids - start
        foreign = (local < 0) | (local >= num_mine)
        rows: Tensor = forward(local.masked_fill(foreign, 0))
        return group.sum(rows.masked_fill(foreign[..., None], 0))

    return embed
