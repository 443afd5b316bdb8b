"""Reference implementations of `call`: token by token, in float64, with the same arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hotswap.kernels.recurrent.call import Spans

__all__ = [
    "convolve_reference",
    "delta_rule_reference",
    "selective_scan_reference",
    "state_space_reference",
]


def _rows(spans: Spans, states: Tensor) -> Iterator[tuple[int, range]]:
    """Yield slot and rows of each span; states that begin at zero are cleared."""
    untyped: Any = spans.table
    table: list[list[int]] = untyped.tolist()
    for slot, first, end, is_new in table:
        if is_new:
            states[slot] = 0
        yield slot, range(first, end)


def convolve_reference(
    rows: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, spans: Spans, *, silu: bool
) -> Tensor:
    """Return the result of `convolve`, in float64; states are float64 too."""
    out = torch.zeros(rows.shape, dtype=torch.float64)
    for slot, taken in _rows(spans, states):
        for row in taken:
            window = torch.cat([states[slot], rows[row : row + 1].double()])
            out[row] = (window * weight.double().t()).sum(0)
            states[slot] = window[1:]
    if bias is not None:
        out += bias.double()
    return functional.silu(out) if silu else out


def delta_rule_reference(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_decays: Tensor,
    betas: Tensor,
    states: Tensor,
    spans: Spans,
) -> Tensor:
    """Return the result of `delta_rule`, in float64; states are float64 too."""
    group, width = values.shape[1] // queries.shape[1], queries.shape[2]
    q, k = (one.double().repeat_interleave(group, 1) for one in (queries, keys))
    q, k = (one * (one.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for one in (q, k))
    decays = log_decays.double().exp()
    decays = decays[..., None] if decays.ndim == 3 else decays[..., None, None]
    out = torch.zeros(values.shape, dtype=torch.float64)
    for slot, taken in _rows(spans, states):
        for row in taken:
            state = states[slot] * decays[row]
            change = values[row].double() - (state * k[row, :, :, None]).sum(1)
            state = state + k[row, :, :, None] * (change * betas[row, :, None].double())[:, None]
            out[row] = (state * q[row, :, :, None]).sum(1) * width**-0.5
            states[slot] = state
    return out


def state_space_reference(
    inputs: Tensor, log_decays: Tensor, writes: Tensor, reads: Tensor, states: Tensor, spans: Spans
) -> Tensor:
    """Return the result of `state_space`, in float64; states are float64 too."""
    group = inputs.shape[1] // writes.shape[1]
    b, c = (one.double().repeat_interleave(group, 1)[..., None] for one in (writes, reads))
    out = torch.zeros(inputs.shape, dtype=torch.float64)
    for slot, taken in _rows(spans, states):
        for row in taken:
            decay = log_decays[row].double().exp()[:, None, None]
            states[slot] = states[slot] * decay + b[row] * inputs[row].double()[:, None]
            out[row] = (states[slot] * c[row]).sum(1)
    return out


def selective_scan_reference(
    inputs: Tensor, steps: Tensor, rates: Tensor, writes: Tensor, reads: Tensor, states: Tensor, spans: Spans
) -> Tensor:
    """Return the result of `selective_scan`, in float64; states are float64 too."""
    out = torch.zeros(inputs.shape, dtype=torch.float64)
    a = rates.double().t()
    for slot, taken in _rows(spans, states):
        for row in taken:
            step = steps[row].double()
            driven = step * inputs[row].double() * writes[row].double()[:, None]
            states[slot] = states[slot] * (step * a).exp() + driven
            out[row] = (states[slot] * reads[row].double()[:, None]).sum(0)
    return out
