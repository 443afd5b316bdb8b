"""Convolutions and recurrences in PyTorch, for devices without a kernel: all requests with one row at once.

Prompts are computed token by token. States are read and written by slot, as `StepStates.groups` has them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from hotswap.backends.torch.recurrent.states import StepStates

__all__ = ["convolve", "delta_rule", "selective_scan", "state_space"]


def convolve(rows: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, states: StepStates) -> Tensor:
    """See `hotswap.kernels.recurrent.convolve`, without an activation."""
    out = torch.zeros_like(rows)
    for group in states.groups:
        given = rows[group.rows].view(group.num_requests, -1, rows.shape[1])
        window = torch.cat([state[group.slots], given], 1)
        state[group.slots] = window[:, window.shape[1] - state.shape[1] :]
        made = functional.conv1d(
            window.transpose(1, 2), weight[:, None], bias, groups=rows.shape[1]
        )  # [n, channels, m]
        out[group.rows] = made.transpose(1, 2).reshape(-1, rows.shape[1])
    return out


def delta_rule(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_decays: Tensor,
    betas: Tensor,
    state: Tensor,
    states: StepStates,
) -> Tensor:
    """See `hotswap.kernels.recurrent.delta_rule`."""
    group_size, scale = values.shape[1] // queries.shape[1], queries.shape[2] ** -0.5
    queries, keys = (
        (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(group_size, 1)
        for one in (queries, keys)
    )
    decays = log_decays.exp()
    decays = decays[..., None] if decays.ndim == 3 else decays[..., None, None]

    def advance(now: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        key = keys[rows][..., None]
        now = now * decays[rows]
        change = (values[rows] - (now * key).sum(-2)) * betas[rows][..., None]
        now = now + key * change[..., None, :]
        return now, (now * queries[rows][..., None]).sum(-2) * scale

    return _by_token(torch.zeros_like(values), state, states, advance)


def state_space(
    inputs: Tensor, log_decays: Tensor, writes: Tensor, reads: Tensor, state: Tensor, states: StepStates
) -> Tensor:
    """See `hotswap.kernels.recurrent.state_space`."""
    group_size = inputs.shape[1] // writes.shape[1]
    writes, reads = (one.repeat_interleave(group_size, 1)[..., None] for one in (writes, reads))
    decays = log_decays.exp()[..., None, None]

    def advance(now: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        now = now * decays[rows] + writes[rows] * inputs[rows][..., None, :]
        return now, (now * reads[rows]).sum(-2)

    return _by_token(torch.zeros_like(inputs), state, states, advance)


def selective_scan(
    inputs: Tensor,
    steps: Tensor,
    rates: Tensor,
    writes: Tensor,
    reads: Tensor,
    state: Tensor,
    states: StepStates,
) -> Tensor:
    """See `hotswap.kernels.recurrent.selective_scan`."""
    by_state, driven = rates.t(), steps * inputs

    def advance(now: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        decays = (steps[rows][:, None] * by_state).exp()
        now = now * decays + driven[rows][:, None] * writes[rows][..., None]
        return now, (now * reads[rows][..., None]).sum(-2)

    return _by_token(torch.zeros_like(inputs), state, states, advance)


def _by_token(
    out: Tensor,
    state: Tensor,
    states: StepStates,
    advance: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """Fill `out` by `advance(states of n requests, their rows)`, which returns new states and results."""
    for group in states.groups:
        now = state[group.slots]
        for rows in group.rows.view(group.num_requests, -1).t():
            now, out[rows] = advance(now, rows)
        state[group.slots] = now
    return out
