"""A tile of a product, and the transposition that packs weights for it, in vectors for numba's compiler.

A *word* is four bytes: a float32, or two neighbouring bfloat16, whose products the processor adds to a sum in
one instruction. A *panel* is the words of 32 outputs, those of the first input first: what a tile needs of it
next lies next in memory.
"""

# mypy: ignore-errors
# pyright: basic
from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hotswap.kernels.lanes import LANES, Code

__all__ = ["PANEL", "interleave", "tile", "transpose"]

PANEL = 32
_CHUNKS = PANEL // LANES
_RUN = 512  # words that are summed by themselves
_AHEAD = 16 * PANEL  # words between what is multiplied and what is fetched


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

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
    """Return what multiplies so many rows by a panel: `out[row, i] = sum(rows[row] * panel[:, i]) + bias[i]`.

    Its arguments are pointers to words of rows and of the panel, as float32, and to biases and results in
    their own dtype, bfloat16 if `pairs`; the words of a row; and how many words rows, and how many numbers
    rows of results, lie apart. With `fetches` the panel's memory is fetched before it is needed, which pays
    where there is much to do for each of its lines.

    A result is summed in float32 from the first word to the last, each 512 by themselves: else the last of
    thousands would be rounded by what the first ones made.
    """

    @intrinsic
    def multiply(typing, rows, panel, bias, out, depth, row_stride, out_stride):
        signature = types.void(rows, panel, bias, out, *[types.int64] * 3)
        return signature, lambda context, builder, signature, arguments: _tile(
            context, Code(builder, half=False), builder, (num_rows, pairs, fetches), *arguments
        )

    return multiply


def _tile(context, code, builder, kind, rows, panel, bias, out, depth, row_stride, out_stride):
    num_rows, pairs, fetches = kind
    places = [(row, chunk) for row in range(num_rows) for chunk in range(_CHUNKS)]

    none = [code.constant(0.0)] * len(places)

    def run(number, totals):
        begin = code.times(number, _RUN)
        left = builder.sub(depth, begin)
        count = builder.select(builder.icmp_signed("<", left, code.number(_RUN)), left, code.number(_RUN))
        sums = code.loop(count, 1, none, lambda at, sums: step(code.sum(begin, at), sums))
        return [builder.fadd(total, new) for total, new in zip(totals, sums, strict=True)]

    def step(at, sums):
        first = code.times(at, PANEL)
        weights = [code.load(panel, code.sum(first, code.number(c * LANES))) for c in range(_CHUNKS)]
        if fetches:
            for chunk in range(_CHUNKS):
                code.fetch(panel, code.sum(first, code.number(chunk * LANES + _AHEAD)))
        left = [code.spread(rows, code.sum(code.times(row_stride, row), at)) for row in range(num_rows)]
        return [
            _added(code, builder, pairs, left[row], weights[chunk], total)
            for (row, chunk), total in zip(places, sums, strict=True)
        ]

    num_runs = builder.sdiv(code.sum(depth, code.number(_RUN - 1)), code.number(_RUN))
    sums = code.loop(num_runs, 1, none, run)
    for (row, chunk), total in zip(places, sums, strict=True):
        at = code.number(chunk * LANES)
        result = builder.fadd(total, code.load(bias, at))
        to = code.sum(code.times(out_stride, row), at)
        if pairs:
            short = builder.fptrunc(result, _BFLOATS)
            builder.store(short, builder.bitcast(builder.gep(out, [to]), _BFLOATS.as_pointer()), align=2)
        else:
            code.store(result, out, to)
    return context.get_dummy_value()


def _added(code, builder, pairs, left, right, total):
    """`total` and the products of each lane, whose words are numbers or pairs of them."""
    if not pairs:
        return code.fma(left, right, total)
    kind = ir.FunctionType(_FLOATS, [_FLOATS, _PAIRS, _PAIRS])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return builder.call(function, [total, builder.bitcast(left, _PAIRS), builder.bitcast(right, _PAIRS)])


@intrinsic
def transpose(typing, source, stride, target):
    """Copy sixteen words of each of sixteen rows, `stride` apart, to sixteen lines of a panel."""

    def generate(context, builder, signature, arguments):
        source, stride, target = arguments
        code = Code(builder, half=False)

        def place(pointer, offset):
            return builder.bitcast(builder.gep(pointer, [offset]), _WORDS.as_pointer())

        rows = [builder.load(place(source, code.times(stride, row)), align=2) for row in range(LANES)]
        distance = LANES // 2
        while distance:  # the corners of ever smaller squares change places
            for row in range(LANES):
                if not row & distance:
                    rows[row], rows[row + distance] = _exchanged(
                        builder, rows[row], rows[row + distance], distance
                    )
            distance //= 2
        for column, words in enumerate(rows):
            builder.store(words, place(target, code.number(column * PANEL)), align=4)
        return context.get_dummy_value()

    return types.void(source, types.int64, target), generate


def interleave(*, pairs: bool) -> Callable[..., None]:
    """Return what copies the words of an input, or of a pair of inputs, of 32 outputs that lie side by side.

    Its arguments are pointers to the first input's weights, to the second one's, which are looked at for
    `pairs` alone, to what is to be fetched, and to a line of a panel.
    """

    @intrinsic
    def copy(typing, first, second, later, target):
        def generate(context, builder, signature, arguments):
            first, second, later, target = arguments
            code = Code(builder, half=False)
            code.fetch(later, code.number(0))
            whole = ir.VectorType(first.type.pointee, PANEL)
            upper, lower = (
                builder.load(builder.bitcast(pointer, whole.as_pointer()), align=2)
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


def _exchanged(builder, upper, lower, distance):
    """Two rows, whose parts of `distance` have changed places: the upper's right ones, the lower's left."""
    lanes = range(LANES)
    first = [lane if not lane & distance else LANES + lane - distance for lane in lanes]
    second = [lane + distance if not lane & distance else LANES + lane for lane in lanes]
    return (
        builder.shuffle_vector(upper, lower, ir.Constant(_WORDS, first)),
        builder.shuffle_vector(upper, lower, ir.Constant(_WORDS, second)),
    )
