"""Linear layers on a CPU: rows by panels of packed weights, compiled by numba.

Whoever works on a product claims a few panels at a time, until none is left, so any number of threads may. A
weight that is not packed yet is packed panel by panel into a scratch area as it is needed: that costs time,
and gives the same bits. What is asked comes as a list of integers in memory, which threads share.
"""

# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import njit, types

from hotswap.kernels.compiling import compiled_for_c, part
from hotswap.kernels.lanes import address, claim
from hotswap.kernels.packed_linear.tiles import PANEL, interleave, tile, transpose

__all__ = ["build"]

_MOST, _LEAST = 8, 4  # rows of a tile
_LANES = 16
_WORD_BYTES = 4
_AHEAD = 16  # lines of a weight between what is copied and what is fetched
_CLAIMED = 14  # where a product says so
_OPTIONS: Any = {"nogil": True, "error_model": "numpy"}

_integers = address(types.int64)
_words = address(types.uint32)
_floats = address(types.float32)


class Product(NamedTuple):
    """What is asked, in the order in which it lies in memory, as int64.

    Attributes:
        rows: Address of the rows, of at least four; 0 if the weight is to be packed, and nothing else.
        packed: That of the panels, or 0 if they are to be made of the weight.
        weight: That of the weight `[outputs, inputs]`.
        bias: That of the biases, or 0.
        out: That of the results.
        num_rows: How many there are.
        depth: Words of a row and of an output's weights.
        inputs: Numbers of an output's weights.
        outputs: How many there are.
        row_stride: How many words rows lie apart.
        out_stride: How many numbers rows of results lie apart.
        weight_row: How many numbers an output's weights lie from the next one's.
        weight_column: How many numbers neighbouring weights of an output lie apart.
        grain: How many panels are claimed at a time.
        claimed: How many panels have been, 0 at first.
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
    """Return what multiplies by and packs weights of float32 or bfloat16, compiled.

    A function for C, of the address of a `Product`, of which it computes as many panels as it can claim.
    """
    pairs = dtype == "bfloat16"
    numbers = address(types.uint16 if pairs else types.float32)
    elements = address(types.uint16 if pairs else types.uint32)
    per_word, size = (2, 2) if pairs else (1, 4)
    tall = tile(_MOST, pairs=pairs, fetches=True)
    low = tile(_LEAST, pairs=pairs, fetches=False)
    copy_line = interleave(pairs=pairs)

    @part(dtype, **_OPTIONS)
    def multiply_panel(it, panel, bias, out, out_stride):
        """All rows by a panel, to 32 columns of results. The last rows may be computed twice."""
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

    @part(dtype, **_OPTIONS)
    def copy_numbers(source, source_stride, target, target_stride, num_rows, count):
        for row in range(num_rows):
            for column in range(count):
                number = numbers(source)[row * source_stride + column]
                numbers(target)[row * target_stride + column] = number

    @part(dtype, **_OPTIONS)
    def copy_lines(it, first, to):
        """A full panel of a weight whose outputs lie side by side; returns how many inputs were copied."""
        whole = it.inputs // per_word * per_word
        line = it.weight_column * size
        last = it.weight + (it.inputs - 1) * line + first * size
        for column in range(0, whole, per_word):
            source = it.weight + column * line + first * size
            later = min(source + _AHEAD * line, last)
            lower = min(source + line, last)
            target = to + column // per_word * PANEL * _WORD_BYTES
            copy_line(elements(source), elements(lower), elements(later), elements(target))
        return whole

    @part(dtype, **_OPTIONS)
    def copy_rows(it, first, outputs, begin, to):
        """What is left of the weights of some outputs, from a column on, number by number."""
        weight, target = elements(it.weight), elements(to)
        for output in outputs:
            for column in range(begin, it.inputs):
                at = (first + output) * it.weight_row + column * it.weight_column
                place = (column // per_word * PANEL + output) * per_word + column % per_word
                target[place] = weight[at]

    @part(dtype, **_OPTIONS)
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
        edge = np.zeros(PANEL, np.uint32)  # biases: all zero, or those of a panel that is not full
        narrow = np.empty(it.num_rows * PANEL if it.outputs % PANEL else 0, np.uint32)
        while True:
            begin = claim(_integers(at + _CLAIMED * 8), it.grain)
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
