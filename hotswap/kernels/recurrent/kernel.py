"""Convolutions and linear recurrences on a CPU, compiled by numba.

The arguments are an array of int64, which the threads share. The work is divided into items, a span and a
part of the channels each, which threads take one by one from a shared counter. Loops over channels have no
sums across lanes, so that a compiler may vectorize them without a change of bits.
"""

# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import njit, types

from hotswap.kernels.compiling import compiled_for_c, specialized
from hotswap.kernels.conversion import converters
from hotswap.kernels.paged_attention.vectors import exponentials
from hotswap.kernels.simd import LANES, fetch_add, pointer_to, sum_of_squares

__all__ = ["CHANNELS", "Recurrences", "build_convolution", "build_recurrences"]

CHANNELS = 512  # of a convolution or a selective scan, in one item of work

_OPTIONS: Any = {"nogil": True, "error_model": "numpy"}
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)
_LINEAR = np.float32(20.0)  # softplus(x) is x from here on, as in PyTorch
_TINY = np.float32(1e-6)  # added to the square of a norm, as in transformers

_integers = pointer_to(types.int64)
_ints = pointer_to(types.int32)
_singles = pointer_to(types.float32)


class Recurrences(NamedTuple):
    """The compiled kernels of recurrences: C functions that take the address of their int64 arguments.

    All begin with the number of items taken so far, the number of spans, and the address of the spans.

    Attributes:
        delta_rule: Goes on with the heads of values, those of keys, the widths of keys and values, the
            addresses of queries, keys, values, log decays, betas, results and states, whether each key has a
            decay of its own, and the bits of the factor of queries.
        state_space: Likewise: heads, groups, widths of states and heads, the addresses of C, B, inputs, log
            decays, results and states.
        selective_scan: Likewise: channels, the width of states, the addresses of inputs, time steps, A, B, C,
            results and states.
        softplus: Takes the number of items taken so far, the number of values, and the addresses of values
            and results.
    """

    delta_rule: Any
    state_space: Any
    selective_scan: Any
    softplus: Any


@njit(**_OPTIONS)
def _exponentials(scratch, count):
    """Replace `count` numbers, none above zero, by their exponentials."""
    padded = (count + LANES - 1) // LANES * LANES
    for at in range(count, padded):
        scratch[at] = _ZERO
    exponentials(_singles(scratch.ctypes.data), padded, _ONE, _ZERO)


