"""The programs of `paged_attention_gpu`: layers of common models, with decodes and prompts."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hotswap.kernels.paged_attention_gpu import Rows, Visible, call
from hotswap.kernels.targets import Target
from tests.kernels.gate.build import Limits, Program
from tests.kernels.launches import program_of

# Query heads, KV heads, width of keys and of values, tokens of a block.
SHAPES = {
    "Llama 8B": (32, 8, 128, 128, 32),
    "Qwen3 0.6B": (16, 8, 128, 128, 16),
    "Qwen2 0.5B": (14, 2, 64, 64, 16),
    "Gemma 2B": (8, 1, 256, 256, 16),
    "DeepSeek": (16, 16, 192, 128, 16),
    "Phi 3": (32, 32, 96, 96, 16),
    "Falcon": (71, 1, 64, 64, 16),
}
# Addresses that ptxas spills before the loop.
_MOST_SPILLED = 16


def programs(target: Target) -> Iterable[Program]:
    """Return the programs of attention on a target; none for targets without tensor cores."""
    if not target.mma:
        return
    mask = torch.zeros(4, 600, dtype=torch.bool)
    packed = call.pack_call(mask, Visible.empty(4, 600, mask.device))
    yield program_of("pack", packed, limits=Limits(registers=128, mma=False))
    # All layers where most of them run, and the narrowest and the widest on every target.
    chosen = SHAPES if target.name == "sm_90" else {"Qwen2 0.5B", "Gemma 2B"}
    for name, shape in SHAPES.items():
        if name not in chosen:
            continue
        for dtype in (torch.bfloat16, torch.float32):
            if dtype is torch.bfloat16 or name in ("Llama 8B", "Gemma 2B"):
                yield from _layer(f"{name} {dtype}", target, shape, dtype)


def _layer(
    name: str, target: Target, shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> Iterable[Program]:
    heads, kv_heads, key_dim, value_dim, tokens = shape
    keys = torch.zeros(2, kv_heads, tokens, key_dim, dtype=dtype)
    values = torch.zeros(2, kv_heads, tokens, value_dim, dtype=dtype)
    queries = torch.zeros(4, heads, key_dim, dtype=dtype)
    one = torch.zeros(2, 3, dtype=torch.int32)
    rows = Rows(torch.zeros(2, 2, dtype=torch.int32), one, one)
    visible = Visible.empty(4, 600, queries.device)
    is_gemma = name.startswith("Gemma")
    calls = call.attend_calls(
        queries.new_zeros(4, heads, value_dim), queries, keys, values, rows, visible, 1.0,
        50.0 if is_gemma else None, queries if is_gemma else None, target,
    )  # fmt: skip
    on_tensor_cores = dtype is not torch.float32
    for each, kind in zip(calls, ("many rows", "one row"), strict=False):
        limits = Limits(
            registers=320 if target.is_amd else 255,  # AMD's have 512
            mma=on_tensor_cores,
            wide_mma=bool(target.wide_mma) and each.constants["BLOCK_M"] >= 64,
            copies=on_tensor_cores,
            spilled=_MOST_SPILLED,
        )
        yield program_of(f"{name} {kind}", each, limits=limits)
    yield program_of(f"{name} sum", calls[2], limits=Limits(registers=168, mma=False))
    new_key, new_value = keys[0], values[0]
    slots = torch.zeros(tokens, dtype=torch.int64)
    appended = call.append_call(new_key, new_value, keys, values, slots, slots)
    yield program_of(
        f"{name} append",
        appended,
        limits=Limits(registers=64, mma=False, wide="Llama" in name and not target.is_amd),
    )
