"""Paged attention on a CPU, over the KV blocks of requests, compiled by numba.

An *item* is the rows of a tile with the query heads of one KV head. For a single row it has the query heads
of several KV heads: their keys are adjacent in a block, and sequential reads are twice as fast as reading
every eighth page. Queries are copied to a scratch buffer, scores are computed block by block and turned into
weights, and values are added block by block. If heads are computed one by one, later blocks are prefetched.
The arguments are an array of int64, which the threads share. Each thread takes one part of the items after
another from a shared counter.
"""

# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import njit, types

from hotswap.kernels.compiling import compiled_for_c, specialized
from hotswap.kernels.paged_attention.vectors import exponentials, greatest, weigh
from hotswap.kernels.simd import LANES, dots, fetch_add, pointer_to, prefetch

__all__ = ["build"]

_KEYS = 8  # keys that are multiplied together
_CHUNKS = 4  # chunks of a value that are added together
_MOST_SCORES = 1 << 22  # scores of the heads that are computed together
_AHEAD = 2  # prefetch distance, in blocks
_LINE_BYTES = 64
_OPTIONS: Any = {"nogil": True, "error_model": "numpy", "fastmath": {"contract", "nsz"}}
_HIDDEN = np.float32(-np.inf)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)

_floats = pointer_to(types.float32)
_bytes = pointer_to(types.uint8)
_ints = pointer_to(types.int32)
_integers = pointer_to(types.int64)


class _Step(NamedTuple):
    """The arguments of a step. The first nine are addresses; `hidden` and `sinks` may be 0, for none."""

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
    """A pool of keys or values: address, elements of a vector, the same padded, and the size of a block."""

    at: int
    width: int
    padded: int
    head_bytes: int
    block_tokens: int


class _Item(NamedTuple):
    """Rows from `start` on for some KV heads; `table` is the address of the first entry of its block table.

    Attributes:
        each: Lines (row, query head) of each KV head.
        lines: Lines of all KV heads, head by head.
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
    """Addresses of float32 scratch: for each line its scores, `stride` apart, its query, sums and total."""

    scores: int
    rows: int
    sums: int
    totals: int
    stride: int


@njit(**_OPTIONS)
def _extent(step, tile):
    """Return the range of positions that the rows of a tile attend to: first, end."""
    start, count = _ints(step.tiles)[3 * tile + 1], _ints(step.tiles)[3 * tile + 2]
    low, high = np.int64(1) << 30, np.int64(0)
    for row in range(start, start + count):
        low, high = min(low, _ints(step.firsts)[row]), max(high, _ints(step.lasts)[row])
    return low, high


@njit(**_OPTIONS)
def _start(step, part, parts):
    """Return the first (tile, KV head) of a part, as one number; all parts have about equal work.

    For the part after the last, return the total number.
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
    """Return the item that begins at a (tile, KV head) number: of a single row it has several heads."""
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
    """Return the floats of scratch memory that the largest item of a part needs."""
    most, number = np.int64(0), begin
    while number < end:
        item = _item(step, number, end, keys.block_tokens)
        most = max(most, item.lines * (item.num_blocks * keys.block_tokens + keys.padded + values.padded + 1))
        number += item.heads
    return most


