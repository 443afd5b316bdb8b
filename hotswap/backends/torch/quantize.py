"""Quantizes a model's weights to FP8 during conversion, and chooses which ones.

Modules decide, not names: the weights of `nn.Linear` and stacked expert weights `[E, N, K]` are quantized.
Everything else is stored unchanged: norms, biases, embeddings and output heads tied to them, the gates of
mixtures of experts, whose choices are sensitive to small errors, and transposed matrices `[K, N]` (GPT-2's
`Conv1D`, GPT-OSS's experts), whose rows are not output channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from hotswap.backends.torch.fp8 import SCALE_SUFFIX, SCHEMES, Scheme, quantize
from hotswap.backends.torch.weights import named_tensors
from hotswap.errors import ConfigError, ShardCorrupt

__all__ = ["Quantizer", "quantizable", "scheme_named"]

_QUANTIZABLE_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


class Quantizer:
    """Quantizes weights to FP8 values and scales, `<name>` and `<name>.scale`; passes other tensors through.

    A `Transform` of conversions. It is applied to each tensor-parallel rank's shard of a tensor, so groups
    start at the first weight of a shard's row, and ranks share no scale.

    Args:
        scheme: The name of a scheme, see `SCHEMES`.
        module: The model, on any device; only its modules and the shapes and dtypes of its tensors are read.

    Raises:
        ConfigError: there is no such scheme.

    Attributes:
        scheme: The quantization scheme.
        dtype: The dtype of the weights before, to which they are dequantized.
        names: The names of the quantized tensors.
        key: The identifier of this transform among those of conversions.
    """

    def __init__(self, scheme: str, module: nn.Module) -> None:
        self.scheme = scheme_named(scheme)
        tensors = dict(named_tensors(module))
        self.dtype = _main_dtype(tensors.values())
        self.names = frozenset(name for name in quantizable(module) if tensors[name].dtype is self.dtype)
        self.key = self.scheme.name

    def __call__(self, name: str, tensor: Tensor, /) -> tuple[tuple[str, Tensor], ...]:
        """Return the tensors that are stored for a tensor, or for some of its rows.

        Raises:
            ShardCorrupt: a weight is infinite or NaN.
        """
        if name not in self.names or tensor.dtype is not self.dtype:
            return ((name, tensor),)
        values, scales = quantize(tensor, self.scheme)
        if not scales.is_meta and not bool(scales.isfinite().all()):
            raise ShardCorrupt(
                f"Tensor {name!r} has weights that are infinite or NaN, which FP8 cannot represent; "
                "fetch the checkpoint again, or convert it without quantization."
            )
        return (name, values), (name + SCALE_SUFFIX, scales)


def scheme_named(name: str) -> Scheme:
    """Return a scheme by its name, or raise `ConfigError`."""
    if name not in SCHEMES:
        raise ConfigError(
            f"There is no quantization scheme {name!r}; choose one of {', '.join(sorted(SCHEMES))}."
        )
    return SCHEMES[name]


def quantizable(module: nn.Module) -> frozenset[str]:
    """Return the names of the state dict's tensors that may be quantized.

    A tied tensor is quantized only if each of its names belongs to a quantizable weight: an output head that
    is tied to the embeddings is not.
    """
    gates = {id(gate) for gate in _gates(module)}
    named = cast("Iterator[tuple[str, nn.Module]]", module.named_modules(remove_duplicate=False))
    chosen = {
        f"{prefix}.{key}".removeprefix(".")
        for prefix, holder in named
        if id(holder) not in gates
        for key in _matrices(holder)
    }
    tensors = named_tensors(module)
    kept = {id(tensor) for name, tensor in tensors if name not in chosen}
    return frozenset(name for name, tensor in tensors if name in chosen and id(tensor) not in kept)


def _matrices(holder: nn.Module) -> Iterator[str]:
    """Yield the parameters of a module that are weights `[..., N, K]`, one output channel per row."""
    if type(holder) is nn.Linear:  # a subclass may be a router
        yield "weight"
    elif getattr(holder, "is_transposed", None) is False:  # transformers' mark of a stack of experts
        yield from (name for name, parameter in holder.named_parameters(recurse=False) if parameter.ndim == 3)


def _gates(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the gates of experts: linear layers beside a stack of E experts, with at most E outputs."""
    for holder in module.modules():
        num_experts = max((_num_experts(child) for child in holder.children()), default=0)
        for layer in holder.modules() if num_experts else ():
            if isinstance(layer, nn.Linear) and layer.out_features <= num_experts:
                yield layer


def _num_experts(module: nn.Module) -> int:
    if isinstance(module, nn.Conv1d):  # whose weights have three dimensions too
        return 0
    return max((len(p) for p in module.parameters(recurse=False) if p.ndim == 3), default=0)


def _main_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype of most bytes, among the quantizable dtypes."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.dtype in _QUANTIZABLE_DTYPES:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
