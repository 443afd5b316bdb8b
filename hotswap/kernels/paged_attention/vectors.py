"""SIMD code for `paged_attention`: softmax, and the weighted sum of values.

A result has the same bits for any number of rows and values per call, and on every processor.
"""

# mypy: ignore-errors
# pyright: basic
from __future__ import annotations

from collections.abc import Callable

from numba import types
from numba.extending import intrinsic

from hotswap.kernels.simd import LANES, VectorBuilder

__all__ = ["exponentials", "greatest", "weigh"]


@intrinsic
def greatest(typing, scores, count, scale):
    """Return the maximum of `count` float32, a positive multiple of 16, times `scale`; NaN is ignored."""

    def generate(context, builder, signature, arguments):
        vec = VectorBuilder(builder, half=False)
        scores, count, scale = arguments
        scales = vec.in_all(scale)

        def step(at, most):
            return [vec.call("maxnum", builder.fmul(vec.load(scores, at), scales), most[0])]

        (most,) = vec.loop(count, LANES, [vec.constant(float("-inf"))], step)
        return vec.first(vec.fold([most], lambda left, right: vec.call("maxnum", left, right)))

    return types.float32(scores, types.int64, types.float32), generate


@intrinsic
def exponentials(typing, scores, count, scale, most):
    """Replace `count` float32 scores by `exp(score * scale - most)`, and return their sum.

    `count` is a positive multiple of 16; `most` is the maximum of `score * scale`. There is one sum per lane,
    then a tree over the lanes.
    """

    def generate(context, builder, signature, arguments):
        vec = VectorBuilder(builder, half=False)
        scores, count, scale, most = arguments
        scales, less = vec.in_all(scale), vec.in_all(builder.fneg(most))

        def step(at, sums):
            weights = vec.exp(vec.fma(vec.load(scores, at), scales, less))
            vec.store(weights, scores, at)
            return [builder.fadd(sums[0], weights)]

        return vec.first(vec.fold(vec.loop(count, LANES, [vec.constant(0.0)], step)))

    return types.float32(scores, types.int64, types.float32, types.float32), generate


def weigh(num_rows: int, num_chunks: int, *, half: bool) -> Callable[..., None]:
    """Return an intrinsic for weighted sums: `out[row] += sum(weights[row, key] * values[key])`, key by key.

    Computes `num_chunks` chunks of 16 elements of a value at once. Its arguments: pointers to weights
    (float32), values (like the keys of `dots`) and sums (float32); the number of keys; the strides of weight
    rows, values and sum rows; and the number of elements of a value, used if `num_chunks` is 1.
    """

    @intrinsic
    def add(typing, weights, values, out, num_keys, weight_stride, value_stride, out_stride, width):
        signature = types.void(weights, values, out, *[types.int64] * 5)
        return signature, lambda context, builder, signature, arguments: _weigh(
            context, VectorBuilder(builder, half), num_rows, num_chunks, *arguments
        )

    return add


def _weigh(
    context,
    vec,
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
    at = [vec.sum(vec.times(out_stride, row), vec.number(chunk * LANES)) for row, chunk in places]
    masked = width if num_chunks == 1 else None

    def step(key, sums):
        row_of = vec.product(key, value_stride)
        value = [
            vec.load(values, vec.sum(row_of, vec.number(chunk * LANES)), masked)
            for chunk in range(num_chunks)
        ]
        weight = [vec.spread(weights, vec.sum(vec.times(weight_stride, row), key)) for row in range(num_rows)]
        return [vec.fma(weight[row], value[chunk], sums[i]) for i, (row, chunk) in enumerate(places)]

    sums = vec.loop(num_keys, 1, [vec.load(out, place) for place in at], step)
    for place, total in zip(at, sums, strict=True):
        vec.store(total, out, place)
    return context.get_dummy_value()