@njit(**_OPTIONS)
def _block(step, pool, item, place):
    """Return the address of the keys or values of a (block, head) of an item."""
    block, head = np.int64(_ints(item.table)[place // item.heads]), item.head + place % item.heads
    return pool.at + (block * step.kv_heads + head) * pool.head_bytes


@njit(**_OPTIONS)
def _later(step, keys, values, item, following, place):
    """Return the address to prefetch at a place: an item's keys, its values, then the next item's keys.

    0 if heads are computed together: the processor prefetches sequential reads by itself, and sooner.
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
    """Return the row of a line, an index of `order`, and its query head."""
    within = line % item.each
    head = (item.head + line // item.each) * step.group + within % step.group
    return item.start + within // step.group, head


@njit(**_OPTIONS)
def _begin(step, keys, values, item, scratch):
    """Copy queries, padded with zeros, and clear the sums."""
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
    """Set scores to minus infinity before `first`, from `last` on, and where `mask` (0: none) is nonzero."""
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
    """Turn scores into unnormalized weights, up to a multiple of 16, and store their sums in `totals`.

    Sums have 16 lanes, by position. Scores at hidden positions may be NaN.
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
    """Return the function that multiplies lines by the keys of a block."""
    half, element, size = dtype == "float16", _element(dtype), _size(dtype)
    few, one = dots(2, _KEYS, half=half), dots(1, 2 * _KEYS, half=half)

    @specialized(dtype, **_OPTIONS)
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
    """Return the function that adds the weighted values of a block to the sums of lines."""
    half, element, size = dtype == "float16", _element(dtype), _size(dtype)
    few, one, rest = weigh(2, _CHUNKS, half=half), weigh(1, _CHUNKS, half=half), weigh(1, 1, half=half)
    at_once = _CHUNKS * LANES

    @specialized(dtype, **_OPTIONS)
    def gather(lines, weights, stride, pool, block, sums, later):
        width, padded = pool.width, pool.padded
        for key in range(0, pool.block_tokens, LANES):
            if later != 0:
                for at in range(0, LANES * width * size, _LINE_BYTES):
                    prefetch(_bytes(later + key * width * size), at)
            values, chunk = block + key * width * size, 0
            while chunk + at_once <= width:
                value, line = element(values + chunk * size), 0
                while line + 2 <= lines:
                    weight, place = weights + 4 * (line * stride + key), sums + 4 * (line * padded + chunk)
                    few(_floats(weight), value, _floats(place), LANES, stride, width, padded, at_once)
                    line += 2
                if line < lines:
                    weight, place = weights + 4 * (line * stride + key), sums + 4 * (line * padded + chunk)
                    one(_floats(weight), value, _floats(place), LANES, stride, width, padded, at_once)
                chunk += at_once
            while chunk < width:
                value = element(values + chunk * size)
                for line in range(lines):
                    weight, place = weights + 4 * (line * stride + key), sums + 4 * (line * padded + chunk)
                    rest(_floats(weight), value, _floats(place), LANES, stride, width, padded, width - chunk)
                chunk += LANES

    return gather


def _element(dtype: str) -> Callable[..., Any]:
    return pointer_to(types.float32 if dtype == "float32" else types.uint16)


def _size(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _attending(dtype: str) -> Callable[..., None]:
    """Return the function that computes an item and prefetches for the next one."""
    score, gather = _scoring(dtype), _gathering(dtype)

    @specialized(dtype, **_OPTIONS)
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
    """Divide the scratch buffer for an item."""
    lines, stride = item.lines, item.num_blocks * keys.block_tokens
    at = (area.ctypes.data + _LINE_BYTES - 1) // _LINE_BYTES * _LINE_BYTES
    rows = at + 4 * lines * stride
    sums = rows + 4 * lines * keys.padded
    return _Scratch(at, rows, sums, sums + 4 * lines * values.padded, stride)


@cache
def build(dtype: str) -> Any:
    """Return the kernel for keys and values of "float32", "bfloat16" or "float16", compiled.

    A C function that takes the address of its arguments: the number of parts taken so far, the number of
    parts, the fields of `_Step` (the last two are the bits of float32), the addresses of keys and values,
    their widths, and the tokens of a block.
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
            part = fetch_add(it, 1)
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
                scratch = _divided(area, key_pool, value_pool, item)  # here, so that the buffer stays alive
                attend_item(step, key_pool, value_pool, item, following, scratch)

    options = {name: value for name, value in _OPTIONS.items() if name != "nogil"}  # C functions have no GIL
    return compiled_for_c(attend, f"paged-attention-{dtype}", **options)
