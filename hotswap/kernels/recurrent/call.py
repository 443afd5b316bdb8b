"""The kernels of recurrent layers on a CPU, as functions of tensors.

States are changed in place, those of the requests that `Spans` names. Rows outside all spans are padding;
their results are undefined.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels.threads import float_bits, run_threads

if TYPE_CHECKING:
    from hotswap.kernels.recurrent.kernel import Recurrences

__all__ = [
    "DTYPES",
    "Spans",
    "compile_for",
    "convolve",
    "delta_rule",
    "selective_scan",
    "softplus",
    "state_space",
]

DTYPES: Final[frozenset[torch.dtype]] = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""The dtypes of convolutions; recurrences compute in float32."""

_SHARED_NUMBERS: Final = 1 << 16  # multiplications, from which several threads are used

_compiling = Lock()


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Consecutive rows of requests, and the slots of their states.

    Attributes:
        table: `[n, 4]`, int32 on the CPU: slot, first row, end of the rows, and 1 if the state begins at
            zero. No slot is in it twice, and no row. The values are not checked.
        num_rows: The rows of all spans together.
    """

    table: Tensor
    num_rows: int


def compile_for(dtype: torch.dtype) -> None:
    """Compile the kernels for a dtype, or load them from the disk cache, once per process; in any thread.

    Raises:
        ConfigError: the dtype is not in `DTYPES`.
    """
    _convolution(dtype)
    _recurrences()


def convolve(
    rows: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, spans: Spans, *, silu: bool
) -> Tensor:
    """Return the causal depthwise convolution of rows, continued from the states, and replace these.

    `out[t] = sum(weight[:, j] * rows[t - taps + 1 + j]) + bias`, where the rows before the first of a span
    are the state of its request. Summed in float32, rounded once, and once more after a SiLU.

    Args:
        rows: `[T, channels]`, of one of `DTYPES`; the channels of a row are contiguous.
        weight: `[channels, taps]`, of the same dtype.
        bias: `[channels]`, or `None`.
        states: `[slots, taps - 1, channels]`, contiguous, of the same dtype: the last rows of each request.
        spans: The requests of the rows.
        silu: Whether `x / (1 + exp(-x))` follows.

    Raises:
        ConfigError: the tensors do not fit together.
    """
    num_rows, width = rows.shape
    taps = weight.shape[-1]
    fits = (
        weight.shape == (width, taps)
        and states.shape[1:] == (taps - 1, width)
        and (bias is None or bias.shape == (width,))
        and states.dtype is rows.dtype
        and (width == 1 or rows.stride(1) == 1)
        and states.is_contiguous()
    )
    _check(fits, rows, weight, states)
    by_tap = weight.float().t().contiguous()
    added = None if bias is None else bias.float().contiguous()
    out = torch.empty(num_rows, width, dtype=rows.dtype)
    arguments = (
        0, len(spans.table), spans.table.data_ptr(), width, taps, rows.data_ptr(), rows.stride(0),
        by_tap.data_ptr(), 0 if added is None else added.data_ptr(), out.data_ptr(), states.data_ptr(), silu,
    )  # fmt: skip
    run_threads(_convolution(rows.dtype), arguments, _parts(spans.num_rows * width * taps))
    return out


def delta_rule(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_decays: Tensor,
    betas: Tensor,
    states: Tensor,
    spans: Spans,
) -> Tensor:
    """Return the result of the gated delta rule for rows, continued from the states, and replace these.

    For each row `S = S * exp(log_decays)`, `S += k (v - S k) beta` and `out = S q`, with queries and keys of
    norm 1 and queries divided by the square root of their width (Yang et al., Gated Delta Networks,
    arXiv:2412.06464, equation 10; with a decay for each key as in Kimi Linear, arXiv:2510.26692).

    Args:
        queries: `[T, key_heads, key_width]`, float32 like all others.
        keys: The same shape.
        values: `[T, heads, width]`; each key head has the same number of heads.
        log_decays: `[T, heads]` or `[T, heads, key_width]`, none above zero.
        betas: `[T, heads]`.
        states: `[slots, heads, key_width, width]`, contiguous.
        spans: The requests of the rows.

    Raises:
        ConfigError: the tensors do not fit together.
    """
    (num_rows, key_heads, key_width), (_, heads, width) = queries.shape, values.shape
    per_key = log_decays.ndim == 3
    fits = (
        keys.shape == queries.shape
        and len(values) == num_rows
        and heads % key_heads == 0
        and log_decays.shape == ((num_rows, heads, key_width) if per_key else (num_rows, heads))
        and betas.shape == (num_rows, heads)
        and states.shape[1:] == (heads, key_width, width)
        and states.is_contiguous()
    )
    given = queries, keys, values, log_decays, betas
    _check(fits and _are_single(*given, states), *given, states)
    queries, keys, values, log_decays, betas = (one.contiguous() for one in given)
    out = torch.empty(num_rows, heads, width, dtype=torch.float32)
    arguments = (
        0, len(spans.table), spans.table.data_ptr(), heads, key_heads, key_width, width, queries.data_ptr(),
        keys.data_ptr(), values.data_ptr(), log_decays.data_ptr(), betas.data_ptr(), out.data_ptr(),
        states.data_ptr(), per_key, float_bits(key_width**-0.5),
    )  # fmt: skip
    work = 4 * spans.num_rows * heads * key_width * width
    run_threads(_recurrences().delta_rule, arguments, _parts(work))
    return out


def state_space(
    inputs: Tensor, log_decays: Tensor, writes: Tensor, reads: Tensor, states: Tensor, spans: Spans
) -> Tensor:
    """Return the result of a state space with one decay per head, continued from the states; replace these.

    For each row `S = S * exp(log_decays) + writes x inputs` and `out = reads S` (Dao and Gu, Transformers are
    SSMs, arXiv:2405.21060, equation 16).

    Args:
        inputs: `[T, heads, width]`, multiplied by their time steps; float32 like all others.
        log_decays: `[T, heads]`, none above zero.
        writes: `[T, groups, num_states]`, B; each group has the same number of heads.
        reads: The same shape, C.
        states: `[slots, heads, num_states, width]`, contiguous.
        spans: The requests of the rows.

    Raises:
        ConfigError: the tensors do not fit together.
    """
    (num_rows, heads, width), (_, groups, num_states) = inputs.shape, writes.shape
    fits = (
        writes.shape == reads.shape
        and len(writes) == num_rows
        and heads % groups == 0
        and log_decays.shape == (num_rows, heads)
        and states.shape[1:] == (heads, num_states, width)
        and states.is_contiguous()
    )
    given = inputs, log_decays, writes, reads
    _check(fits and _are_single(*given, states), *given, states)
    inputs, log_decays, writes, reads = (one.contiguous() for one in given)
    out = torch.empty(num_rows, heads, width, dtype=torch.float32)
    arguments = (
        0, len(spans.table), spans.table.data_ptr(), heads, groups, num_states, width, reads.data_ptr(),
        writes.data_ptr(), inputs.data_ptr(), log_decays.data_ptr(), out.data_ptr(), states.data_ptr(),
    )  # fmt: skip
    work = 3 * spans.num_rows * heads * num_states * width
    run_threads(_recurrences().state_space, arguments, _parts(work))
    return out


def selective_scan(
    inputs: Tensor, steps: Tensor, rates: Tensor, writes: Tensor, reads: Tensor, states: Tensor, spans: Spans
) -> Tensor:
    """Return the result of a selective state space, continued from the states, and replace these.

    For each row and channel `S = S * exp(steps * rates) + steps * inputs * writes` and `out = reads S` (Gu
    and Dao, Mamba, arXiv:2312.00752, algorithm 2).

    Args:
        inputs: `[T, channels]`, float32 like all others.
        steps: The same shape: the time steps, none below zero.
        rates: `[channels, num_states]`, A, none above zero.
        writes: `[T, num_states]`, B.
        reads: The same shape, C.
        states: `[slots, num_states, channels]`, contiguous.
        spans: The requests of the rows.

    Raises:
        ConfigError: the tensors do not fit together.
    """
    (num_rows, width), num_states = inputs.shape, rates.shape[-1]
    fits = (
        steps.shape == inputs.shape
        and rates.shape == (width, num_states)
        and writes.shape == reads.shape == (num_rows, num_states)
        and states.shape[1:] == (num_states, width)
        and states.is_contiguous()
    )
    given = inputs, steps, rates.t(), writes, reads
    _check(fits and _are_single(*given, states), *given, states)
    inputs, steps, by_state, writes, reads = (one.contiguous() for one in given)
    out = torch.empty(num_rows, width, dtype=torch.float32)
    arguments = (
        0, len(spans.table), spans.table.data_ptr(), width, num_states, inputs.data_ptr(), steps.data_ptr(),
        by_state.data_ptr(), writes.data_ptr(), reads.data_ptr(), out.data_ptr(), states.data_ptr(),
    )  # fmt: skip
    work = 8 * spans.num_rows * width * num_states
    run_threads(_recurrences().selective_scan, arguments, _parts(work))
    return out


def softplus(values: Tensor) -> Tensor:
    """Return `log(1 + exp(values))` in float32, with the same bits of a value wherever it stands."""
    given = values.float().contiguous()
    out = torch.empty_like(given)
    numbers = given.numel()
    arguments = (0, numbers, given.data_ptr(), out.data_ptr())
    run_threads(_recurrences().softplus, arguments, _parts(32 * numbers))
    return out


def _are_single(*tensors: Tensor) -> bool:
    return all(tensor.dtype is torch.float32 for tensor in tensors)


def _check(fits: bool, *tensors: Tensor) -> None:
    if not fits or not all(tensor.is_cpu for tensor in tensors):
        shapes = [f"{list(tensor.shape)} {tensor.dtype}" for tensor in tensors]
        raise ConfigError(f"Tensors {shapes} do not fit together; give those of one layer on the CPU.")


def _parts(work: int) -> int:
    return torch.get_num_threads() if work >= _SHARED_NUMBERS else 1


@cache
def _convolution(dtype: torch.dtype) -> Any:
    if dtype not in DTYPES:
        raise ConfigError(f"There is no convolution for {dtype}; give float32, bfloat16 or float16.")
    with _compiling:
        from hotswap.kernels.recurrent.kernel import build_convolution

        return build_convolution(str(dtype).removeprefix("torch."))


@cache
def _recurrences() -> Recurrences:
    with _compiling:
        from hotswap.kernels.recurrent.kernel import build_recurrences

        return build_recurrences()
