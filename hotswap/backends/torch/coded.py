"""Linear layers whose weights stay codes and scales where they are computed with: half the bytes.

They are chosen by the manifest: a linear layer of the modules whose weight has scales beside it. What else is
quantised, such as stacks of experts, is made whole when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotswap.backends.torch.fp8 import SCALE_SUFFIX, Scheme
from hotswap.backends.torch.linear import kernels, product, widened
from hotswap.backends.torch.weights import Views
from hotswap.errors import ConfigError, ShardCorrupt
from hotswap.kernels.fp8_gemm import FUSED_DTYPES, Fp8Weight, Workspace, fp8_linear, warm_up
from hotswap.kernels.targets import device_of, runs_triton
from hotswap.model import TensorSpec

__all__ = ["Coding", "Fp8Linear", "attach", "detach", "keeps_by_default", "linear_weights", "prepare"]

_WEIGHT: Final = ".weight"


@dataclass(frozen=True, slots=True)
class Coding:
    """Which weights of a model are kept as codes, and what they stand for.

    Attributes:
        names: Of the weights, as modules call them.
        scheme: How they are grouped.
        before: The dtype that they had.
        dtype: The dtype that the model computes in.
    """

    names: frozenset[str]
    scheme: Scheme
    before: torch.dtype
    dtype: torch.dtype


class Fp8Linear:
    """What computes a linear layer from codes, in place of its `forward`; hooks of the layer run as ever.

    On a CPU some rows of the weight are made whole at a time and multiplied as a linear layer's is, so bits
    depend neither on the batch nor on the block, and are those of the whole weight.

    Args:
        layer: The layer; its weight is a placeholder without values.
        weight: What it stands for.
        space: Shared by the layers of one model.
    """

    def __init__(self, layer: nn.Linear, weight: Fp8Weight, space: Workspace) -> None:
        self.layer, self.weight = layer, weight
        self._space = space
        self._former: object = vars(layer).get("forward")
        vars(layer)["forward"] = self

    @property
    def is_invariant(self) -> bool:
        """Whether a row's bits do not depend on how many others there are."""
        return self.weight.qweight.device.type == "cpu" and self.layer.weight.dtype in kernels()

    @property
    def _is_wide(self) -> bool:
        return widened() and self.layer.weight.dtype is torch.bfloat16

    def remove(self) -> None:
        """Leave the layer as it was."""
        if self._former is None:
            vars(self.layer).pop("forward", None)
        else:
            vars(self.layer)["forward"] = self._former

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return `hidden @ weight.T + bias` for `[..., in]`."""
        bias = cast("Tensor | None", self.layer.bias)
        if hidden.device.type == "cpu" and self._is_wide:
            wide = None if bias is None else bias.float()
            return self._multiply(hidden.float(), wide).to(hidden.dtype)
        return self._multiply(hidden, bias)

    def _multiply(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        ours = hidden.device.type == "cpu" and hidden.dtype in kernels()
        return fp8_linear(
            hidden, self.weight, bias, workspace=self._space, multiply=product if ours else F.linear
        )


def keeps_by_default(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether codes are kept if nobody said: where a kernel decodes them inside products in `dtype`."""
    if dtype not in FUSED_DTYPES:
        return False
    target = device_of(device).target
    return device.type == "cuda" and runs_triton(device) and target is not None and bool(target.mma)


def linear_weights(module: nn.Module) -> frozenset[str]:
    """Return the names of the weights of linear layers, all names where a module has several."""
    named = cast("Iterator[tuple[str, nn.Module]]", module.named_modules(remove_duplicate=False))
    return frozenset(f"{name}{_WEIGHT}" for name, layer in named if type(layer) is nn.Linear)


def attach(
    module: nn.Module, coding: Coding, specs: Mapping[str, TensorSpec], views: Views
) -> tuple[Fp8Linear, ...]:
    """Have the linear layers that `coding` names computed from their codes, and return what computes them.

    Raises:
        ShardCorrupt: codes or scales are not of the shape that the architecture has.
    """
    made: list[Fp8Linear] = []
    space: Workspace | None = None
    try:
        for name in sorted(coding.names):
            layer = module.get_submodule(name.removesuffix(_WEIGHT))
            assert isinstance(layer, nn.Linear), "only these were named"
            if not isinstance(vars(layer).get("forward"), Fp8Linear):  # else it has another name too
                weight = _weight_of(name, layer, coding, specs, views)
                space = space or Workspace(weight.qweight.device)
                made.append(Fp8Linear(layer, weight, space))
    except BaseException:
        detach(made)
        raise
    return tuple(made)


def _weight_of(
    name: str, layer: nn.Linear, coding: Coding, specs: Mapping[str, TensorSpec], views: Views
) -> Fp8Weight:
    codes, scales = views.at(specs[name]), views.at(specs[name + SCALE_SUFFIX])
    shape = (layer.out_features, layer.in_features)
    try:
        weight = Fp8Weight(codes, scales, shape[1], coding.scheme.group, coding.before)
    except ConfigError:
        weight = None
    if weight is None or weight.shape != shape:
        raise ShardCorrupt(
            f"Tensor {name!r} has codes {list(codes.shape)} and scales {list(scales.shape)}, the "
            f"architecture wants {list(shape)}; convert the model again."
        )
    return weight


def detach(layers: Iterable[Fp8Linear]) -> None:
    """Let go of codes: layers are computed as they were before."""
    for layer in layers:
        layer.remove()


def prepare(layers: Iterable[Fp8Linear], dtype: torch.dtype) -> None:
    """Build the kernels that layers will need, so that no request waits for a compiler. Blocking."""
    given: list[Any] = [(layer.weight, cast("Tensor | None", layer.layer.bias)) for layer in layers]
    if given:
        warm_up(given, dtype, Workspace(given[0][0].qweight.device))
