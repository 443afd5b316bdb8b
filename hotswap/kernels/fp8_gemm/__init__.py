"""FP8 linear layers, `x @ weight.T`: e4m3 weights with scales, dequantized inside the matrix product.

`pack` is the memory layout for GPUs, `tiles` chooses the tile, `launch` and `product` have the public API,
`dense` is the path for devices without the kernel, and `reference` is the definition in float64 that the
tests compare with.
"""

from __future__ import annotations

from hotswap.kernels.fp8_gemm.dense import dense_linear, dequantize, dequantize_rows
from hotswap.kernels.fp8_gemm.launch import FUSED_DTYPES, fp8_linear, warm_up
from hotswap.kernels.fp8_gemm.pack import Fp8Weight, pack, pack_into, packed_width, unpack
from hotswap.kernels.fp8_gemm.product import Fp8Product
from hotswap.kernels.fp8_gemm.reference import dequantized, fp8_linear_reference
from hotswap.kernels.fp8_gemm.tiles import Tile, choose, heuristic
from hotswap.kernels.fp8_gemm.workspace import Workspace

__all__ = [
    "FUSED_DTYPES",
    "Fp8Product",
    "Fp8Weight",
    "Tile",
    "Workspace",
    "choose",
    "dense_linear",
    "dequantize",
    "dequantize_rows",
    "dequantized",
    "fp8_linear",
    "fp8_linear_reference",
    "heuristic",
    "pack",
    "pack_into",
    "packed_width",
    "unpack",
    "warm_up",
]