@cache
def build_convolution(dtype: str) -> Any:
    """Return the convolution of float32, bfloat16 or float16, compiled.

    It takes the number of items taken so far, the number of spans and their address, the number of channels,
    of taps, the address of rows and their stride, the addresses of weights (float32, taps first), of the bias
    (float32, or 0), of results and states, and whether a SiLU follows.
    """
    numbers = pointer_to(types.float32 if dtype == "float32" else types.uint16)
    size = 4 if dtype == "float32" else 2
    widened, rounded = converters(dtype)

    @specialized(dtype, **_OPTIONS)
    def add_tap(sums, weights, source, count):
        for at in range(count):
            sums[at] += weights[at] * widened(source[at])

    @specialized(dtype, **_OPTIONS)
    def store(sums, target, scratch, count, activates):
        if not activates:
            for at in range(count):
                target[at] = rounded(sums[at])
            return
        for at in range(count):
            sums[at] = widened(rounded(sums[at]))
            scratch[at] = -abs(sums[at])
        _exponentials(scratch, count)
        for at in range(count):
            # x / (1 + exp(-x)), without an exponential of a positive number.
            above = _ONE if sums[at] >= _ZERO else scratch[at]
            target[at] = rounded(sums[at] * (above / (_ONE + scratch[at])))

    @specialized(dtype, **_OPTIONS)
    def keep(state, source, first, num_rows, stride, kept, width, count):
        """Replace the state by the last `kept` rows, those of the old state included."""
        for at in range(kept):
            row = num_rows - kept + at
            if row >= 0:
                source_row = numbers(source + (first + row) * stride * size)
            else:
                source_row = numbers(state + (kept + row) * width * size)
            target = numbers(state + at * width * size)
            for channel in range(count):
                target[channel] = source_row[channel]

    def convolve(at):
        it = _integers(at)
        num_spans, width, taps = it[1], it[3], it[4]
        spans = _ints(it[2])
        kept, num_parts = taps - 1, (width + CHANNELS - 1) // CHANNELS
        sums, scratch = np.empty(CHANNELS, np.float32), np.empty(CHANNELS, np.float32)
        while True:
            item = fetch_add(it, 1)
            if item >= num_spans * num_parts:
                return
            span, begin = 4 * (item // num_parts), (item % num_parts) * CHANNELS
            count = min(CHANNELS, width - begin)
            first, end = np.int64(spans[span + 1]), np.int64(spans[span + 2])
            source = it[5] + begin * size
            state = it[10] + (np.int64(spans[span]) * kept * width + begin) * size
            if spans[span + 3]:
                for row in range(kept):
                    old = numbers(state + row * width * size)
                    for channel in range(count):
                        old[channel] = rounded(_ZERO)
            for row in range(first, end):
                if it[8]:
                    bias = _singles(it[8] + begin * 4)
                    for channel in range(count):
                        sums[channel] = bias[channel]
                else:
                    sums[:count] = _ZERO
                for tap in range(taps):
                    before = row - kept + tap
                    if before >= first:
                        taken = numbers(source + before * it[6] * size)
                    else:
                        taken = numbers(state + (kept + before - first) * width * size)
                    add_tap(sums, _singles(it[7] + (tap * width + begin) * 4), taken, count)
                store(sums, numbers(it[9] + (row * width + begin) * size), scratch, count, it[11])
            keep(state, source, first, end - first, it[6], kept, width, count)

    return compiled_for_c(convolve, f"convolve-{dtype}", error_model="numpy")


@njit(**_OPTIONS)
def _clear(state, count):
    for at in range(count):
        state[at] = _ZERO


@njit(**_OPTIONS)
def _normalized(source, target, width, factor):
    scale = factor / np.sqrt(sum_of_squares(source, width) + _TINY)
    for at in range(width):
        target[at] = source[at] * scale


@njit(**_OPTIONS)
def _decay_and_read(state, decay, key, read, width):
    for at in range(width):
        kept = state[at] * decay
        state[at] = kept
        read[at] += kept * key


@njit(**_OPTIONS)
def _add_and_read(state, key, change, query, out, width):
    for at in range(width):
        new = state[at] + key * change[at]
        state[at] = new
        out[at] += new * query


@njit(**_OPTIONS)
def _advance_and_read(state, decay, key, value, query, out, width):
    for at in range(width):
        new = state[at] * decay + key * value[at]
        state[at] = new
        out[at] += new * query


def _delta_rule(at):
    it = _integers(at)
    num_spans, heads, key_heads, key_width, width = it[1], it[3], it[4], it[5], it[6]
    spans, per_key = _ints(it[2]), it[14]
    factor = np.int32(it[15]).view(np.float32)
    query, key = np.empty(key_width, np.float32), np.empty(key_width, np.float32)
    decays = np.empty(key_width + LANES, np.float32)
    change = np.empty(width, np.float32)
    while True:
        item = fetch_add(it, 1)
        if item >= num_spans * heads:
            return
        span, head = 4 * (item // heads), item % heads
        state = it[13] + (np.int64(spans[span]) * heads + head) * key_width * width * 4
        if spans[span + 3]:
            _clear(_singles(state), key_width * width)
        key_head = head // (heads // key_heads)
        for row in range(spans[span + 1], spans[span + 2]):
            keyed = (row * key_heads + key_head) * key_width * 4
            _normalized(_singles(it[7] + keyed), query, key_width, factor)
            _normalized(_singles(it[8] + keyed), key, key_width, _ONE)
            here = row * heads + head
            value, out = _singles(it[9] + here * width * 4), _singles(it[12] + here * width * 4)
            if per_key:
                logs = _singles(it[10] + here * key_width * 4)
                for number in range(key_width):
                    decays[number] = logs[number]
                _exponentials(decays, key_width)
            else:
                decays[0] = _singles(it[10])[here]
                _exponentials(decays, 1)
                decays[1:key_width] = decays[0]
            change[:] = _ZERO
            for number in range(key_width):
                _decay_and_read(
                    _singles(state + number * width * 4), decays[number], key[number], change, width
                )
            beta = _singles(it[11])[here]
            for number in range(width):
                change[number] = (value[number] - change[number]) * beta
                out[number] = _ZERO
            for number in range(key_width):
                _add_and_read(
                    _singles(state + number * width * 4), key[number], change, query[number], out, width
                )


def _state_space(at):
    it = _integers(at)
    num_spans, heads, groups, num_states, width = it[1], it[3], it[4], it[5], it[6]
    spans = _ints(it[2])
    decay = np.empty(LANES, np.float32)
    while True:
        item = fetch_add(it, 1)
        if item >= num_spans * heads:
            return
        span, head = 4 * (item // heads), item % heads
        state = it[12] + (np.int64(spans[span]) * heads + head) * num_states * width * 4
        if spans[span + 3]:
            _clear(_singles(state), num_states * width)
        group = head // (heads // groups)
        for row in range(spans[span + 1], spans[span + 2]):
            grouped = (row * groups + group) * num_states * 4
            query, key = _singles(it[7] + grouped), _singles(it[8] + grouped)
            here = row * heads + head
            value, out = _singles(it[9] + here * width * 4), _singles(it[11] + here * width * 4)
            decay[0] = _singles(it[10])[here]
            _exponentials(decay, 1)
            _clear(out, width)
            for number in range(num_states):
                _advance_and_read(
                    _singles(state + number * width * 4),
                    decay[0],
                    key[number],
                    value,
                    query[number],
                    out,
                    width,
                )


@njit(**_OPTIONS)
def _log_decays(scratch, steps, rates, count):
    for at in range(count):
        scratch[at] = steps[at] * rates[at]


@njit(**_OPTIONS)
def _scan_channels(state, decays, driven, factor, read, out, count):
    for at in range(count):
        new = state[at] * decays[at] + driven[at] * factor
        state[at] = new
        out[at] += new * read


def _selective_scan(at):
    it = _integers(at)
    num_spans, width, num_states = it[1], it[3], it[4]
    spans = _ints(it[2])
    num_parts = (width + CHANNELS - 1) // CHANNELS
    decays, driven = np.empty(CHANNELS, np.float32), np.empty(CHANNELS, np.float32)
    while True:
        item = fetch_add(it, 1)
        if item >= num_spans * num_parts:
            return
        span, begin = 4 * (item // num_parts), (item % num_parts) * CHANNELS
        count = min(CHANNELS, width - begin)
        state = it[11] + (np.int64(spans[span]) * num_states * width + begin) * 4
        if spans[span + 3]:
            for number in range(num_states):
                _clear(_singles(state + number * width * 4), count)
        for row in range(spans[span + 1], spans[span + 2]):
            here = (row * width + begin) * 4
            inputs, steps, out = _singles(it[5] + here), _singles(it[6] + here), _singles(it[10] + here)
            writes, reads = _singles(it[8] + row * num_states * 4), _singles(it[9] + row * num_states * 4)
            for channel in range(count):
                driven[channel] = steps[channel] * inputs[channel]
            _clear(out, count)
            for number in range(num_states):
                _log_decays(decays, steps, _singles(it[7] + (number * width + begin) * 4), count)
                _exponentials(decays, count)
                _scan_channels(
                    _singles(state + number * width * 4),
                    decays,
                    driven,
                    writes[number],
                    reads[number],
                    out,
                    count,
                )


def _softplus(at):
    it = _integers(at)
    while True:
        begin = fetch_add(it, CHANNELS)
        if begin >= it[1]:
            return
        values, out = _singles(it[2]), _singles(it[3])
        for number in range(begin, min(begin + CHANNELS, it[1])):
            value = values[number]
            out[number] = value if value > _LINEAR else np.log1p(np.exp(value))


@cache
def build_recurrences() -> Recurrences:
    """Return the kernels of recurrences, compiled; they compute in float32."""
    return Recurrences(
        compiled_for_c(_delta_rule, "delta-rule", error_model="numpy"),
        compiled_for_c(_state_space, "state-space", error_model="numpy"),
        compiled_for_c(_selective_scan, "selective-scan", error_model="numpy"),
        compiled_for_c(_softplus, "softplus", error_model="numpy"),
    )
