"""The functions by which mixers continue a state, for the requests of the current step.

Each has the signature of transformers' function of the same purpose, with one row of tokens as its batch. It
takes the states of the step instead of an initial state, and changes them in place; the final state that it
returns is a placeholder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2FN

from hotswap.backends.torch.attention import current
from hotswap.backends.torch.recurrent import groups
from hotswap.backends.torch.recurrent.states import StepStates
from hotswap.errors import UnsupportedModel
from hotswap.kernels import recurrent as kernels

__all__ = ["CONVOLUTION", "RECURRENCES", "REPLACED", "step_states"]


def step_states() -> StepStates | None:
    """Return the states of the current step of this thread; `None` outside of steps and without states."""
    step = current()
    return None if step is None else step.states


def _states() -> StepStates:
    states = step_states()
    assert states is not None, "mixers call these functions in steps only"
    return states


def _convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> Tensor:
    """Return the causal depthwise convolution of `[1, channels, T]`, with the activation."""
    states, rows = _states(), hidden_states[0].t().to(weight.dtype)
    width, taps = weight.shape
    state = states.take((taps - 1, width), weight.dtype)
    if not states.pool.uses_kernels:
        out = groups.convolve(rows, weight, bias, state, states)
        out = out if activation is None else _activated(out, activation)
        return out.to(hidden_states.dtype).t()[None]
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    silu = activation in {"silu", "swish"}
    out = kernels.convolve(rows, weight, bias, state, states.spans, silu=silu)
    out[states.num_rows :] = 0
    if activation is not None and not silu:
        out = _activated(out, activation)
    return out.to(hidden_states.dtype).t()[None]


def _activated(values: Tensor, activation: str) -> Tensor:
    functions: Any = ACT2FN
    made: Tensor = functions[activation](values)
    return made


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Return the gated delta rule of values `[1, T, heads, width]`; `g` has a decay per head or per key."""
    if not use_qk_l2norm_in_kernel:
        raise UnsupportedModel(
            "The model computes the delta rule with queries and keys that are not normalized, which the "
            "engine does not support; serve it with another engine."
        )
    states = _states()
    queries, keys, values, log_decays, betas = (one[0].float() for one in (query, key, value, g, beta))
    state = states.take((value.shape[2], key.shape[3], value.shape[3]), torch.float32)
    if states.pool.uses_kernels:
        out = kernels.delta_rule(queries, keys, values, log_decays, betas, state, states.spans)
        out[states.num_rows :] = 0
    else:
        out = groups.delta_rule(queries, keys, values, log_decays, betas, state, states)
    return out.to(query.dtype)[None], out.new_empty(0)


def _state_space(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = 0,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Return the state space of Mamba 2 of inputs `[1, T, heads, width]`, in fp32."""
    _refuse_gate(z)
    assert return_final_states, "mixers with a cache ask for it"
    states, inputs = _states(), hidden_states[0].float()
    steps = _time_steps(dt[0], dt_bias, softplus=dt_softplus).clamp(*dt_limit).float()
    driven, log_decays = inputs * steps[..., None], A.float() * steps
    state = states.take((inputs.shape[1], B.shape[3], inputs.shape[2]), torch.float32)
    given = driven, log_decays, B[0].float(), C[0].float(), state
    if states.pool.uses_kernels:
        out = kernels.state_space(*given, states.spans)
        out[states.num_rows :] = 0
    else:
        out = groups.state_space(*given, states)
    if D is not None:
        out = out + D[:, None] * inputs
    return out[None], out.new_empty(0)


def _selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Return the selective scan of Mamba of inputs `[1, channels, T]`, gated by `z`."""
    assert return_last_state, "mixers with a cache ask for it"
    states, rows = _states(), hidden_states[0].t()
    inputs, steps = rows.float(), _time_steps(dt[0].t(), delta_bias, softplus=delta_softplus).float()
    state = states.take((A.shape[1], A.shape[0]), torch.float32)
    given = inputs, steps, A.float(), B[0].t().float(), C[0].t().float(), state
    if states.pool.uses_kernels:
        out = kernels.selective_scan(*given, states.spans)
        out[states.num_rows :] = 0
    else:
        out = groups.selective_scan(*given, states)
    if D is not None:
        out = out + rows * D
    if z is not None:
        out = out * functional.silu(z[0].t())
    return out.t()[None], out.new_empty(0)


def _time_steps(steps: Tensor, bias: Tensor | None, *, softplus: bool) -> Tensor:
    """Return time steps with their bias, rounded as transformers does."""
    if bias is not None:
        steps = steps + bias.to(steps.dtype)
    if not softplus:
        return steps
    return (kernels.softplus(steps) if steps.is_cpu else functional.softplus(steps)).to(steps.dtype)


def _refuse_gate(gate: Tensor | None) -> None:
    if gate is not None:
        raise UnsupportedModel(
            "The model gates a state space within its scan, which the engine does not support; serve it with "
            "another engine."
        )


CONVOLUTION: Final = "causal_conv1d_fn"
"""The name of the convolution in the modules of transformers."""

RECURRENCES: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "chunk_kimi_delta_attention": _delta_rule,
        "mamba2_chunk_scan": _state_space,
        "mamba_selective_scan": _selective_scan,
        "torch_chunk_gated_delta_rule": _delta_rule,
    }
)
"""Replacements of the recurrences, by their names in the modules of transformers."""

REPLACED: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {CONVOLUTION: _convolution, **RECURRENCES}
)
"""All replacements."""
