"""Random FP8 weights for tests, with all finite values and any group size."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from hotswap.kernels.fp8_gemm import Fp8Weight

# The largest relative error of a product in the 2-norm. Rounding the result causes 1.7e-3 in bfloat16 and
# 2e-4 in float16; the error of float32 sums is negligible.
BOUNDS: Final = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 1e-6}
# The same for dequantized weights whose scales have more significant bits than conversions choose: these
# weights are rounded to the dtype of the product too.
DEQUANTIZED_BOUNDS: Final = {torch.bfloat16: 2.6e-3, torch.float16: 3.4e-4, torch.float32: 1e-6}

FINITE: Final = torch.tensor([bits for bits in range(256) if bits & 127 != 127], dtype=torch.uint8)


def weight_of(
    rows: int,
    width: int,
    group: int | None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    seed: int = 0,
    scale_bits: int = 24,
) -> Fp8Weight:
    """A weight of random finite values, zeros and subnormals included, whose scales differ by up to 2**6.

    Conversions choose scales of four significant bits; kernels take any.
    """
    generator = torch.Generator().manual_seed(seed)
    qweight = FINITE[torch.randint(len(FINITE), (rows, width), generator=generator)]
    groups = 1 if group is None else -(-width // group)
    sizes = torch.randint(-9, -3, (rows, groups), generator=generator)
    steps = 2.0 ** (scale_bits - 1)
    mantissas = torch.floor((1 + torch.rand(rows, groups, generator=generator)) * steps) / steps
    scales = torch.ldexp(mantissas, sizes)
    return Fp8Weight(qweight.view(torch.float8_e4m3fn), scales, width, group, dtype)


def every_value() -> Fp8Weight:
    """`[4, 64]`: all 256 bit patterns of e4m3 with a scale of 1; the two NaNs are replaced by zeros."""
    qweight = torch.arange(256, dtype=torch.uint8)
    qweight[qweight & 127 == 127] = 0
    return Fp8Weight(qweight.view(4, 64).view(torch.float8_e4m3fn), torch.ones(4, 1), 64, None, torch.float32)


def input_of(rows: int, width: int, dtype: torch.dtype, *, seed: int = 1) -> Tensor:
    """Random input rows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator).to(dtype)


def error(found: Tensor, right: Tensor) -> float:
    """The relative error of a result in the 2-norm; infinite if it has a NaN."""
    off = float((found.double() - right).norm() / right.norm().clamp_min(1e-300))
    return off if off == off else float("inf")
