"""Linear layers on a CPU: rows times panels of packed weights, compiled by numba.

Each thread takes a few panels at a time from a shared counter, so any number of threads may run. A plain
weight is packed panel by panel into a scratch buffer when the panel is used: this costs time and gives the
same bits. The arguments are an array of int64, which the threads share.
"""

# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import njit, types

from hotswap.kernels.compiling import compiled_for_c, specialized
from hotswap.kernels.packed_linear.tiles import PANEL, interleave, tile, transpose
from hotswap.kernels.simd import fetch_add, pointer_to

__all__ = ["build"]

_MOST, _LEAST = 8, 4  # rows of a tile
_LANES = 16
_WORD_BYTES = 4
_AHEAD = 16  # prefetch distance, in lines of the weight
_CLAIMED = 14  # index of `Product.claimed`
_OPTIONS: Any = {"nogil": True, "error_model": "numpy"}

_integers = pointer_to(types.int64)
_words = pointer_to(types.uint32)
_floats = pointer_to(types.float32)


class Product(NamedTuple):
    """The arguments of a product, in the order of their int64 in memory.

    Attributes:
        rows: Address of the rows, at least four; 0 to pack the weight only.
        packed: Address of the panels; 0 to pack them from the weight.
        weight: Address of the weight `[outputs, inputs]`.
        bias: Address of the biases, or 0.
        out: Address of the results.
        num_rows: Number of rows.
        depth: Words of a row, and of the weights of one output.
        inputs: Number of inputs.
        outputs: Number of outputs.
        row_stride: Stride of the rows, in words.
        out_stride: Stride of the result rows, in elements.
        weight_row: Stride of the weight along outputs, in elements.
        weight_column: Stride of the weight along inputs, in elements.
        grain: Number of panels that a thread takes at a time.
        claimed: Number of panels taken so far; starts at 0.
    """

    rows: int
    packed: int
    weight: int
    bias: int
    out: int
    num_rows: int
    depth: int
    inputs: int
    outputs: int
    row_stride: int
    out_stride: int
    weight_row: int
    weight_column: int
    grain: int
    claimed: int


@njit(**_OPTIONS)
def _read(at):
    given = _integers(at)
    return Product(
        given[0], given[1], given[2], given[3], given[4], given[5], given[6], given[7], given[8], given[9],
        given[10], given[11], given[12], given[13], given[14],
    )  # fmt: skip


