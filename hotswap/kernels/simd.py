"""SIMD helpers for CPU kernels compiled by numba: LLVM vectors of 16 lanes.

An auto-vectorizing compiler chooses the order of sums by itself, and may choose another one for one row than
for four. These helpers fix the order, so a result has the same bits for any batch size. On processors with
shorter vectors LLVM splits each vector into several.
"""

# mypy: ignore-errors
# pyright: basic
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["LANES", "VectorBuilder", "dots", "fetch_add", "pointer_to", "prefetch", "sum_of_squares"]

LANES = 16

_I8, _I16, _I32 = (ir.IntType(bits) for bits in (8, 16, 32))
_F32 = ir.FloatType()
_VECTOR, _INTEGERS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
# Coefficients of (exp(r) - 1 - r) / r**2 in float32, highest power first (Cephes, expf).
_EXP = (
    0.00019875691214110702,
    0.0013981999363750219,
    0.008333452045917511,
    0.04166579619050026,
    0.1666666567325592,
    0.5,
)


def pointer_to(element: types.Type) -> Callable[..., Any]:
    """Return an intrinsic that converts an integer address to a pointer to elements."""

    @intrinsic
    def pointer(typing, at):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(types.CPointer(element)))

        return types.CPointer(element)(types.int64), generate

    return pointer


@intrinsic
def prefetch(typing, pointer, offset):
    """Prefetch the cache line of `pointer[offset]`."""

    def generate(context, builder, signature, arguments):
        VectorBuilder(builder, half=False).fetch(*arguments)
        return context.get_dummy_value()

    return types.void(pointer, types.int64), generate


@intrinsic
def fetch_add(typing, counter, count):
    """Add atomically to an int64 that threads share, and return its previous value."""

    def generate(context, builder, signature, arguments):
        counter, count = arguments
        return builder.atomic_rmw("add", counter, count, "seq_cst")

    return types.int64(counter, types.int64), generate


@intrinsic
def sum_of_squares(typing, numbers, count):
    """Return the sum of the squares of `count` float32: one sum per lane, then a tree over the lanes."""

    def generate(context, builder, signature, arguments):
        numbers, count = arguments
        vec = VectorBuilder(builder, half=False)

        def step(at, sums, masked):
            some = vec.load(numbers, at, masked)
            return [vec.fma(some, some, sums[0])]

        return vec.first(vec.fold(vec.over_chunks(count, 1, step)))

    return types.float32(numbers, types.int64), generate


def dots(num_rows: int, num_keys: int, *, half: bool) -> Callable[..., None]:
    """Return an intrinsic for dot products of rows and keys: `out[row, key] = sum(rows[row] * keys[key])`.

    Its arguments: pointers to rows (float32), keys (float32, or 16 bits: float16 if `half`, else bfloat16)
    and results (float32); the width; and the strides of rows, keys and result rows in elements. Rows are
    padded with zeros to a multiple of 16 elements.
    """

    @intrinsic
    def multiply(typing, rows, keys, out, width, row_stride, key_stride, out_stride):
        signature = types.void(rows, keys, out, *[types.int64] * 4)
        return signature, lambda context, builder, signature, arguments: _dots(
            context, VectorBuilder(builder, half), num_rows, num_keys, *arguments
        )

    return multiply


def _dots(context, vec, num_rows, num_keys, rows, keys, out, width, row_stride, key_stride, out_stride):
    products = [(row, key) for row in range(num_rows) for key in range(num_keys)]

    def step(at, sums, masked):
        left = [vec.load(rows, vec.sum(vec.times(row_stride, row), at)) for row in range(num_rows)]
        places = [vec.sum(vec.times(key_stride, key), at) for key in range(num_keys)]
        right = [vec.load(keys, place, masked) for place in places]
        return [vec.fma(left[row], right[key], sums[i]) for i, (row, key) in enumerate(products)]

    sums = vec.over_chunks(width, len(products), step)
    for row in range(num_rows):
        folded = vec.fold(sums[row * num_keys : (row + 1) * num_keys])
        vec.store(folded, out, vec.times(out_stride, row))
    return context.get_dummy_value()


