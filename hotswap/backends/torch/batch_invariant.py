"""Batch-invariant versions of the matrix products that models compute outside linear layers.

Routers, mixtures of experts and some output heads multiply by weights through PyTorch's functions. The CPU
libraries behind these round a row differently for different numbers of rows: fp32 rows of a thousand numbers,
for example, up to a hundred rows and more with two threads. The kernels of linear layers do not (see
`linear`), so during a step these functions use them. Batched products, those of attention, are left alone.

PyTorch computes functions such as a sigmoid for vectors of numbers, and for those left over one by one, with
other bits. Which are left over depends on the number of rows, so these functions get a multiple of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hotswap.backends.torch.linear import MIN_ROWS, invariant_linear, supported_dtypes

__all__ = ["BatchInvariantMode"]


class BatchInvariantMode(TorchFunctionMode):
    """Makes products with matrices and some functions of numbers on this thread batch-invariant.

    Has an effect while it is entered.

    Products of other dtypes and devices, which have no such kernel, are computed as usual.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        ours = _OURS.get(func)
        out = None if ours is None else ours(*args, **given)
        return func(*args, **given) if out is None else out


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Return `hidden @ weight.T + bias`; `None` if no batch-invariant kernel applies."""
    if weight.ndim != 2 or not _multiplies(hidden, weight, bias) or hidden.shape[-1] != weight.shape[1]:
        return None
    rows = hidden.reshape(-1, hidden.shape[-1])
    num_rows = len(rows)
    if num_rows < MIN_ROWS:
        rows = functional.pad(rows, (0, 0, 0, MIN_ROWS - num_rows))
    out = invariant_linear(rows.contiguous(), weight, bias)[:num_rows]
    return out.view(*hidden.shape[:-1], len(weight))


def _multiplies(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    dtypes = {tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None}
    return (
        len(dtypes) == 1
        and dtypes <= supported_dtypes()
        and hidden.device.type == weight.device.type == "cpu"
        and min(hidden.numel(), weight.numel()) > 0
        and (bias is None or bias.ndim == 1)
    )


def _matmul(left: Tensor, right: Tensor, **others: Any) -> Tensor | None:
    if others or left.ndim < 2:
        return None
    if left.ndim == 2 and right.ndim == 3 and len(right) == 1:  # a weight times columns
        out = _linear(right.transpose(1, 2), left)
        return None if out is None else out.transpose(1, 2)
    return _linear(left, right.t()) if right.ndim == 2 else None


def _addmm(bias: Tensor, left: Tensor, right: Tensor, **others: Any) -> Tensor | None:
    return None if others else _linear(left, right.t(), bias)


def _grouped_mm(left: Tensor, right: Tensor, *, offs: Tensor | None = None, **others: Any) -> Tensor | None:
    """Multiply rows `[S, in]`: the first `offs[0]` by `right[0]`, those up to `offs[1]` by `right[1]`, ..."""
    if (
        offs is None
        or left.ndim != 2
        or right.ndim != 3
        or any(given is not None for given in others.values())
    ):
        return None
    if not _multiplies(left, right, None):
        return None
    out = left.new_zeros(len(left), right.shape[2])
    untyped: Any = offs
    ends: list[int] = untyped.tolist()
    first = 0
    for weight, last in zip(right, ends, strict=True):
        if last > first:
            part = _linear(left[first:last], weight.t())
            assert part is not None, "its dtype and device were checked"
            out[first:last] = part
        first = last
    return out


def _of_numbers(function: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    """Return a function of numbers that computes all of them by vectors; `None` if it does so anyway."""

    def compute(values: Tensor, *others: Any, **named: Any) -> Tensor | None:
        count = values.numel()
        if values.device.type != "cpu" or not values.is_floating_point() or named.get("inplace"):
            return None
        padded = _whole_vectors(count)
        if padded == count and values.is_contiguous():
            return None
        flat = functional.pad(values.reshape(-1), (0, padded - count))
        return function(flat, *others, **named)[:count].view(values.shape)

    return compute


def _whole_vectors(count: int) -> int:
    """Return the least number of numbers, at least `count`, of which each thread gets whole vectors."""
    while True:
        parts = min(torch.get_num_threads(), -(-count // _NUMBERS_PER_THREAD)) or 1
        padded = -(-count // (parts * _VECTOR)) * parts * _VECTOR
        if padded == count:
            return count
        count = padded


_torch: Any = torch
# Numbers that PyTorch computes at once at most (two vectors of 512 bits of bfloat16), and from how many on it
# divides them among threads.
_VECTOR, _NUMBERS_PER_THREAD = 64, 32768
_NUMBER_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(functional.gelu, functional.silu, functional.softplus, functional.sigmoid, functional.tanh),
    *(torch.exp, torch.log, torch.sigmoid, torch.tanh),
    *(Tensor.exp, Tensor.log, Tensor.sigmoid, Tensor.tanh),
)
_OURS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    **{function: _of_numbers(function) for function in _NUMBER_FUNCTIONS},
    functional.linear: _linear,
    _torch._grouped_mm: _grouped_mm,  # the public function calls it without a mode
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.mm: _matmul,
    Tensor.__matmul__: _matmul,
}
