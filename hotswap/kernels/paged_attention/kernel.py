"""Paged attention on a CPU: rows of queries over the blocks of their requests, compiled by numba.

An *item* is the rows of a tile and the query heads that share a KV head, or, of a single row, those of
several KV heads: their keys lie side by side in a block, and memory gives what is read from start to end
twice as fast as every eighth page. Queries are copied to a scratch area, their scores are computed block by
block, turned into weights, and the values are added up block by block. Where heads are computed one by one, a
block that is needed later is fetched meanwhile. What is asked comes as a list of integers in memory, and
whoever works on it claims one part of the items after the other.
"""

# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import njit, types

from hotswap.kernels.compiling import compiled_for_c, part
from hotswap.kernels.lanes import LANES, address, claim, dots, prefetch
from hotswap.kernels.paged_attention.vectors import exponentials, greatest, weigh

__all__ = ["build"]

_KEYS = 8  # that are multiplied together
_CHUNKS = 4  # of values that are weighed together
_MOST_SCORES = 1 << 22  # of heads that are computed together
_AHEAD = 2  # blocks between the one that is used and the one that is fetched
_LINE_BYTES = 64
_OPTIONS: Any = {"nogil": True, "error_model": "numpy", "fastmath": {"contract", "nsz"}}
_HIDDEN = np.float32(-np.inf)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)

_floats = address(types.float32)
_bytes = address(types.uint8)
_ints = address(types.int32)
_integers = address(types.int64)


class _Step(NamedTuple):
    """What is asked; the first nine are addresses, and 0 stands for no hidden positions or sinks."""

    queries: int
    out: int
    tables: int
    tiles: int
    firsts: int
    lasts: int
    order: int
    hidden: int
    sinks: int
    query_row: int
    query_head: int
    table_width: int
    num_tiles: int
    hidden_width: int
    kv_heads: int
    group: int
    scale: float
    softcap: float


class _Pool(NamedTuple):
    """Keys or values: an address, the elements of one, those with padding, and the size of a block."""

    at: int
    width: int
    padded: int
    head_bytes: int
    block_tokens: int


class _Item(NamedTuple):
    """Rows from `start` on for some KV heads; `table` is the address of the first of its blocks' numbers.

    Attributes:
        each: Lines of each head: its queries of each row.
        lines: Those of all heads, one head after the other.
    """

    head: int
    heads: int
    start: int
    each: int
    lines: int
    table: int
    first_position: int
    num_blocks: int


class _Scratch(NamedTuple):
    """Addresses of float32: for each line its scores, which lie `stride` apart, its query, sums and total."""

    scores: int
    rows: int
    sums: int
    totals: int
    stride: int


@njit(**_OPTIONS)
def _extent(step, tile):
    """The positions that the rows of a tile attend to: the first, and the one after the last."""
    start, count = _ints(step.tiles)[3 * tile + 1], _ints(step.tiles)[3 * tile + 2]
    low, high = np.int64(1) << 30, np.int64(0)
    for row in range(start, start + count):
        low, high = min(low, _ints(step.firsts)[row]), max(high, _ints(step.lasts)[row])
    return low, high


