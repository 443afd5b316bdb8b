"""Which weights of a model are stored as FP8, and the step of a conversion that makes them so.

The modules decide, not names: the weight of an `nn.Linear`, and a stack of experts whose matrices lie as
`[E, N, K]`. Everything else stays as it is: norms, biases, embeddings and an output head tied to one, the
gates of mixtures of experts, which choose and so must not be off by a little, and matrices that lie as
`[K, N]` (GPT-2's `Conv1D`, GPT-OSS's experts), whose rows are not what a scale belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from hotswap.backends.torch.fp8 import SCALE_SUFFIX, SCHEMES, Scheme, encode
from hotswap.backends.torch.weights import named_tensors
from hotswap.errors import ConfigError, ShardCorrupt

__all__ = ["Quantizer", "quantizable", "scheme_named"]

_QUANTIZABLE_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


class Quantizer:
    """Makes weights into codes and scales, `<name>` and `<name>.scale`; other tensors stay as they are.

    A `Transform` of conversions. It is applied to what a tensor-parallel rank has of a tensor, so groups
    begin anew at the first weight that a rank has of a row, and no scale is shared between ranks.

    Args:
        scheme: The name of a scheme, see `SCHEMES`.
        module: The model, on any device; only its modules and the shapes and dtypes of its tensors are read.

    Raises:
        ConfigError: there is no such scheme.

    Attributes:
        scheme: How weights are grouped.
        dtype: What the weights were, and become again where they are computed with.
        names: The tensors that are quantised.
        key: What distinguishes this from other transforms of a conversion.
    """

    def __init__(self, scheme: str, module: nn.Module) -> None:
        self.scheme = scheme_named(scheme)
        tensors = dict(named_tensors(module))
        self.dtype = _main_dtype(tensors.values())
        self.names = frozenset(name for name in quantizable(module) if tensors[name].dtype is self.dtype)
        self.key = self.scheme.name

    def __call__(self, name: str, tensor: Tensor, /) -> tuple[tuple[str, Tensor], ...]:
        """Return what is stored in place of a tensor, or of rows of it.

        Raises:
            ShardCorrupt: a weight is infinite or not a number.
        """
        if name not in self.names or tensor.dtype is not self.dtype:
            return ((name, tensor),)
        codes, scales = encode(tensor, self.scheme)
        if not scales.is_meta and not bool(scales.isfinite().all()):
            raise ShardCorrupt(
                f"Tensor {name!r} has weights that are infinite or not a number, which FP8 cannot hold; "
                "fetch the checkpoint again, or convert it without quantising."
            )
        return (name, codes), (name + SCALE_SUFFIX, scales)


def scheme_named(name: str) -> Scheme:
    """Return a scheme by its name, or raise `ConfigError`."""
    if name not in SCHEMES:
        raise ConfigError(f"There is no quantisation {name!r}; choose one of {', '.join(sorted(SCHEMES))}.")
    return SCHEMES[name]


def quantizable(module: nn.Module) -> frozenset[str]:
    """Return the names of the state dict whose tensors may be stored as codes and scales.

    A tensor with several names is among them only if each name is that of such a weight: an output head that
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
    """The parameters of a module that multiply as `[..., N, K]`: each row by the input, giving one output."""
    if type(holder) is nn.Linear:  # what is derived from it may be a router
        yield "weight"
    elif getattr(holder, "is_transposed", None) is False:  # transformers' mark of a stack of experts
        yield from (name for name, parameter in holder.named_parameters(recurse=False) if parameter.ndim == 3)


def _gates(module: nn.Module) -> Iterator[nn.Module]:
    """Linear layers that choose or weigh experts: beside a stack of E of them, and with at most E outputs."""
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
    """The dtype of most bytes, among those that can be quantised."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.dtype in _QUANTIZABLE_DTYPES:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
