"""Recurrent layers on a CPU: causal convolutions and linear recurrences, with a state per request.

Every kernel computes the tokens of a request one after another, each sum in one order. So the bits of a row
depend neither on the rest of the batch, nor on how a prompt was cut into chunks, nor on the number of
threads. `call` is the public API; `kernel` is compiled by numba, which the first use imports; `reference` is
the same in float64.
"""

from __future__ import annotations

from hotswap.kernels.recurrent.call import (
    DTYPES,
    Spans,
    compile_for,
    convolve,
    delta_rule,
    selective_scan,
    softplus,
    state_space,
)

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