@njit(**_OPTIONS)
def _start(step, part, parts):
    """Where a part begins, if all have about equal work: at a KV head of a tile, by number.

    For the part after the last it is how many there are.
    """
    total = np.int64(0)
    for tile in range(step.num_tiles):
        low, high = _extent(step, tile)
        total += (high - low) * (_ints(step.tiles)[3 * tile + 2] + 1) * step.kv_heads
    done = np.int64(0)
    for tile in range(step.num_tiles):
        low, high = _extent(step, tile)
        work = (high - low) * (_ints(step.tiles)[3 * tile + 2] + 1)
        head = -((done * parts - part * total) // (work * parts))
        if head < step.kv_heads:
            return tile * step.kv_heads + max(head, 0)
        done += work * step.kv_heads
    return step.num_tiles * step.kv_heads


@njit(**_OPTIONS)
def _item(step, number, end, block_tokens):
    """What is computed together from a number on: of one row several heads, whose keys lie side by side."""
    tile, head = number // step.kv_heads, number % step.kv_heads
    low, high = _extent(step, tile)
    first_block = low // block_tokens
    num_blocks = (high + block_tokens - 1) // block_tokens - first_block
    request, start = np.int64(_ints(step.tiles)[3 * tile]), np.int64(_ints(step.tiles)[3 * tile + 1])
    num_rows = np.int64(_ints(step.tiles)[3 * tile + 2])
    each, heads = num_rows * step.group, np.int64(1)
    if num_rows == 1:
        heads = max(heads, _MOST_SCORES // (each * num_blocks * block_tokens))
        heads = min(heads, step.kv_heads - head, end - number)
    return _Item(
        head,
        heads,
        start,
        each,
        heads * each,
        step.tables + 4 * (request * step.table_width + first_block),
        first_block * block_tokens,
        num_blocks,
    )


@njit(**_OPTIONS)
def _most(step, keys, values, begin, end):
    """How many floats of scratch the largest item of some needs."""
    most, number = np.int64(0), begin
    while number < end:
        item = _item(step, number, end, keys.block_tokens)
        most = max(most, item.lines * (item.num_blocks * keys.block_tokens + keys.padded + values.padded + 1))
        number += item.heads
    return most


@njit(**_OPTIONS)
def _block(step, pool, item, place):
    """Where the keys or values of a block and a head of an item lie, by number."""
    block, head = np.int64(_ints(item.table)[place // item.heads]), item.head + place % item.heads
    return pool.at + (block * step.kv_heads + head) * pool.head_bytes


@njit(**_OPTIONS)
def _later(step, keys, values, item, following, place):
    """Where what is read at a place lies: an item's keys, its values, and then the keys of the following.

    0 where heads are computed together: what lies side by side, the processor fetches by itself, and sooner.
    """
    if item.heads > 1:
        return np.int64(0)
    if place < item.num_blocks:
        return _block(step, keys, item, place)
    place -= item.num_blocks
    if place < item.num_blocks:
        return _block(step, values, item, place)
    return _block(step, keys, following, min(place - item.num_blocks, following.num_blocks - 1))


@njit(**_OPTIONS)
def _row(step, item, line):
    """Which row a line is of, of those in order, and which of its heads it is."""
    within = line % item.each
    head = (item.head + line // item.each) * step.group + within % step.group
    return item.start + within // step.group, head


@njit(**_OPTIONS)
def _begin(step, keys, values, item, scratch):
    """Copy queries, filled up with zeros, and clear the sums."""
    for line in range(item.lines):
        row, head = _row(step, item, line)
        row = np.int64(_ints(step.order)[row])
        query = _floats(step.queries + 4 * (row * step.query_row + head * step.query_head))
        copy = _floats(scratch.rows + 4 * line * keys.padded)
        for at in range(keys.width):
            copy[at] = query[at]
        for at in range(keys.width, keys.padded):
            copy[at] = _ZERO
        sums = _floats(scratch.sums + 4 * line * values.padded)
        for at in range(values.padded):
            sums[at] = _ZERO


@njit(**_OPTIONS)
def _hide(scores, first, last, end, mask):
    """Hide the scores before `first`, from `last` on, and those that a mask, if it is no 0, hides."""
    for at in range(first):
        scores[at] = _HIDDEN
    for at in range(last, end):
        scores[at] = _HIDDEN
    if mask != 0:
        for at in range(first, last):
            if _bytes(mask)[at] != 0:
                scores[at] = _HIDDEN


@njit(**_OPTIONS)
def _softmax(step, item, scratch, end):
    """Turn scores, up to a multiple of sixteen, into weights, whose sums are the totals.

    The sums are taken in sixteen lanes, by position. Scores that are hidden may be NaN before.
    """
    for line in range(item.lines):
        row, head = _row(step, item, line)
        scores = _floats(scratch.scores + 4 * line * scratch.stride)
        first = _ints(step.firsts)[row] - item.first_position
        last = _ints(step.lasts)[row] - item.first_position
        scale = step.scale
        if step.softcap > 0:
            for at in range(first, last):
                scores[at] = step.softcap * np.tanh(scores[at] * (scale / step.softcap))
            scale = _ONE
        mask = np.int64(0)
        if step.hidden != 0:
            mask = step.hidden + row * step.hidden_width + item.first_position
        _hide(scores, first, last, end, mask)
        most = greatest(scores, end, scale)
        if step.sinks != 0:
            sink = _floats(step.sinks)[head]
            most = max(most, sink)
            _floats(scratch.totals)[line] = exponentials(scores, end, scale, most) + np.exp(sink - most)
        else:
            _floats(scratch.totals)[line] = exponentials(scores, end, scale, most)


@njit(**_OPTIONS)
def _finish(step, values, item, scratch):
    """Write the weighed sums of values, divided by the totals."""
    for line in range(item.lines):
        row, head = _row(step, item, line)
        row = np.int64(_ints(step.order)[row])
        out = _floats(step.out + 4 * (row * step.kv_heads * step.group + head) * values.width)
        sums, total = _floats(scratch.sums + 4 * line * values.padded), _floats(scratch.totals)[line]
        for at in range(values.width):
            out[at] = sums[at] / total


def _scoring(dtype: str) -> Callable[..., None]:
    """Return what multiplies lines by the keys of a block."""
    half, element, size = dtype == "float16", _element(dtype), _size(dtype)
    few, one = dots(2, _KEYS, half=half), dots(1, 2 * _KEYS, half=half)

    @part(dtype, **_OPTIONS)
    def score(lines, rows, pool, block, out, stride, later):
        width, padded = pool.width, pool.padded
        for key in range(0, pool.block_tokens, 2 * _KEYS):
            if later != 0:
                for at in range(0, 2 * _KEYS * width * size, _LINE_BYTES):
                    prefetch(_bytes(later + key * width * size), at)
            keys, line = block + key * width * size, 0
            while line + 2 <= lines:
                row, place = rows + 4 * line * padded, out + 4 * (line * stride + key)
                for first in range(0, 2 * _KEYS, _KEYS):
                    some = element(keys + first * width * size)
                    few(_floats(row), some, _floats(place + 4 * first), width, padded, width, stride)
                line += 2
            if line < lines:
                row, place = rows + 4 * line * padded, out + 4 * (line * stride + key)
                one(_floats(row), element(keys), _floats(place), width, padded, width, stride)

    return score


def _gathering(dtype: str) -> Callable[..., None]:
    """Return what adds the weighed values of a block to the sums of lines."""
    half, element, size = dtype == "float16", _element(dtype), _size(dtype)
    few, one, rest = weigh(2, _CHUNKS, half=half), weigh(1, _CHUNKS, half=half), weigh(1, 1, half=half)
    whole = _CHUNKS * LANES

    @part(dtype, **_OPTIONS)
    def gather(lines, weights, stride, pool, block, sums, later):
        width, padded = pool.width, pool.padded
        for key in range(0, pool.block_tokens, LANES):
            if later != 0:
                for at in range(0, LANES * width * size, _LINE_BYTES):
                    prefetch(_bytes(later + key * width * size), at)
            values, chunk = block + key * width * size, 0
            while chunk + whole <= width:
                value, line = element(values + chunk * size), 0
                while line + 2 <= lines:
                    weight, place = weights + 4 * (line * stride + key), sums + 4 * (line * padded + chunk)
                    few(_floats(weight), value, _floats(place), LANES, stride, width, padded, whole)
                    line += 2
                if line < lines:
                    weight, place = weights + 4 * (line * stride + key), sums + 4 * (line * padded + chunk)
                    one(_floats(weight), value, _floats(place), LANES, stride, width, padded, whole)
                chunk += whole
            while chunk < width:
                value = element(values + chunk * size)
                for line in range(lines):
                    weight, place = weights + 4 * (line * stride + key), sums + 4 * (line * padded + chunk)
                    rest(_floats(weight), value, _floats(place), LANES, stride, width, padded, width - chunk)
                chunk += LANES

    return gather


def _element(dtype: str) -> Callable[..., Any]:
    return address(types.float32 if dtype == "float32" else types.uint16)


def _size(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _attending(dtype: str) -> Callable[..., None]:
    """Return what computes an item, and fetches for the following one."""
    score, gather = _scoring(dtype), _gathering(dtype)

    @part(dtype, **_OPTIONS)
    def attend_item(step, keys, values, item, following, scratch):
        _begin(step, keys, values, item, scratch)
        count = item.num_blocks * item.heads
        for place in range(count):
            block, line = _block(step, keys, item, place), place % item.heads * item.each
            later = _later(step, keys, values, item, following, place + _AHEAD)
            rows = scratch.rows + 4 * line * keys.padded
            scores = scratch.scores + 4 * (line * scratch.stride + place // item.heads * keys.block_tokens)
            score(item.each, rows, keys, block, scores, scratch.stride, later)
        _softmax(step, item, scratch, item.num_blocks * keys.block_tokens)
        for place in range(count):
            block, line = _block(step, values, item, place), place % item.heads * item.each
            later = _later(step, keys, values, item, following, count + place + _AHEAD)
            sums = scratch.sums + 4 * line * values.padded
            weights = scratch.scores + 4 * (line * scratch.stride + place // item.heads * keys.block_tokens)
            gather(item.each, weights, scratch.stride, values, block, sums, later)
        _finish(step, values, item, scratch)

    return attend_item


@njit(**_OPTIONS)
def _divided(area, keys, values, item):
    """The scratch area for an item."""
    lines, stride = item.lines, item.num_blocks * keys.block_tokens
    at = (area.ctypes.data + _LINE_BYTES - 1) // _LINE_BYTES * _LINE_BYTES
    rows = at + 4 * lines * stride
    sums = rows + 4 * lines * keys.padded
    return _Scratch(at, rows, sums, sums + 4 * lines * values.padded, stride)


@cache
def build(dtype: str) -> Any:
    """Return the kernel for keys and values of "float32", "bfloat16" or "float16", compiled.

    A function for C of the address of: how many parts of the items are claimed and how many there are, the
    numbers of `_Step`, of which the last two are the bits of float32, the addresses of keys and values, their
    widths, and the tokens of a block.
    """
    attend_item, size = _attending(dtype), _size(dtype)

    def attend(at):
        it = _integers(at)
        step = _Step(
            it[2], it[3], it[4], it[5], it[6], it[7], it[8], it[9], it[10], it[11], it[12], it[13], it[14],
            it[15], it[16], it[17], np.int32(it[18]).view(np.float32), np.int32(it[19]).view(np.float32),
        )  # fmt: skip
        keys, values, key_dim, value_dim, block_tokens = it[20], it[21], it[22], it[23], it[24]
        key_pad, value_pad = (key_dim + 15) // 16 * 16, (value_dim + 15) // 16 * 16
        key_pool = _Pool(keys, key_dim, key_pad, block_tokens * key_dim * size, block_tokens)
        value_pool = _Pool(values, value_dim, value_pad, block_tokens * value_dim * size, block_tokens)
        while True:
            part = claim(it, 1)
            if part >= it[1]:
                return
            begin, end = _start(step, part, it[1]), _start(step, part + 1, it[1])
            if begin >= end:
                continue
            most = _most(step, key_pool, value_pool, begin, end)
            area = np.empty(most + _LINE_BYTES // 4, np.float32)
            following, number = _item(step, begin, end, block_tokens), begin
            while number < end:
                item = following
                number += item.heads
                following = _item(step, min(number, end - 1), end, block_tokens)
                scratch = _divided(area, key_pool, value_pool, item)  # here, so that the area stays
                attend_item(step, key_pool, value_pool, item, following, scratch)

    options = {name: value for name, value in _OPTIONS.items() if name != "nogil"}  # C has no such lock
    return compiled_for_c(attend, f"paged-attention-{dtype}", **options)
