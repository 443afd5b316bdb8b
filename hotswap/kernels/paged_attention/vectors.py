"""Softmax, and what it weighs added up, written in vectors of sixteen for numba's compiler.

A result has the same bits however many rows and values are computed together, and on every processor.
"""

# mypy: ignore-errors
# pyright: basic
from __future__ import annotations

from collections.abc import Callable

from numba import types
from numba.extending import intrinsic

from hotswap.kernels.lanes import LANES, Code

__all__ = ["exponentials", "greatest", "weigh"]


@intrinsic
def greatest(typing, scores, count, scale):
    """The greatest of so many float32, a positive multiple of sixteen, times `scale`, leaving NaN out."""

    def generate(context, builder, signature, arguments):
        code = Code(builder, half=False)
        scores, count, scale = arguments
        scales = code.in_all(scale)

        def step(at, most):
            return [code.call("maxnum", builder.fmul(code.load(scores, at), scales), most[0])]

        (most,) = code.loop(count, LANES, [code.constant(float("-inf"))], step)
        return code.first(code.fold([most], lambda left, right: code.call("maxnum", left, right)))

    return types.float32(scores, types.int64, types.float32), generate


@intrinsic
def exponentials(typing, scores, count, scale, most):
    """Put `exp(score * scale - most)` in the place of so many float32 scores, and return the sum.

    A positive multiple of sixteen; `most` is no less than any `score * scale`. Sums are those of the lanes,
    which are added in pairs.
    """

    def generate(context, builder, signature, arguments):
        code = Code(builder, half=False)
        scores, count, scale, most = arguments
        scales, less = code.in_all(scale), code.in_all(builder.fneg(most))

        def step(at, sums):
            weights = code.exp(code.fma(code.load(scores, at), scales, less))
            code.store(weights, scores, at)
            return [builder.fadd(sums[0], weights)]

        return code.first(code.fold(code.loop(count, LANES, [code.constant(0.0)], step)))

    return types.float32(scores, types.int64, types.float32, types.float32), generate


def weigh(num_rows: int, num_chunks: int, *, half: bool) -> Callable[..., None]:
    """Return what adds weighed values up: `out[row] += sum(weights[row, key] * values[key])`, key by key.

    So many chunks of sixteen of a value at once. Its arguments are pointers to float32 weights, values as
    keys of `dots`, and float32 sums; the number of keys; how far apart rows of weights, values, and rows of
    sums lie; and how many numbers of a value there are, where that is no multiple of sixteen.
    """

    @intrinsic
    def add(typing, weights, values, out, num_keys, weight_stride, value_stride, out_stride, width):
        signature = types.void(weights, values, out, *[types.int64] * 5)
        return signature, lambda context, builder, signature, arguments: _weigh(
            context, Code(builder, half), num_rows, num_chunks, *arguments
        )

    return add


def _weigh(
    context,
    code,
    num_rows,
    num_chunks,
    weights,
    values,
    out,
    num_keys,
    weight_stride,
    value_stride,
    out_stride,
    width,
):
    places = [(row, chunk) for row in range(num_rows) for chunk in range(num_chunks)]
    at = [code.sum(code.times(out_stride, row), code.number(chunk * LANES)) for row, chunk in places]
    masked = width if num_chunks == 1 else None

    def step(key, sums):
        row_of = code.product(key, value_stride)
        value = [
            code.load(values, code.sum(row_of, code.number(chunk * LANES)), masked)
            for chunk in range(num_chunks)
        ]
        weight = [
            code.spread(weights, code.sum(code.times(weight_stride, row), key)) for row in range(num_rows)
        ]
        return [code.fma(weight[row], value[chunk], sums[i]) for i, (row, chunk) in enumerate(places)]

    sums = code.loop(num_keys, 1, [code.load(out, place) for place in at], step)
    for place, total in zip(at, sums, strict=True):
        code.store(total, out, place)
    return context.get_dummy_value()