class VectorBuilder:
    """Emits LLVM instructions for vectors of 16 float32 lanes."""

    def __init__(self, builder: ir.IRBuilder, half: bool) -> None:
        self._builder, self._half = builder, half

    def number(self, value):
        """Return an int64 constant."""
        return ir.Constant(ir.IntType(64), value)

    def constant(self, value):
        """Return a vector with a float32 constant in every lane."""
        return ir.Constant(_VECTOR, [value] * LANES)

    def times(self, value, factor):
        return self._builder.mul(value, self.number(factor))

    def product(self, left, right):
        return self._builder.mul(left, right)

    def sum(self, left, right):
        return self._builder.add(left, right)

    def loop(self, end, stride, initial, step):
        """Emit a loop: `sums = step(at, sums)` for `at` in `range(0, end, stride)`, with `end > 0`."""
        builder = self._builder
        before = builder.block
        body, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
        builder.branch(body)
        builder.position_at_end(body)
        at = builder.phi(end.type)
        at.add_incoming(self.number(0), before)
        sums = [builder.phi(_VECTOR) for _ in initial]
        for phi, value in zip(sums, initial, strict=True):
            phi.add_incoming(value, before)
        made = step(at, sums)
        following = builder.add(at, self.number(stride))
        at.add_incoming(following, builder.block)
        for phi, value in zip(sums, made, strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, end), body, after)
        builder.position_at_end(after)
        return made

    def over_chunks(self, width, count, step):
        """Emit `step` for each chunk of 16 elements, and with a mask for the rest; sums start at zero."""
        builder = self._builder
        full = builder.and_(width, self.number(-LANES))
        sums = [self.constant(0.0)] * count
        sums = self._if(
            builder.icmp_signed(">", full, self.number(0)),
            sums,
            lambda: self.loop(full, LANES, sums, lambda at, now: step(at, now, None)),
        )
        rest = builder.sub(width, full)
        some = builder.icmp_signed(">", rest, self.number(0))
        return self._if(some, sums, lambda: step(full, sums, rest))

    def _if(self, condition, otherwise, make):
        """Emit `make` under a condition; its vectors, or else `otherwise`."""
        builder = self._builder
        before = builder.block
        with builder.if_then(condition):
            made = make()
            inside = builder.block
        chosen = []
        for new, old in zip(made, otherwise, strict=True):
            phi = builder.phi(_VECTOR)
            phi.add_incoming(new, inside)
            phi.add_incoming(old, before)
            chosen.append(phi)
        return chosen

    def load(self, pointer, offset, count=None):
        """Load 16 elements as float32; with `count`, later lanes are zero and not read from memory."""
        builder = self._builder
        element = pointer.type.pointee
        vector = ir.VectorType(element, LANES)
        at = builder.bitcast(builder.gep(pointer, [offset]), vector.as_pointer())
        size = 4 if element == _F32 else 2
        loaded = builder.load(at, align=size) if count is None else self._masked(at, vector, size, count)
        if element == _F32:
            return loaded
        if self._half:
            return builder.fpext(builder.bitcast(loaded, ir.VectorType(ir.HalfType(), LANES)), _VECTOR)
        wide = builder.shl(builder.zext(loaded, _INTEGERS), ir.Constant(_INTEGERS, [16] * LANES))
        return builder.bitcast(wide, _VECTOR)  # bfloat16 is the upper half of a float32

    def _masked(self, at, vector, size, count):
        builder = self._builder
        lanes = ir.VectorType(ir.IntType(64), LANES)
        counts = self._spread(count, lanes)
        mask = builder.icmp_signed("<", ir.Constant(lanes, list(range(LANES))), counts)
        name = "f32" if vector.element == _F32 else "i16"
        kind = ir.FunctionType(vector, [at.type, _I32, mask.type, vector])
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.v{LANES}{name}.p0")
        none = ir.Constant(vector, None)
        return builder.call(function, [at, ir.Constant(_I32, size), mask, none])

    def fetch(self, pointer, offset):
        """Emit a prefetch of the cache line of `pointer[offset]`."""
        builder, bytes_type = self._builder, _I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [bytes_type, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        line = builder.bitcast(builder.gep(pointer, [offset]), bytes_type)
        builder.call(function, [line, *(ir.Constant(_I32, number) for number in (0, 3, 1))])

    def spread(self, pointer, offset):
        """Load one float32 into every lane."""
        return self._spread(self._builder.load(self._builder.gep(pointer, [offset])), _VECTOR)

    def _spread(self, value, vector):
        builder = self._builder
        first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_I32, 0))
        return builder.shuffle_vector(
            first, ir.Constant(vector, ir.Undefined), ir.Constant(_INTEGERS, [0] * LANES)
        )

    def in_all(self, value):
        """Return a vector with one float32 value in every lane."""
        return self._spread(value, _VECTOR)

    def first(self, vector):
        """Return the first lane."""
        return self._builder.extract_element(vector, ir.Constant(_I32, 0))

    def call(self, name, *vectors):
        """Call an LLVM vector intrinsic by name."""
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * len(vectors))
        function = cgutils.get_or_insert_function(self._builder.module, kind, f"llvm.{name}.v{LANES}f32")
        return self._builder.call(function, vectors)

    def fma(self, left, right, total):
        """Return `left * right + total`, rounded once."""
        return self.call("fma", left, right, total)

    def exp(self, x):
        """Return `e ** x` for x <= 0, and 0 for x < -87; as in Cephes, to about one ulp. NaN stays NaN."""
        builder, constant = self._builder, self.constant
        bounded = self.call("maxnum", x, constant(-87.0))
        n = self.call("floor", self.fma(bounded, constant(1.4426950216293335), constant(0.5)))
        r = self.fma(n, constant(-0.693359375), bounded)
        r = self.fma(n, constant(0.00021219444170128554), r)
        p = constant(_EXP[0])
        for coefficient in _EXP[1:]:
            p = self.fma(p, r, constant(coefficient))
        p = builder.fadd(self.fma(p, builder.fmul(r, r), r), constant(1.0))
        exponent = builder.add(builder.fptosi(n, _INTEGERS), ir.Constant(_INTEGERS, [127] * LANES))
        power = builder.bitcast(builder.shl(exponent, ir.Constant(_INTEGERS, [23] * LANES)), _VECTOR)
        tiny = builder.fcmp_ordered("<", x, constant(-87.0))
        finite = builder.select(tiny, constant(0.0), builder.fmul(p, power))
        return builder.select(builder.fcmp_unordered("uno", x, x), x, finite)

    def store(self, vector, pointer, offset):
        at = self._builder.gep(pointer, [offset])
        self._builder.store(vector, self._builder.bitcast(at, vector.type.as_pointer()), align=4)

    def fold(self, vectors, add=None):
        """Reduce each vector over its lanes: a vector of `len(vectors)` sums, a power of two, at most 16.

        Halves are added first, then quarters, eighths and single lanes. Each step packs the halves of two
        vectors into one, while there are two.
        """
        add = add or self._builder.fadd
        half, where = LANES // 2, [[number] * LANES for number in range(len(vectors))]
        while half:
            if len(vectors) > 1:
                pairs = list(zip(range(0, len(vectors), 2), range(1, len(vectors), 2), strict=True))
            else:
                pairs = [(0, 0)]
            vectors, where = (
                [self._add_halves(vectors[left], vectors[right], half, add) for left, right in pairs],
                [_joined(where[left], where[right], half) for left, right in pairs],
            )
            half //= 2
        count = len(set(where[0]))
        lanes = ir.VectorType(_I32, count)
        order = [where[0].index(number) for number in range(count)]
        return self._builder.shuffle_vector(vectors[0], vectors[0], ir.Constant(lanes, order))

    def _add_halves(self, left, right, half, add):
        """Add the first and the second half of each group of `2 * half` lanes, of both vectors."""
        builder = self._builder
        parts = []
        for offset in (0, half):
            lanes = []
            for group in range(0, LANES, 2 * half):
                first = [group + offset + lane for lane in range(half)]
                lanes += [*first, *(LANES + lane for lane in first)]
            parts.append(builder.shuffle_vector(left, right, ir.Constant(_INTEGERS, lanes)))
        return add(*parts)


def _joined(left, right, half):
    """Return which vector each lane belongs to after two vectors were folded into one."""
    lanes = []
    for group in range(0, LANES, 2 * half):
        lanes += [*left[group : group + half], *right[group : group + half]]
    return lanes
