"""SIMD code for `low_rank`: the expand step, from ranks to outputs.

A few ranks at a time are added to all outputs, in order: each rank is read sequentially, which gives the
highest memory bandwidth, and an output has the same bits for any number of rows and ranks per call.
"""

# mypy: ignore-errors
# pyright: basic
from __future__ import annotations

from collections.abc import Callable

from numba import types
from numba.extending import intrinsic

from hotswap.kernels.simd import VectorBuilder

__all__ = ["expand"]


def expand(num_rows: int, num_ranks: int, *, half: bool) -> Callable[..., None]:
    """Return an intrinsic for the expand step: `out[row] += sum(weights[row, rank] * ranks[rank])`.

    Its arguments: pointers to weights (float32), ranks (float32, or 16 bits: float16 if `half`, else
    bfloat16) and sums (float32); the width; and the strides of weight rows, ranks and sum rows. Rows of sums
    are padded to a multiple of 16 elements.
    """

    @intrinsic
    def add(typing, weights, ranks, out, width, weight_stride, rank_stride, out_stride):
        signature = types.void(weights, ranks, out, *[types.int64] * 4)
        return signature, lambda context, builder, signature, arguments: _expand(
            context, VectorBuilder(builder, half), num_rows, num_ranks, *arguments
        )

    return add


def _expand(
    context, vec, num_rows, num_ranks, weights, ranks, out, width, weight_stride, rank_stride, out_stride
):
    factors = [
        [
            vec.spread(weights, vec.sum(vec.times(weight_stride, row), vec.number(rank)))
            for row in range(num_rows)
        ]
        for rank in range(num_ranks)
    ]

    def step(at, sums, masked):
        places = [vec.sum(vec.times(out_stride, row), at) for row in range(num_rows)]
        totals = [vec.load(out, place) for place in places]
        for rank in range(num_ranks):
            some = vec.load(ranks, vec.sum(vec.times(rank_stride, rank), at), masked)
            totals = [vec.fma(factors[rank][row], some, totals[row]) for row in range(num_rows)]
        for place, total in zip(places, totals, strict=True):
            vec.store(total, out, place)
        return sums

    vec.over_chunks(width, 0, step)
    return context.get_dummy_value()
