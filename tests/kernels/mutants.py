"""Faults planted in kernels, each with the check that is to find it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["MUTANTS", "Mutant"]

_FP8, _BOUNDS = "check_fp8_gemm.py", "check_fp8_gemm_bounds.py::test_nothing_out_of_range_is_touched"
_KERNEL = "fp8_gemm/kernel.py"
_ERROR = f"{_FP8}::test_the_error_is_that_of_rounding_the_result"
_CODES = f"{_FP8}::test_every_finite_code_decodes_exactly"
_WHOLE = f"{_FP8}::test_weights_are_made_whole_to_the_bit"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault.

    Attributes:
        name: What is wrong.
        file: Where, from `hotswap/kernels` on.
        before: What stands there; once, or the first of several is meant.
        after: What stands there instead.
        check: What finds it, from `interpreted` on.
    """

    name: str
    file: str
    before: str
    after: str
    check: str


MUTANTS: Final = (
    Mutant("rows of x that are not there", _KERNEL, "tl.where(rm < M, rm, 0)", "rm", _BOUNDS),
    Mutant("rows of w that are not there", _KERNEL, "tl.where(rn < N, rn, 0)", "rn", _BOUNDS),
    Mutant(
        "words behind a row", _KERNEL, "[None, :] < w_row, other", "[None, :] < w_row + 64, other", _BOUNDS
    ),
    Mutant("columns behind a row of x", _KERNEL, "k + x_rk < K", "k + x_rk < K + 64", _BOUNDS),
    Mutant(
        "a last step taken for a whole one",
        "fp8_gemm/launch.py",
        "width % tile.block_k == 0",
        "True",
        _BOUNDS,
    ),
    Mutant("every group scaled as the first", _KERNEL, "s_at + k // GROUP", "s_at", _ERROR),
    Mutant("whole weights scaled as the first group", _KERNEL, "s_row + k // GROUP", "s_row", _WHOLE),
    Mutant("a part that nobody adds", _KERNEL, "range(0, num_parts)", "range(1, num_parts)", _ERROR),
    Mutant(
        "steps lost where parts are uneven",
        _KERNEL,
        "BLOCK_K), num_parts)",
        "BLOCK_K) // num_parts, 1)",
        _FP8 + "::test_a_workspace_serves_products_of_many_sizes_in_turn",
    ),
    Mutant("the first adds, not the last", _KERNEL, "before == num_parts - 1", "before == 0", _ERROR),
    Mutant(
        "counters left as they are",
        _KERNEL,
        "tl.store(count_ptr + tile, 0)",
        "pass",
        _FP8 + "::test_a_workspace_serves_products_of_many_sizes_in_turn",
    ),
    Mutant(
        "a store without a mask",
        _KERNEL,
        "inside = (rm[:, None] < M) & (rn[None, :] < N)",
        "inside = (rm[:, None] < M) & (rn[None, :] < N + 64)",
        _FP8 + "::test_nothing_beside_the_result_is_written",
    ),
    Mutant(
        "rows written that are not there",
        _KERNEL,
        "inside = (rm[:, None] < M) &",
        "inside = (rm[:, None] < M + 1) &",
        _FP8 + "::test_nothing_beside_the_result_is_written",
    ),
    Mutant("a bit of the mantissa", _KERNEL, "0x07F007F0", "0x07E007E0", _CODES),
    Mutant(
        "a sign", _KERNEL, "even = ((words << 8) & _SIGNS) | ((words << 4)", "even = ((words << 4)", _CODES
    ),
    Mutant("neighbours in another order", _KERNEL, "tl.permute(pairs, (0, 1, 3, 2))", "pairs", _CODES),
    Mutant(
        "the exponent mended by addition",
        _KERNEL,
        "return values * tl.full((), _HALF_BIAS, tl.float16)",
        "return (values.to(tl.int16, bitcast=True) + 8192).to(tl.float16, bitcast=True)",
        _CODES,
    ),
    Mutant("the bias of fp16 forgotten", _KERNEL, "total *= _HALF_BIAS", "pass", _ERROR),
    Mutant("scales of rows forgotten", _KERNEL, "total *= tl.load(s_at)[None, :]", "pass", _BOUNDS),
    Mutant("the bias of a layer forgotten", _KERNEL, "if HAS_BIAS:", "if False:", _BOUNDS),
    Mutant("words packed in the order of memory", "fp8_gemm/pack.py", "(0, 2, 1, 3)", "(0, 1, 2, 3)", _CODES),
    Mutant(
        "weights made whole by half", "fp8_gemm/dense.py", "scales * _HALF_BIAS", "scales * 2.0**7", _WHOLE
    ),
)
