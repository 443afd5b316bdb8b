"""The decoding that is usually published for e4m3 in 16 bits, and what it gets wrong: kept to compare with.

As in DeepSpeed's `fp_quantizer/fp8_gemm_triton.py`: the code is shifted to where a bfloat16 has its exponent
and mantissa, and the difference of the biases, 120, is added to the exponent as an integer.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["published_decode"]


def published_decode(codes: Tensor) -> Tensor:
    """Return codes, of one byte each, as bfloat16."""
    bits = codes.view(torch.uint8).to(torch.int32)
    moved = ((bits & 0x80) << 8) | (((bits & 0x7F) << 4) + (120 << 7))
    return moved.to(torch.uint16).view(torch.bfloat16)
