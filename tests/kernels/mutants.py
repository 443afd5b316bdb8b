"""Mutations of kernels, each with the check that must detect it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["MUTANTS", "Mutant", "mutants_of"]

_LORA, _LORA_LAUNCH = "segmented_lora/kernel.py", "segmented_lora/launch.py"
_LORA_CHECK = "check_segmented_lora.py::test_every_row_gets_its_update"
_MIXED = f"{_LORA_CHECK}[torch.bfloat16-qkv-decode-random]"
_MIXED_WIDE = f"{_LORA_CHECK}[torch.bfloat16-qkv-wide-random]"
_ALL = f"{_LORA_CHECK}[torch.bfloat16-qkv-decode-all]"
_LORA_BOUNDS = "check_segmented_lora.py::test_nothing_outside_the_tensors_is_read_or_written"
_KV, _KV_CHECK = "kv_blocks/kernel.py", "check_kv_blocks.py::test_blocks_go_to_the_buffer_and_back"
_KV_BOUNDS = "check_kv_blocks.py::test_nothing_outside_the_tensors_is_read_or_written"

_FP8, _BOUNDS = "check_fp8_gemm.py", "check_fp8_gemm_bounds.py::test_no_access_is_out_of_range"
_KERNEL = "fp8_gemm/kernel.py"
_ERROR = f"{_FP8}::test_the_error_is_that_of_rounding_the_result"
_CONVERSION = f"{_FP8}::test_every_finite_value_is_converted_exactly"
_DEQUANTIZED = f"{_FP8}::test_the_dequantization_kernel_is_exact"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault.

    Attributes:
        name: Description of the fault.
        file: Path below `hotswap/kernels`.
        before: The correct text; its first occurrence is replaced.
        after: The faulty text.
        check: The test that must fail, below `interpreted`.
    """

    name: str
    file: str
    before: str
    after: str
    check: str


