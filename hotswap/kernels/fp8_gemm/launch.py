"""`fp8_linear`: checks, the choice of a way, and the launch."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from math import ceil
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels.calls import Call
from hotswap.kernels.fp8_gemm.dense import Decode, Multiply, decode_rows, dense_linear
from hotswap.kernels.fp8_gemm.pack import Fp8Weight
from hotswap.kernels.fp8_gemm.tiles import Tile, choose, rows_to_build
from hotswap.kernels.fp8_gemm.workspace import Workspace
from hotswap.kernels.targets import TARGETS, Device, device_of, runs_triton

__all__ = ["FUSED_DTYPES", "dequantize_call", "fp8_linear", "gemm_call", "warm_up"]

# Imports triton, and so is imported when a kernel is first wanted.
_KERNELS: Final = "hotswap.kernels.fp8_gemm.kernel"

# Of inputs that weights are decoded for inside the multiplication.
FUSED_DTYPES: Final = frozenset({torch.bfloat16, torch.float16})
# Weights with fewer rows or columns are not worth a tile.
_LEAST_WIDTH: Final = 16
_ALIGNMENT_BYTES: Final = 16


def fp8_linear(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    *,
    workspace: Workspace | None = None,
    tile: Tile | None = None,
    out: Tensor | None = None,
    multiply: Multiply = F.linear,
) -> Tensor:
    """Return `x @ weight.T + bias`, in the dtype of `x`; the same bits for the same input in every run.

    On a GPU that Triton serves, packed weights are decoded inside the multiplication, as exact numbers, and
    scales are multiplied into float32 sums. Elsewhere, for many rows and for other dtypes, rows of the weight
    are made whole and multiplied, see `dense_linear`.

    Args:
        x: `[..., K]`, float32, bfloat16 or float16.
        weight: `[N, K]`, on the same device.
        bias: `[N]`, of the dtype of `x`.
        workspace: What products before it used, on this stream; one of its own if it was not said.
        tile: How to compute it; what was measured or reckoned to be best if it was not said.
        out: `[M, N]` for the result, where `x` has M rows; of the dtype of `x`, or float32 where it is fused.
        multiply: What multiplies where weights are made whole.

    Raises:
        ConfigError: an argument does not fit the others; its name is in the message.
    """
    width = weight.width
    if x.ndim == 0 or x.shape[-1] != width:
        raise ConfigError(f"x is {list(x.shape)}, its last dimension must be the weight's {width}.")
    if bias is not None and (bias.shape != (len(weight.codes),) or bias.dtype is not x.dtype):
        raise ConfigError(
            f"bias is {bias.dtype} {list(bias.shape)}, it must be {x.dtype} [{len(weight.codes)}]."
        )
    rows = x.reshape(-1, width)
    on = _device_of(x.device)
    decode: Decode = decode_rows
    if _has_kernel(rows, weight, on):
        way = tile or choose(len(rows), weight.shape, _name(x.dtype), weight.group, on)
        if way.path == "fused":
            whole = _fused(rows, weight, bias, way.fitted(weight.group), on, workspace, out)
            return whole.view(*x.shape[:-1], len(weight.codes))
        decode = _decode_rows
    whole = dense_linear(rows, weight, bias, workspace=workspace, multiply=multiply, decode=decode)
    if out is not None:
        whole = out.copy_(whole)
    return whole.view(*x.shape[:-1], len(weight.codes))


def warm_up(
    layers: Iterable[tuple[Fp8Weight, Tensor | None]],
    dtype: torch.dtype,
    workspace: Workspace,
    *,
    most_rows: int | None = None,
) -> None:
    """Build what products in `dtype` need, so that none waits for a compiler. Blocking.

    Layers are weights with their biases; one of a shape is enough. Nothing to do where no kernel runs.
    Products of more than `most_rows` are left out.
    """
    kinds = {(weight.shape, weight.group, bias is None): (weight, bias) for weight, bias in layers}
    for weight, bias in kinds.values():
        if runs_triton(weight.codes.device):
            on = _device_of(weight.codes.device)
            for rows in rows_to_build(weight.shape, _name(dtype), weight.group, on, most_rows):
                x = torch.zeros(rows, weight.width, dtype=dtype, device=weight.codes.device)
                fp8_linear(x, weight, bias, workspace=workspace)


def _has_kernel(rows: Tensor, weight: Fp8Weight, device: Device) -> bool:
    """Whether a kernel may compute it."""
    return (
        weight.is_packed
        and rows.dtype in FUSED_DTYPES
        and device.target is not None
        and len(rows) > 0
        and min(weight.shape) >= _LEAST_WIDTH
    )


def _device_of(device: torch.device) -> Device:
    if not runs_triton(device):
        return Device(device.type, None, 1)
    if device.type == "cpu":  # Triton's interpreter, which is like any target
        return Device("interpreter", TARGETS["sm_80"], 4)
    return device_of(device)


def _fused(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None,
    tile: Tile,
    device: Device,
    workspace: Workspace | None,
    out: Tensor | None,
) -> Tensor:
    x = _aligned(x)
    y = x.new_empty(len(x), len(weight.codes)) if out is None else out
    gemm_call(x, weight, bias, y, tile, device, workspace or Workspace(x.device)).launch()
    return y


def gemm_call(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None,
    y: Tensor,
    tile: Tile,
    device: Device,
    workspace: Workspace,
) -> Call:
    """Return the launch of a fused product."""
    (num_rows, width), num_columns = x.shape, len(weight.codes)
    tiles = ceil(num_rows / tile.block_m) * ceil(num_columns / tile.block_n)
    parts = tile.parts_of(width)
    is_split = parts > 1
    target = device.target
    assert target is not None, "whoever asks has looked"
    sums = workspace.sums(parts * tiles * tile.block_m * tile.block_n) if is_split else y
    counters = workspace.counters(tiles) if is_split else y
    tensors = (x, weight.codes, weight.scales, y if bias is None else bias, y, sums, counters)
    strides = (x.stride(0), weight.codes.stride(0), weight.scales.stride(0), y.stride(0))
    constants: dict[str, Any] = {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP": weight.group or 0,
        "SPLIT": is_split,
        "WEIGHTS_LEFT": tile.weights_left,
        "REBIAS": x.dtype is torch.bfloat16 or target.flushes_subnormals,
        "HAS_BIAS": bias is not None,
        "EVEN_N": num_columns % tile.block_n == 0,
        "EVEN_K": width % tile.block_k == 0,
        "STAGES": tile.stages,
        "DTYPE": _triton_dtype(x.dtype),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    arguments = (*tensors, num_rows, num_columns, width, *strides)
    return Call(f"{_KERNELS}:fp8_gemm_kernel", (tiles, parts), arguments, constants)


def _decode_rows(
    weight: Fp8Weight, rows: slice, dtype: torch.dtype, workspace: Workspace | None = None
) -> Tensor:
    """`decode_rows` by a kernel; what the weight was is what it becomes, or PyTorch has to round it twice."""
    if weight.dtype is not dtype:
        return decode_rows(weight, rows, dtype, workspace)
    codes, scales = weight.codes[rows], weight.scales[rows]
    whole = (workspace or Workspace(codes.device)).rows(len(codes), weight.width, dtype)
    dequantize_call(codes, scales, whole, weight.group).launch()
    return whole


def dequantize_call(codes: Tensor, scales: Tensor, whole: Tensor, group: int | None) -> Call:
    """Return the launch that makes packed rows whole."""
    num_rows, width = whole.shape
    block = Tile(block_n=32, block_k=128).fitted(group)
    grid = (ceil(width / block.block_k), ceil(num_rows / block.block_n))
    strides = (codes.stride(0), scales.stride(0), whole.stride(0))
    constants: dict[str, Any] = {
        "BLOCK_N": block.block_n,
        "BLOCK_K": block.block_k,
        "GROUP": group or 0,
        "DTYPE": _triton_dtype(whole.dtype),
    }
    arguments = (codes, scales, whole, num_rows, width, *strides)
    return Call(f"{_KERNELS}:dequantize_kernel", grid, arguments, constants)


def _aligned(x: Tensor) -> Tensor:
    """Rows side by side from where a wide load may begin: another place would be another program."""
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGNMENT_BYTES == 0 else x.clone()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _triton_dtype(dtype: torch.dtype) -> Any:
    return getattr(import_module(_KERNELS).tl, _name(dtype))
