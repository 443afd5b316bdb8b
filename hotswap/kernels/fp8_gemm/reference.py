"""What `fp8_linear` computes, said as plainly as can be, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from hotswap.kernels.fp8_gemm.pack import Fp8Weight, unpack

__all__ = ["decoded", "fp8_linear_reference"]


def decoded(weight: Fp8Weight) -> Tensor:
    """Return the weights, code times scale, as `[N, K]` float64: exact, since 4 and 24 bits make 28.

    Codes are OCP's e4m3: one bit of sign, four of exponent with a bias of 7, three of mantissa. An exponent
    of zero is that of subnormals, multiples of 2**-9. The two codes with all other bits set are no numbers.
    """
    codes = unpack(weight).codes.view(torch.uint8).long()
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = torch.ldexp((8 + mantissa).double(), exponent - 10)
    magnitude = torch.where(exponent > 0, normal, mantissa.double() * 2.0**-9)
    values = torch.where(codes >= 128, -magnitude, magnitude)
    values[codes & 127 == 127] = torch.nan
    width = weight.width if weight.group is None else weight.group
    return values * weight.scales.double().repeat_interleave(max(width, 1), dim=1)[:, : weight.width]


def fp8_linear_reference(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias` in float64 for `[..., K]`."""
    product = x.double() @ decoded(weight).T
    return product if bias is None else product + bias.double()
