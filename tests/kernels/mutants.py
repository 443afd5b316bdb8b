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

_ATTENTION, _ATTENTION_CHECK = "paged_attention_gpu/kernel.py", "check_paged_attention_gpu.py"
_WEIGHTED = f"{_ATTENTION_CHECK}::test_every_row_gets_the_weighted_sum_of_its_values"
_UNSEEN = f"{_ATTENTION_CHECK}::test_slots_that_no_row_of_a_request_sees_may_hold_anything[window-nan]"
_ATTENTION_BOUNDS = f"{_ATTENTION_CHECK}::test_nothing_outside_the_tensors_is_read_or_written[llama]"
_WRITTEN = f"{_ATTENTION_CHECK}::test_keys_and_values_are_written_to_their_slots_alone"
_PACKED = f"{_ATTENTION_CHECK}::test_masks_are_packed"


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
    Mutant(
        "scores of masked keys kept",
        _ATTENTION,
        "tl.where(visible, scores * _LOG2_E, _NONE)",
        "scores * _LOG2_E",
        f"{_WEIGHTED}[llama-window]",
    ),
    Mutant(
        "values of masked keys multiplied by zero",
        _ATTENTION,
        "mask=wanted[:, None]",
        "mask=inside[:, None]",
        _UNSEEN,
    ),
    Mutant(
        "no score taken for a number",
        _ATTENTION,
        "tl.where(largest == _NONE, 0.0, largest)",
        "largest",
        f"{_WEIGHTED}[llama-blind]",
    ),
    Mutant(
        "the last key of a split lost",
        _ATTENTION,
        "* span + span)",
        "* span + span - 1)",
        f"{_WEIGHTED}[llama-causal]",
    ),
    Mutant(
        "the first splits lost",
        _ATTENTION,
        "range(0, tl.cdiv(last, tl.maximum(span, 1)), STEP)",
        "range(STEP, tl.cdiv(last, tl.maximum(span, 1)), STEP)",
        f"{_WEIGHTED}[llama-causal]",
    ),
    Mutant(
        "splits that were not computed are added",
        _ATTENTION,
        "done = (split * span < last) & (split * span + span > first)",
        "done = split * span < last",
        f"{_WEIGHTED}[llama-window]",
    ),
    Mutant(
        "splits of one length for rows of any",
        _ATTENTION,
        "SPLIT * tl.cdiv(last, SPLIT * MOST_SPLITS)",
        "SPLIT",
        f"{_ATTENTION_CHECK}::test_very_long_rows_have_longer_splits",
    ),
    Mutant("sinks forgotten", _ATTENTION, " + tl.exp2(sink - most)", "", f"{_WEIGHTED}[sinks-causal]"),
    Mutant("the cap forgotten", _ATTENTION, "if HAS_CAP:", "if False:", f"{_WEIGHTED}[capped-causal]"),
    Mutant(
        "the scale forgotten",
        _ATTENTION,
        "tl.float32)) * scale",
        "tl.float32))",
        f"{_WEIGHTED}[llama-causal]",
    ),
    Mutant(
        "sums of earlier keys not rescaled",
        _ATTENTION,
        "total * factor[:, None])",
        "total)",
        f"{_WEIGHTED}[llama-causal]",
    ),
    Mutant(
        "key blocks that begin anywhere",
        _ATTENTION,
        "first // BLOCK_N * BLOCK_N",
        "first",
        f"{_WEIGHTED}[llama-window]",
    ),
    Mutant(
        "every KV head read as the first",
        _ATTENTION,
        "* KV_HEADS + kv_head) *",
        "* KV_HEADS) *",
        f"{_WEIGHTED}[llama-causal]",
    ),
    Mutant(
        "every group of heads as the first",
        _ATTENTION,
        "head = kv_head * GROUP + rm % GROUP",
        "head = kv_head * 0 + rm % GROUP",
        f"{_WEIGHTED}[llama-causal]",
    ),
    Mutant(
        "blocks of 16 tokens taken for granted",
        _ATTENTION,
        "position // BLOCK_TOKENS",
        "position // 16",
        f"{_WEIGHTED}[one KV head-causal]",
    ),
    Mutant(
        "the first word of a mask for all keys",
        _ATTENTION,
        "shown_at + start // 32 + 1",
        "shown_at + start // 32",
        f"{_ATTENTION_CHECK}::test_sums_are_not_rounded[torch.bfloat16-llama]",
    ),
    Mutant(
        "keys beyond a request read",
        _ATTENTION,
        "inside = position < end",
        "inside = position < end + 64",
        _ATTENTION_BOUNDS,
    ),
    Mutant(
        "columns beyond a key read",
        _ATTENTION,
        "here = inside[:, None] & (rk < KEY_DIM)[None, :]",
        "here = inside[:, None]",
        f"{_ATTENTION_CHECK}::test_nothing_outside_the_tensors_is_read_or_written[unequal]",
    ),
    Mutant(
        "columns beyond a result written",
        _ATTENTION,
        "& (rv < VALUE_DIM)[None, :]\n    heads",
        "\n    heads",
        f"{_WEIGHTED}[unequal-causal]",
    ),
    Mutant(
        "every token written to the first slot",
        _ATTENTION,
        " + tl.load(offset_ptr + row).to(tl.int64)",
        "",
        f"{_WRITTEN}[llama-torch.float32]",
    ),
    Mutant(
        "heads beyond the last written",
        _ATTENTION,
        "(head < KV_HEADS) & (rk",
        "(head < KV_HEADS + 1) & (rk",
        f"{_WRITTEN}[capped-torch.float32]",
    ),
    Mutant(
        "columns beyond a mask read",
        _ATTENTION,
        "position < num_keys, other",
        "position < num_keys + 1, other",
        f"{_PACKED}[31]",
    ),
    Mutant(
        "the last visible key left out",
        _ATTENTION,
        "tl.where(seen, position + 1, 0)",
        "tl.where(seen, position, 0)",
        f"{_PACKED}[65]",
    ),
    Mutant(
        "rows in no tile left as they are",
        "paged_attention_gpu/call.py",
        "torch.zeros if rows.is_padded else torch.empty",
        "torch.empty",
        f"{_ATTENTION_CHECK}::test_rows_in_no_tile_are_zero",
    ),
)


def mutants_of(kernel: str) -> tuple[Mutant, ...]:
    """Return the mutants of one kernel package."""
    return tuple(mutant for mutant in MUTANTS if mutant.file.startswith(f"{kernel}/"))
