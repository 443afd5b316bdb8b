"""Reference implementation of `fp8_linear` in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from hotswap.kernels.fp8_gemm.pack import Fp8Weight, unpack

__all__ = ["dequantized", "fp8_linear_reference"]


def dequantized(weight: Fp8Weight) -> Tensor:
    """Return the weights, value times scale, as `[N, K]` float64: exact, because 4 and 24 bits make 28.

    The format is e4m3 of OCP: a sign bit, four exponent bits with a bias of 7, three mantissa bits. Exponent
    zero is for subnormals, multiples of 2**-9. The two bit patterns with all other bits set are NaN.
    """
    patterns = unpack(weight).qweight.view(torch.uint8).long()
    exponent, mantissa = patterns >> 3 & 15, patterns & 7
    normal = torch.ldexp((8 + mantissa).double(), exponent - 10)
    magnitude = torch.where(exponent > 0, normal, mantissa.double() * 2.0**-9)
    values = torch.where(patterns >= 128, -magnitude, magnitude)
    values[patterns & 127 == 127] = torch.nan
    width = weight.width if weight.group is None else weight.group
    return values * weight.scales.double().repeat_interleave(max(width, 1), dim=1)[:, : weight.width]


def fp8_linear_reference(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias` in float64 for `[..., K]`."""
    product = x.double() @ dequantized(weight).T
    return product if bias is None else product + bias.double()
