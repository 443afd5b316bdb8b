"""Slicing tensors for tensor parallelism: the part of each tensor that a rank has.

The model's own plan in transformers decides: it has a style for the parameters of each kind of layer. The
parts equal those of transformers' own sharding, so an engine that runs rank r of n with its local shapes can
use them as they are. A tensor that the plan does not cut is replicated on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from hotswap.errors import UnsupportedModel

__all__ = ["Cut", "Shape", "cuts", "generic_name"]

Shape: TypeAlias = tuple[int, ...]

# Styles that replicate the parameter: they are about activations or gradients.
_REPLICATED: Final = frozenset(
    {"all_reduce", "local_params", "mla_kv_a_proj", "moe_identity_expert", "moe_tp_experts", "replicate"}
    | {"replicated_with_grad_allreduce", "sequence_parallel"}
)
_COLWISE: Final = frozenset({"colwise", "colwise_gather_output", "colwise_rep"})
_ROWWISE: Final = frozenset({"rowwise", "rowwise_rep", "rowwise_split_input"})

# Projections whose output is split into whole heads.
_HEADS: Final = frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value"})


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor is cut: along `dim`, in each of `groups` equal groups packed one after the other.

    A size that the number of ranks does not divide is cut as `torch.chunk` does: chunks are rounded up, and
    the last ranks have less, or nothing.
    """

    dim: int
    groups: int = 1

    def ranges(self, size: int, rank: int, world_size: int) -> Iterator[tuple[int, int]]:
        """The ranges of indices along `dim`, of `size` in all, that a rank has; none is empty."""
        width = -(-size // self.groups)
        for first in range(0, size, max(width, 1)):
            last = min(first + width, size)
            chunk = -(-(last - first) // world_size)
            start, stop = first + rank * chunk, min(first + (rank + 1) * chunk, last)
            if start < stop:
                yield start, stop

    def shape(self, whole: Shape, rank: int, world_size: int) -> Shape:
        """The shape of a rank's part of a tensor."""
        size = sum(stop - start for start, stop in self.ranges(whole[self.dim], rank, world_size))
        return (*whole[: self.dim], size, *whole[self.dim + 1 :])

    def part(self, rows: Tensor, start: int, whole: Shape, rank: int, world_size: int) -> Tensor:
        """A rank's part of rows `start` and following of a tensor of shape `whole`, in the tensor's order."""
        first = start if self.dim == 0 else 0
        held = rows.shape[self.dim]
        pieces = [
            rows.narrow(self.dim, max(a - first, 0), min(b - first, held) - max(a - first, 0))
            for a, b in self.ranges(whole[self.dim], rank, world_size)
            if a < first + held and b > first
        ]
        if not pieces:
            return rows.narrow(self.dim, 0, 0)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)


def cuts(module: Any, shapes: Mapping[str, Shape], world_size: int) -> dict[str, Cut]:
    """Return the cut of every tensor that the plan of `module` cuts; all others are replicated.

    `shapes` are those of the state dict's entries.

    Raises:
        UnsupportedModel: the model has no plan, one that cuts no layer, or one with an unknown style; or its
            heads cannot be divided evenly.
    """
    if world_size == 1:
        return {}
    plan: dict[str, str] = dict(getattr(module, "tp_plan", None) or {})
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    found = {
        name: cut
        for name, shape in shapes.items()
        if name in parameters and (cut := _cut(name, len(shape), _style(name, plan))) is not None
    }
    outer = _parameters_of(module, (module.get_input_embeddings(), module.get_output_embeddings()))
    if found.keys() <= outer:
        raise UnsupportedModel(
            f"{type(module).__name__} has no tensor-parallel plan for its layers, so that {world_size} ranks "
            "would each hold nearly all of it; convert it for one rank."
        )
    _check_heads(module.config.get_text_config(), plan, found, world_size)
    return found


def generic_name(name: str) -> str:
    """Return a name as plans write it: with `*` for the number of a layer."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _style(name: str, plan: Mapping[str, str]) -> str | None:
    """The style of a parameter: its own, or its module's."""
    generic = generic_name(name)
    return plan.get(generic) or plan.get(generic.rpartition(".")[0])


def _cut(name: str, ndim: int, style: str | None) -> Cut | None:
    if style is None or style in _REPLICATED or not ndim:
        return None
    is_bias = name.endswith(".bias")
    if style in _COLWISE:
        return Cut(max(ndim - 2, 0))
    if style in _ROWWISE:
        return None if is_bias else Cut(ndim - 1)
    if style == "packed_colwise":
        return Cut(0) if ndim == 1 else Cut(ndim - 2, groups=2)
    if style == "packed_rowwise":
        return None if ndim == 1 else Cut(ndim - 1, groups=2)
    if style in {"embedding_rowwise", "embedding_colwise"}:
        return Cut(0 if style == "embedding_rowwise" else 1)
    raise UnsupportedModel(
        f"The tensor-parallel plan cuts {name!r} in the unknown style {style!r}; convert it for one rank."
    )


def _parameters_of(module: Any, layers: Iterable[Any]) -> set[str]:
    ids = {id(parameter) for layer in layers if layer is not None for parameter in layer.parameters()}
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if id(parameter) in ids}


def _check_heads(config: Any, plan: Mapping[str, str], found: Iterable[str], world_size: int) -> None:
    """Refuse cuts through a head: a rank's attention works on whole heads.

    Key and value heads are not repeated where there are fewer than ranks, as in transformers.
    """
    cut_heads = any(
        name.rsplit(".", 2)[-2] in _HEADS and _style(name, plan) == "colwise" for name in found if "." in name
    )
    if not cut_heads:
        return
    for kind in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, kind, None)
        if isinstance(heads, int) and heads % world_size:
            raise UnsupportedModel(
                f"The model has {heads} heads ({kind!r}), which cannot be divided among {world_size} ranks; "
                f"convert it for a number of ranks that divides {heads}."
            )