MUTANTS: Final = (
    Mutant("rows of x out of range", _KERNEL, "tl.where(rm < M, rm, 0)", "rm", _BOUNDS),
    Mutant("rows of w out of range", _KERNEL, "tl.where(rn < N, rn, 0)", "rn", _BOUNDS),
    Mutant(
        "words beyond a row", _KERNEL, "[None, :] < w_row, other", "[None, :] < w_row + 64, other", _BOUNDS
    ),
    Mutant("columns beyond a row of x", _KERNEL, "k + x_rk < K", "k + x_rk < K + 64", _BOUNDS),
    Mutant(
        "a partial last step taken for a full one",
        "fp8_gemm/launch.py",
        "width % tile.block_k == 0",
        "True",
        _BOUNDS,
    ),
    Mutant("every group scaled as the first", _KERNEL, "s_at + k // GROUP", "s_at", _ERROR),
    Mutant(
        "dequantized weights scaled as the first group", _KERNEL, "s_row + k // GROUP", "s_row", _DEQUANTIZED
    ),
    Mutant("a part that is not added", _KERNEL, "range(0, num_parts)", "range(1, num_parts)", _ERROR),
    Mutant(
        "steps lost if parts are uneven",
        _KERNEL,
        "BLOCK_K), num_parts)",
        "BLOCK_K) // num_parts, 1)",
        _FP8 + "::test_a_workspace_is_reused_by_products_of_many_sizes",
    ),
    Mutant(
        "the last but one program adds, not the last",
        _KERNEL,
        "before == num_parts - 1",
        "before == num_parts - 2",
        _FP8 + "::test_a_workspace_is_reused_by_products_of_many_sizes",
    ),
    Mutant(
        "counters not reset",
        _KERNEL,
        "tl.store(count_ptr + tile, 0)",
        "pass",
        _FP8 + "::test_a_workspace_is_reused_by_products_of_many_sizes",
    ),
    Mutant(
        "a store without a mask",
        _KERNEL,
        "inside = (rm[:, None] < M) & (rn[None, :] < N)",
        "inside = (rm[:, None] < M) & (rn[None, :] < N + 64)",
        _FP8 + "::test_nothing_outside_the_result_is_written",
    ),
    Mutant(
        "rows written out of range",
        _KERNEL,
        "inside = (rm[:, None] < M) &",
        "inside = (rm[:, None] < M + 1) &",
        _FP8 + "::test_nothing_outside_the_result_is_written",
    ),
    Mutant("a bit of the mantissa", _KERNEL, "0x07F007F0", "0x07E007E0", _CONVERSION),
    Mutant(
        "a sign",
        _KERNEL,
        "even = ((words << 8) & _SIGNS) | ((words << 4)",
        "even = ((words << 4)",
        _CONVERSION,
    ),
    Mutant(
        "adjacent values in another order", _KERNEL, "tl.permute(pairs, (0, 1, 3, 2))", "pairs", _CONVERSION
    ),
    Mutant(
        "the exponent corrected by addition",
        _KERNEL,
        "return values * tl.full((), _HALF_BIAS, tl.float16)",
        "return (values.to(tl.int16, bitcast=True) + 8192).to(tl.float16, bitcast=True)",
        _CONVERSION,
    ),
    Mutant("the bias of fp16 forgotten", _KERNEL, "total *= _HALF_BIAS", "pass", _ERROR),
    Mutant("scales of rows forgotten", _KERNEL, "total *= tl.load(s_at)[None, :]", "pass", _BOUNDS),
    Mutant("the bias of a layer forgotten", _KERNEL, "if HAS_BIAS:", "if False:", _BOUNDS),
    Mutant(
        "words packed in the order of memory",
        "fp8_gemm/pack.py",
        "& _SECOND) << 8",
        "& _SECOND)",
        _CONVERSION,
    ),
    Mutant(
        "dequantized weights too small by a factor of 2",
        "fp8_gemm/dense.py",
        "scales * _HALF_BIAS",
        "scales * 2.0**7",
        _DEQUANTIZED,
    ),
    Mutant("a part of the input lost", _LORA, "range(0, num_parts)", "range(1, num_parts)", _MIXED),
    Mutant("scales of adapters forgotten", _LORA, "total * scale", "total", _MIXED),
    Mutant(
        "every slice read as the first",
        _LORA,
        "h_ptr + piece * h_slice_pages * 16",
        "h_ptr",
        _MIXED,
    ),
    Mutant("the first page for all", _LORA, "pages_ptr + ranks // 16", "pages_ptr + 0 * ranks", _MIXED_WIDE),
    Mutant("pages after the first lost", _LORA, "range(0, num_pages, PAGES)", "range(0, 1, PAGES)", _MIXED),
    Mutant(
        "rows beyond a tile written",
        _LORA,
        "inside = in_rows[:, None] &",
        "inside = (rm >= 0)[:, None] &",
        _ALL,
    ),
    Mutant(
        "columns of the next slice written", _LORA, "rn < num_columns", "rn < num_columns + 16", _LORA_BOUNDS
    ),
    Mutant("columns beyond the input", _LORA, "k + rk < width_in", "k + rk < width_in + 64", _LORA_BOUNDS),
    Mutant(
        "a partial last step of the input taken for a full one",
        _LORA_LAUNCH,
        "pool.width_in % depth == 0",
        "True",
        _LORA_BOUNDS,
    ),
    Mutant(
        "a tile that extends into the next adapter",
        "segmented_lora/plan.py",
        "count = min(cut.rows, len(rows) - at)",
        "count = cut.rows",
        _MIXED,
    ),
    Mutant(
        "rows without an adapter given the first",
        "segmented_lora/plan.py",
        "places[slot] if slot >= 0 else None",
        "places[max(slot, 0)]",
        _MIXED,
    ),
    Mutant(
        "ranks of the previous adapter left in a page",
        "segmented_lora/pool.py",
        "content = torch.zeros(room, pool.shape[1], dtype=self.dtype)",
        "content = pool[ranks].cpu()",
        _MIXED,
    ),
    Mutant("a block of -1 moved", _KV, "if block < 0:", "if block < -1:", _KV_CHECK),
    Mutant("words of the next pool moved", _KV, "offset < words", "offset < words + 4", _KV_BOUNDS),
    Mutant("the first chunk moved again and again", _KV, "chunk * WORDS + ", "", _KV_CHECK),
    Mutant("all pools at the start of a row", _KV, "staging_ptr + row + at", "staging_ptr + row", _KV_CHECK),
    Mutant(
        "wide words in an unaligned buffer",
        "kv_blocks/launch.py",
        "self._is_wide and staging.data_ptr() % _WORD == 0",
        "self._is_wide",
        "check_kv_blocks.py::test_an_unaligned_buffer_is_filled_byte_by_byte",
    ),
)


def mutants_of(kernel: str) -> tuple[Mutant, ...]:
    """Return the mutants of one kernel package."""
    return tuple(mutant for mutant in MUTANTS if mutant.file.startswith(f"{kernel}/"))
