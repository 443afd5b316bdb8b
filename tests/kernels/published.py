"""The usual published conversion of e4m3 to bfloat16, which is wrong for zeros and subnormals.

As in DeepSpeed's `fp_quantizer/fp8_gemm_triton.py`: the bits are shifted to the exponent and mantissa of a
bfloat16, and the difference of the biases, 120, is added to the exponent as an integer.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["published_conversion"]


def published_conversion(quantized: Tensor) -> Tensor:
    """Convert e4m3 values, of one byte each, to bfloat16."""
    bits = quantized.view(torch.uint8).to(torch.int32)
    moved = ((bits & 0x80) << 8) | (((bits & 0x7F) << 4) + (120 << 7))
    return moved.to(torch.uint16).view(torch.bfloat16)
