"""`x @ weight.T` for weights of one byte: e4m3 codes and scales, decoded on the way into the multiplication.

`pack` lays codes out for GPUs, `tiles` says how a product is cut, `launch` runs it, `dense` is the way of
devices without the kernel, `reference` is what all are tested against.
"""

from __future__ import annotations

from hotswap.kernels.fp8_gemm.dense import decode_codes, decode_rows, dense_linear
from hotswap.kernels.fp8_gemm.launch import FUSED_DTYPES, fp8_linear, warm_up
from hotswap.kernels.fp8_gemm.pack import Fp8Weight, pack, pack_into, packed_width, unpack
from hotswap.kernels.fp8_gemm.reference import decoded, fp8_linear_reference
from hotswap.kernels.fp8_gemm.tiles import Tile, choose, heuristic
from hotswap.kernels.fp8_gemm.workspace import Workspace

__all__ = [
    "FUSED_DTYPES",
    "Fp8Weight",
    "Tile",
    "Workspace",
    "choose",
    "decode_codes",
    "decode_rows",
    "decoded",
    "dense_linear",
    "fp8_linear",
    "fp8_linear_reference",
    "heuristic",
    "pack",
    "pack_into",
    "packed_width",
    "unpack",
    "warm_up",
]
