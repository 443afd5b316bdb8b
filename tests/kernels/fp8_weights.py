"""One-byte weights to test with: made up, with every code, in any grouping."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from hotswap.kernels.fp8_gemm import Fp8Weight

# The largest error of a product, as a share of the whole result, in the 2-norm. Rounding the result to
# bfloat16 costs 1.7e-3, to float16 a fifth of 1e-3, and float32 sums cost next to nothing.
BOUNDS: Final = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 1e-6}
# Where weights with scales of more bits than conversions choose are made whole, in the dtype of the product,
# they are rounded to it as well, by as much.
WHOLE_BOUNDS: Final = {torch.bfloat16: 2.6e-3, torch.float16: 3.4e-4, torch.float32: 1e-6}

FINITE: Final = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)


def weight_of(
    rows: int,
    width: int,
    group: int | None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    seed: int = 0,
    scale_bits: int = 24,
) -> Fp8Weight:
    """A weight of random finite codes, zeros and subnormals included, whose scales differ by up to 2**6.

    Conversions choose scales of four significant bits; kernels take any.
    """
    generator = torch.Generator().manual_seed(seed)
    codes = FINITE[torch.randint(len(FINITE), (rows, width), generator=generator)]
    groups = 1 if group is None else -(-width // group)
    sizes = torch.randint(-9, -3, (rows, groups), generator=generator)
    steps = 2.0 ** (scale_bits - 1)
    mantissas = torch.floor((1 + torch.rand(rows, groups, generator=generator)) * steps) / steps
    scales = torch.ldexp(mantissas, sizes)
    return Fp8Weight(codes.view(torch.float8_e4m3fn), scales, width, group, dtype)


def every_code() -> Fp8Weight:
    """`[4, 64]`: all 256 codes with a scale of 1, the two that are no numbers replaced by zeros."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 127 == 127] = 0
    return Fp8Weight(codes.view(4, 64).view(torch.float8_e4m3fn), torch.ones(4, 1), 64, None, torch.float32)


def input_of(rows: int, width: int, dtype: torch.dtype, *, seed: int = 1) -> Tensor:
    """Random rows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator).to(dtype)


def error(found: Tensor, right: Tensor) -> float:
    """How far a result is off, as a share of all of it; a NaN is further than any bound."""
    off = float((found.double() - right).norm() / right.norm().clamp_min(1e-300))
    return off if off == off else float("inf")
