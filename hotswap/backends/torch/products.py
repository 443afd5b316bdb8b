"""Products that are not those of linear layers, with bits that do not depend on the number of rows.

Routers, mixtures of experts and a few heads multiply by weights of their own through PyTorch's functions,
whose libraries round a row by how many others there are: fp32 rows of a thousand numbers, for one, up to a
hundred rows and more where two threads share them. What computes linear layers does not (see `linear`), so
while a step runs these functions are computed by it. Keys, values and scores, which
`attention` multiplies in batches, pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hotswap.backends.torch.linear import LEAST_ROWS, kernels, product

__all__ = ["RowInvariant"]


class RowInvariant(TorchFunctionMode):
    """While it is entered, what this thread multiplies by a matrix is rounded alike for any number of rows.

    What it cannot multiply here, other dtypes and devices, is computed as ever.
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
    """`hidden @ weight.T + bias`; `None` if that is not for us."""
    if weight.ndim != 2 or not _multiplies(hidden, weight, bias) or hidden.shape[-1] != weight.shape[1]:
        return None
    rows = hidden.reshape(-1, hidden.shape[-1])
    num_rows = len(rows)
    if num_rows < LEAST_ROWS:
        rows = functional.pad(rows, (0, 0, 0, LEAST_ROWS - num_rows))
    out = product(rows.contiguous(), weight, bias)[:num_rows]
    return out.view(*hidden.shape[:-1], len(weight))


def _multiplies(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    dtypes = {tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None}
    return (
        len(dtypes) == 1
        and dtypes <= kernels()
        and hidden.device.type == weight.device.type == "cpu"
        and min(hidden.numel(), weight.numel()) > 0
        and (bias is None or bias.ndim == 1)
    )


def _matmul(left: Tensor, right: Tensor, **others: Any) -> Tensor | None:
    return _linear(left, right.t()) if right.ndim == 2 and left.ndim > 1 and not others else None


def _addmm(bias: Tensor, left: Tensor, right: Tensor, **others: Any) -> Tensor | None:
    return None if others else _linear(left, right.t(), bias)


def _grouped_mm(left: Tensor, right: Tensor, *, offs: Tensor | None = None, **others: Any) -> Tensor | None:
    """Rows `[S, in]`, the first `offs[0]` by `right[0]`, those up to `offs[1]` by `right[1]`, and so on."""
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
            assert part is not None, "its dtype and device were looked at"
            out[first:last] = part
        first = last
    return out


_torch: Any = torch
_OURS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    functional.linear: _linear,
    _torch._grouped_mm: _grouped_mm,  # what the public function calls, past any mode
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.mm: _matmul,
    Tensor.__matmul__: _matmul,
}