@cache
def build(dtype: str) -> Any:
    """Return the compiled kernel for float32 or bfloat16, which multiplies by weights and packs them.

    A C function that takes the address of a `Product` and computes panels until none is left.
    """
    pairs = dtype == "bfloat16"
    numbers = pointer_to(types.uint16 if pairs else types.float32)
    elements = pointer_to(types.uint16 if pairs else types.uint32)
    per_word, size = (2, 2) if pairs else (1, 4)
    tall = tile(_MOST, pairs=pairs, fetches=True)
    low = tile(_LEAST, pairs=pairs, fetches=False)
    copy_line = interleave(pairs=pairs)

    @specialized(dtype, **_OPTIONS)
    def multiply_panel(it, panel, bias, out, out_stride):
        """Multiply all rows by one panel, into 32 result columns. The last rows may be computed twice."""
        row = 0
        while row < it.num_rows:
            left = it.num_rows - row
            if left < _LEAST:
                row -= _LEAST - left
            at = _floats(it.rows + row * it.row_stride * _WORD_BYTES)
            to = numbers(out + row * out_stride * size)
            if left >= _MOST:
                tall(at, _floats(panel), numbers(bias), to, it.depth, it.row_stride, out_stride)
                row += _MOST
            else:
                low(at, _floats(panel), numbers(bias), to, it.depth, it.row_stride, out_stride)
                row += _LEAST

    @specialized(dtype, **_OPTIONS)
    def copy_numbers(source, source_stride, target, target_stride, num_rows, count):
        for row in range(num_rows):
            for column in range(count):
                number = numbers(source)[row * source_stride + column]
                numbers(target)[row * target_stride + column] = number

    @specialized(dtype, **_OPTIONS)
    def copy_lines(it, first, to):
        """Copy a full panel of a weight with contiguous outputs; returns the number of inputs copied."""
        copied = it.inputs // per_word * per_word
        line = it.weight_column * size
        last = it.weight + (it.inputs - 1) * line + first * size
        for column in range(0, copied, per_word):
            source = it.weight + column * line + first * size
            later = min(source + _AHEAD * line, last)
            lower = min(source + line, last)
            target = to + column // per_word * PANEL * _WORD_BYTES
            copy_line(elements(source), elements(lower), elements(later), elements(target))
        return copied

    @specialized(dtype, **_OPTIONS)
    def copy_rows(it, first, outputs, begin, to):
        """Copy the weights of some outputs from a column on, element by element."""
        weight, target = elements(it.weight), elements(to)
        for output in outputs:
            for column in range(begin, it.inputs):
                at = (first + output) * it.weight_row + column * it.weight_column
                place = (column // per_word * PANEL + output) * per_word + column % per_word
                target[place] = weight[at]

    @specialized(dtype, **_OPTIONS)
    def pack_panel(it, panel, to):
        first = panel * PANEL
        count = min(PANEL, it.outputs - first)
        if count < PANEL or it.inputs % per_word:
            for word in range(it.depth * PANEL):
                _words(to)[word] = 0
        done = 0
        lines = it.weight_row == 1 and count == PANEL
        if lines:
            done = copy_lines(it, first, to)
        elif it.weight_column == 1 and it.weight_row % per_word == 0:
            done = it.inputs // (per_word * _LANES) * (per_word * _LANES)
        for half in range(0, count, _LANES):
            full = half + _LANES <= count
            if full and not lines:
                for column in range(0, done, per_word * _LANES):
                    source = it.weight + ((first + half) * it.weight_row + column) * size
                    target = to + (column // per_word * PANEL + half) * _WORD_BYTES
                    transpose(_words(source), it.weight_row // per_word, _words(target))
            copy_rows(it, first, range(half, min(half + _LANES, count)), done if full else 0, to)

    def work(at):
        it = _read(at)
        panel_bytes = it.depth * PANEL * _WORD_BYTES
        num_panels = (it.outputs + PANEL - 1) // PANEL
        made = np.empty(0 if it.packed else it.depth * PANEL, np.uint32)
        edge = np.zeros(PANEL, np.uint32)  # biases of an incomplete panel, padded with zeros
        narrow = np.empty(it.num_rows * PANEL if it.outputs % PANEL else 0, np.uint32)
        while True:
            begin = fetch_add(_integers(at + _CLAIMED * 8), it.grain)
            if begin >= num_panels:
                return
            for panel in range(begin, min(begin + it.grain, num_panels)):
                source = it.packed + panel * panel_bytes if it.packed else made.ctypes.data
                if not (it.packed and it.rows):
                    pack_panel(it, panel, source)
                if not it.rows:
                    continue
                first = panel * PANEL
                count = min(PANEL, it.outputs - first)
                bias = it.bias + first * size if it.bias else edge.ctypes.data
                out, out_stride = it.out + first * size, it.out_stride
                if count < PANEL:
                    out, out_stride = narrow.ctypes.data, PANEL
                    if it.bias:
                        copy_numbers(bias, PANEL, edge.ctypes.data, PANEL, 1, count)
                        bias = edge.ctypes.data
                multiply_panel(it, source, bias, out, out_stride)
                if count < PANEL:
                    copy_numbers(out, PANEL, it.out + first * size, it.out_stride, it.num_rows, count)

    return compiled_for_c(work, f"packed-linear-{dtype}", error_model="numpy")
