"""SIMD code for `packed_linear`: a tile of the product, and the transposition that packs weights.

A *word* is four bytes: one float32, or two adjacent bfloat16, whose products one instruction (`vdpbf16ps`)
adds to a sum. A *panel* has the words of 32 outputs, ordered by input, so that a tile reads it sequentially.
"""

# mypy: ignore-errors
# pyright: basic
from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hotswap.kernels.simd import LANES, VectorBuilder

__all__ = ["PANEL", "interleave", "tile", "transpose"]

PANEL = 32
_CHUNKS = PANEL // LANES
_RUN = 512  # words in each partial sum
_AHEAD = 16 * PANEL  # prefetch distance, in words


class _BFloat(ir.Type):
    """LLVM's bfloat type, which llvmlite does not define."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _BFloat)

    def __hash__(self):
        return hash(_BFloat)


_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_BFLOATS, _PAIRS = ir.VectorType(_BFloat(), LANES), ir.VectorType(_BFloat(), 2 * LANES)
_WORDS = ir.VectorType(ir.IntType(32), LANES)


def tile(num_rows: int, *, pairs: bool, fetches: bool) -> Callable[..., None]:
    """Return an intrinsic for one tile: `out[row, i] = sum(rows[row] * panel[:, i]) + bias[i]`.

    Its arguments: pointers to the words of the rows and of the panel, as float32, and to biases and results
    in their own dtype, bfloat16 if `pairs`; the words of a row; the stride of rows in words, and of result
    rows in elements. With `fetches` the panel is prefetched, which is faster for tiles of many rows.

    A result is summed in float32 in order, with one partial sum for each 512 words, which reduces the
    rounding error of long sums.
    """

    @intrinsic
    def multiply(typing, rows, panel, bias, out, depth, row_stride, out_stride):
        signature = types.void(rows, panel, bias, out, *[types.int64] * 3)
        return signature, lambda context, builder, signature, arguments: _tile(
            context, VectorBuilder(builder, half=False), builder, (num_rows, pairs, fetches), *arguments
        )

    return multiply


def _tile(context, vec, builder, kind, rows, panel, bias, out, depth, row_stride, out_stride):
    num_rows, pairs, fetches = kind
    places = [(row, chunk) for row in range(num_rows) for chunk in range(_CHUNKS)]

    none = [vec.constant(0.0)] * len(places)

    def run(number, totals):
        begin = vec.times(number, _RUN)
        left = builder.sub(depth, begin)
        count = builder.select(builder.icmp_signed("<", left, vec.number(_RUN)), left, vec.number(_RUN))
        sums = vec.loop(count, 1, none, lambda at, sums: step(vec.sum(begin, at), sums))
        return [builder.fadd(total, new) for total, new in zip(totals, sums, strict=True)]

    def step(at, sums):
        first = vec.times(at, PANEL)
        weights = [vec.load(panel, vec.sum(first, vec.number(c * LANES))) for c in range(_CHUNKS)]
        if fetches:
            for chunk in range(_CHUNKS):
                vec.fetch(panel, vec.sum(first, vec.number(chunk * LANES + _AHEAD)))
        left = [vec.spread(rows, vec.sum(vec.times(row_stride, row), at)) for row in range(num_rows)]
        return [
            _fused_add(vec, builder, pairs, left[row], weights[chunk], total)
            for (row, chunk), total in zip(places, sums, strict=True)
        ]

    num_runs = builder.sdiv(vec.sum(depth, vec.number(_RUN - 1)), vec.number(_RUN))
    sums = vec.loop(num_runs, 1, none, run)
    for (row, chunk), total in zip(places, sums, strict=True):
        at = vec.number(chunk * LANES)
        result = builder.fadd(total, vec.load(bias, at))
        to = vec.sum(vec.times(out_stride, row), at)
        if pairs:
            short = builder.fptrunc(result, _BFLOATS)
            builder.store(short, builder.bitcast(builder.gep(out, [to]), _BFLOATS.as_pointer()), align=2)
        else:
            vec.store(result, out, to)
    return context.get_dummy_value()


def _fused_add(vec, builder, pairs, left, right, total):
    """Return `total + left * right` in each lane; a word is one number or a pair."""
    if not pairs:
        return vec.fma(left, right, total)
    kind = ir.FunctionType(_FLOATS, [_FLOATS, _PAIRS, _PAIRS])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return builder.call(function, [total, builder.bitcast(left, _PAIRS), builder.bitcast(right, _PAIRS)])


@intrinsic
def transpose(typing, source, stride, target):
    """Copy 16 words of each of 16 rows, `stride` words apart, to 16 lines of a panel."""

    def generate(context, builder, signature, arguments):
        source, stride, target = arguments
        vec = VectorBuilder(builder, half=False)

        def place(pointer, offset):
            return builder.bitcast(builder.gep(pointer, [offset]), _WORDS.as_pointer())

        rows = [builder.load(place(source, vec.times(stride, row)), align=2) for row in range(LANES)]
        distance = LANES // 2
        while distance:  # swap the off-diagonal blocks of ever smaller squares
            for row in range(LANES):
                if not row & distance:
                    rows[row], rows[row + distance] = _swapped(
                        builder, rows[row], rows[row + distance], distance
                    )
            distance //= 2
        for column, words in enumerate(rows):
            builder.store(words, place(target, vec.number(column * PANEL)), align=4)
        return context.get_dummy_value()

    return types.void(source, types.int64, target), generate


def interleave(*, pairs: bool) -> Callable[..., None]:
    """Return an intrinsic that copies the weights of one input (or a pair) for 32 contiguous outputs.

    Its arguments: pointers to the weights of the first input, to those of the second (read for `pairs` only),
    to memory to prefetch, and to a line of a panel.
    """

    @intrinsic
    def copy(typing, first, second, later, target):
        def generate(context, builder, signature, arguments):
            first, second, later, target = arguments
            vec = VectorBuilder(builder, half=False)
            vec.fetch(later, vec.number(0))
            vector = ir.VectorType(first.type.pointee, PANEL)
            upper, lower = (
                builder.load(builder.bitcast(pointer, vector.as_pointer()), align=2)
                for pointer in ((first, second) if pairs else (first, first))
            )
            if pairs:
                order = [number // 2 + PANEL * (number % 2) for number in range(2 * PANEL)]
                lanes = ir.VectorType(ir.IntType(32), 2 * PANEL)
                upper = builder.shuffle_vector(upper, lower, ir.Constant(lanes, order))
            builder.store(upper, builder.bitcast(target, upper.type.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(first, second, later, target), generate

    return copy


def _swapped(builder, upper, lower, distance):
    """Swap the right parts of the upper row with the left parts of the lower row, `distance` lanes each."""
    lanes = range(LANES)
    first = [lane if not lane & distance else LANES + lane - distance for lane in lanes]
    second = [lane + distance if not lane & distance else LANES + lane for lane in lanes]
    return (
        builder.shuffle_vector(upper, lower, ir.Constant(_WORDS, first)),
        builder.shuffle_vector(upper, lower, ir.Constant(_WORDS, second)),
    )
