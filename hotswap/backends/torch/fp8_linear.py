"""Linear layers that compute with FP8 weights as stored, which take half the bytes of bf16.

The manifest chooses them: every `nn.Linear` whose weight is stored with scales. Other quantized tensors, such
as stacked expert weights, are dequantized at load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from hotswap.backends.torch.fp8 import SCALE_SUFFIX, Scheme
from hotswap.backends.torch.linear import invariant_linear, supported_dtypes, widened
from hotswap.backends.torch.weights import Views
from hotswap.errors import ConfigError, ShardCorrupt
from hotswap.kernels.fp8_gemm import FUSED_DTYPES, Fp8Product, Fp8Weight, Workspace, fp8_linear, warm_up
from hotswap.kernels.targets import device_of, runs_triton
from hotswap.model import TensorSpec

__all__ = [
    "Fp8Linear",
    "QuantizedWeights",
    "attach",
    "detach",
    "keeps_fp8_by_default",
    "linear_weights",
    "prepare",
]

_WEIGHT: Final = ".weight"


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """The weights of a model that stay quantized, and their format.

    Attributes:
        names: The names of the weights in the modules.
        scheme: The quantization scheme.
        original_dtype: The dtype of the weights before they were quantized.
        dtype: The dtype that the model computes in.
    """

    names: frozenset[str]
    scheme: Scheme
    original_dtype: torch.dtype
    dtype: torch.dtype


class Fp8Linear:
    """Replaces the `forward` of a linear layer and computes it from FP8 values; hooks of the layer still run.

    On a CPU it dequantizes some rows of the weight at a time and multiplies them as an ordinary linear layer
    does. The results have the bits of the fully dequantized weight, for any batch and block size.

    Args:
        layer: The layer; its weight is a placeholder without values.
        weight: The FP8 weight.
        space: Scratch memory, shared by the layers of one model.
    """

    def __init__(self, layer: nn.Linear, weight: Fp8Weight, space: Workspace) -> None:
        self.layer, self.weight = layer, weight
        self._bias = cast("Tensor | None", layer.bias)
        self._space, self._product = space, Fp8Product(weight, self._bias, space)
        self._is_on_cpu = weight.qweight.device.type == "cpu"
        self._former: object = vars(layer).get("forward")
        vars(layer)["forward"] = self

    @property
    def is_invariant(self) -> bool:
        """Whether the bits of a row do not depend on the number of rows."""
        return self._is_on_cpu and self.layer.weight.dtype in supported_dtypes()

    @property
    def _is_wide(self) -> bool:
        return widened() and self.layer.weight.dtype is torch.bfloat16

    def remove(self) -> None:
        """Restore the `forward` that the layer had."""
        if self._former is None:
            vars(self.layer).pop("forward", None)
        else:
            vars(self.layer)["forward"] = self._former

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return `hidden @ weight.T + bias` for `[..., in]`."""
        if not self._is_on_cpu:
            return self._product(hidden)
        if self._is_wide:
            wide = None if self._bias is None else self._bias.float()
            return self._multiply(hidden.float(), wide).to(hidden.dtype)
        return self._multiply(hidden, self._bias)

    def _multiply(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        method = invariant_linear if hidden.dtype in supported_dtypes() else None
        return fp8_linear(hidden, self.weight, bias, workspace=self._space, multiply=method)


def keeps_fp8_by_default(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights stay quantized by default: on GPUs with a kernel for products with FP8 weights."""
    if dtype not in FUSED_DTYPES:
        return False
    target = device_of(device).target
    return device.type == "cuda" and runs_triton(device) and target is not None and bool(target.mma)


def linear_weights(module: nn.Module) -> frozenset[str]:
    """Return the names of the weights of all `nn.Linear` layers; tied layers with all their names."""
    named = cast("Iterator[tuple[str, nn.Module]]", module.named_modules(remove_duplicate=False))
    return frozenset(f"{name}{_WEIGHT}" for name, layer in named if type(layer) is nn.Linear)


def attach(
    module: nn.Module, quantized: QuantizedWeights, specs: Mapping[str, TensorSpec], views: Views
) -> tuple[Fp8Linear, ...]:
    """Replace the linear layers named by `quantized` with `Fp8Linear`s, and return these.

    Args:
        module: The model.
        quantized: The weights that stay quantized.
        specs: The tensors of the flat buffer, by name.
        views: The flat buffer.

    Raises:
        ShardCorrupt: FP8 values or scales do not have the shape of the architecture's weight.
    """
    made: list[Fp8Linear] = []
    space: Workspace | None = None
    try:
        for name in sorted(quantized.names):
            layer = module.get_submodule(name.removesuffix(_WEIGHT))
            assert isinstance(layer, nn.Linear), "`linear_weights` names no others"
            if not isinstance(vars(layer).get("forward"), Fp8Linear):  # a tied layer has several names
                weight = _weight_of(name, layer, quantized, specs, views)
                space = space or Workspace(weight.qweight.device)
                made.append(Fp8Linear(layer, weight, space))
    except BaseException:
        detach(made)
        raise
    return tuple(made)


def _weight_of(
    name: str, layer: nn.Linear, quantized: QuantizedWeights, specs: Mapping[str, TensorSpec], views: Views
) -> Fp8Weight:
    values, scales = views.at(specs[name]), views.at(specs[name + SCALE_SUFFIX])
    shape = (layer.out_features, layer.in_features)
    try:
        weight = Fp8Weight(values, scales, shape[1], quantized.scheme.group, quantized.original_dtype)
    except ConfigError:
        weight = None
    if weight is None or weight.shape != shape:
        raise ShardCorrupt(
            f"Tensor {name!r} has FP8 values {list(values.shape)} and scales {list(scales.shape)}, the "
            f"architecture needs {list(shape)}; convert the model again."
        )
    return weight


def detach(layers: Iterable[Fp8Linear]) -> None:
    """Restore the layers' own `forward` and drop references to FP8 values."""
    for layer in layers:
        layer.remove()


def prepare(layers: Iterable[Fp8Linear], dtype: torch.dtype) -> None:
    """Compile the kernels that the layers need, so that no request waits for a compiler. Blocking."""
    given: list[Any] = [(layer.weight, cast("Tensor | None", layer.layer.bias)) for layer in layers]
    if given:
        warm_up(given, dtype, Workspace(given[0][0].qweight.device))
