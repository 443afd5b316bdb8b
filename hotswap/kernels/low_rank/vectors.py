"""How a few rows go up from ranks to outputs, written in vectors of sixteen for numba's compiler.

Some ranks at a time are added to all outputs, rank by rank: each is read from start to end, as memory gives
it fastest, and an output has the same bits however many rows and ranks are computed together.
"""

# mypy: ignore-errors
# pyright: basic
from __future__ import annotations

from collections.abc import Callable

from numba import types
from numba.extending import intrinsic

from hotswap.kernels.lanes import Code

__all__ = ["expand"]


def expand(num_rows: int, num_ranks: int, *, half: bool) -> Callable[..., None]:
    """Return what adds weighed ranks up: `out[row] += sum(weights[row, rank] * ranks[rank])`.

    Its arguments are pointers to float32 weights, ranks (float32, or 16 bits: float16 if `half`, else
    bfloat16), and float32 sums; the width; and how far apart rows of weights, ranks, and rows of sums lie.
    Rows of sums have room for a multiple of sixteen.
    """

    @intrinsic
    def add(typing, weights, ranks, out, width, weight_stride, rank_stride, out_stride):
        signature = types.void(weights, ranks, out, *[types.int64] * 4)
        return signature, lambda context, builder, signature, arguments: _expand(
            context, Code(builder, half), num_rows, num_ranks, *arguments
        )

    return add


def _expand(
    context, code, num_rows, num_ranks, weights, ranks, out, width, weight_stride, rank_stride, out_stride
):
    factors = [
        [
            code.spread(weights, code.sum(code.times(weight_stride, row), code.number(rank)))
            for row in range(num_rows)
        ]
        for rank in range(num_ranks)
    ]

    def step(at, sums, masked):
        places = [code.sum(code.times(out_stride, row), at) for row in range(num_rows)]
        totals = [code.load(out, place) for place in places]
        for rank in range(num_ranks):
            some = code.load(ranks, code.sum(code.times(rank_stride, rank), at), masked)
            totals = [code.fma(factors[rank][row], some, totals[row]) for row in range(num_rows)]
        for place, total in zip(places, totals, strict=True):
            code.store(total, out, place)
        return sums

    code.over_chunks(width, 0, step)
    return context.get_dummy_value()
