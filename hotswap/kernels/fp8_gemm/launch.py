"""`fp8_linear`: checks, the choice of the path and the tile, and the launch."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from math import ceil
from typing import Any, Final

import torch
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels.calls import Call
from hotswap.kernels.fp8_gemm.dense import Dequantize, Multiply, dense_linear, dequantize_rows
from hotswap.kernels.fp8_gemm.pack import Fp8Weight
from hotswap.kernels.fp8_gemm.tiles import Tile, choose, rows_to_build
from hotswap.kernels.fp8_gemm.workspace import Workspace
from hotswap.kernels.targets import TARGETS, Device, device_of, runs_triton

__all__ = [
    "FUSED_DTYPES",
    "aligned",
    "check_operands",
    "dequantize_call",
    "fp8_linear",
    "fused_tile",
    "gemm_call",
    "kernel_device",
    "scratch_of",
    "warm_up",
]

# Imports triton, so it is imported on first use.
_KERNELS: Final = "hotswap.kernels.fp8_gemm.kernel"

# Of inputs that weights are dequantized for inside the multiplication.
FUSED_DTYPES: Final = frozenset({torch.bfloat16, torch.float16})
# Weights with fewer rows or columns than this use the dense path.
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
    multiply: Multiply | None = None,
) -> Tensor:
    """Return `x @ weight.T + bias`, in the dtype of `x`; the same bits for the same input in every run.

    The fused path, on GPUs with Triton: packed weights are converted exactly inside the matrix product, and
    scales are applied to float32 sums. The dense path, on other devices, for many rows and for other dtypes:
    blocks of the weight are dequantized, then multiplied; see `dense_linear`.

    Args:
        x: `[..., K]`, float32, bfloat16 or float16.
        weight: `[N, K]`, on the same device.
        bias: `[N]`, of the dtype of `x`.
        workspace: Scratch memory, shared by products on this stream; allocated if not given.
        tile: The tile and path; by default `tiles.choose` takes them from the table or the heuristic.
        out: `[M, N]` for the result, with M rows in `x`; of the dtype of `x`, or float32 on the fused path.
        multiply: Function for the products of the dense path; see `dense_linear`.

    Raises:
        ConfigError: an argument does not match the others; the message has its name.
    """
    check_operands(x, weight, bias)
    rows, on = x.reshape(-1, weight.width), kernel_device(x.device)
    unpack: Dequantize = dequantize_rows
    fused = fused_tile(rows, weight, on, tile)
    if _has_kernel(rows, weight, on):
        rows, unpack = aligned(rows), _dequantize_rows_by_kernel
    if fused is not None:
        y = rows.new_empty(len(rows), len(weight.qweight)) if out is None else out
        gemm_call(rows, weight, bias, y, fused, on, workspace or Workspace(x.device)).launch()
    else:
        y = dense_linear(rows, weight, bias, workspace=workspace, multiply=multiply, dequantize_block=unpack)
        if out is not None:
            y = out.copy_(y)
    return y.view(*x.shape[:-1], len(weight.qweight))


def check_operands(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> None:
    """Raise `ConfigError` unless the shapes and dtypes of a product match."""
    width = weight.width
    if x.ndim == 0 or x.shape[-1] != width:
        raise ConfigError(f"x is {list(x.shape)}, its last dimension must be the weight's {width}.")
    if bias is not None and (bias.shape != (len(weight.qweight),) or bias.dtype is not x.dtype):
        raise ConfigError(
            f"bias is {bias.dtype} {list(bias.shape)}, it must be {x.dtype} [{len(weight.qweight)}]."
        )


def fused_tile(rows: Tensor, weight: Fp8Weight, device: Device, tile: Tile | None = None) -> Tile | None:
    """Return the tile of a product on the fused path, `tile` if it is given; `None` for the dense path."""
    if not _has_kernel(rows, weight, device):
        return None
    chosen = tile or choose(len(rows), weight.shape, _name(rows.dtype), weight.group, device)
    return chosen.fitted(weight.group) if chosen.path == "fused" else None


def warm_up(
    layers: Iterable[tuple[Fp8Weight, Tensor | None]],
    dtype: torch.dtype,
    workspace: Workspace,
    *,
    most_rows: int | None = None,
) -> None:
    """Compile all kernels for products in `dtype`, so that no request waits for a compiler. Blocking.

    Layers are weights with their biases; one of each shape is enough. Does nothing on devices without the
    kernel. Products of more than `most_rows` rows are not compiled for.
    """
    kinds = {(weight.shape, weight.group, bias is None): (weight, bias) for weight, bias in layers}
    for weight, bias in kinds.values():
        if runs_triton(weight.qweight.device):
            on = kernel_device(weight.qweight.device)
            for rows in rows_to_build(weight.shape, _name(dtype), weight.group, on, most_rows):
                x = torch.zeros(rows, weight.width, dtype=dtype, device=weight.qweight.device)
                fp8_linear(x, weight, bias, workspace=workspace)


def _has_kernel(rows: Tensor, weight: Fp8Weight, device: Device) -> bool:
    """Whether the Triton kernels can compute a product."""
    return (
        weight.is_packed
        and rows.dtype in FUSED_DTYPES
        and device.target is not None
        and len(rows) > 0
        and min(weight.shape) >= _LEAST_WIDTH
    )


def kernel_device(device: torch.device) -> Device:
    """Return the device that tiles are chosen for; without a target if the kernels do not run there."""
    if not runs_triton(device):
        return Device(device.type, None, 1)
    if device.type == "cpu":  # Triton's interpreter, which can run any target's tiles
        return Device("interpreter", TARGETS["sm_80"], 4)
    return device_of(device)


def gemm_call(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None,
    y: Tensor,
    tile: Tile,
    device: Device,
    workspace: Workspace,
) -> Call:
    """Return the kernel launch of a fused product: seven tensors, then numbers."""
    (num_rows, width), num_columns = x.shape, len(weight.qweight)
    grid = ceil(num_rows / tile.block_m) * ceil(num_columns / tile.block_n), tile.parts_of(width)
    target = device.target
    assert target is not None, "callers check the target"
    sums, counters = scratch_of(workspace, grid, tile) or (y, y)
    tensors = (x, weight.qweight, weight.scales, y if bias is None else bias, y, sums, counters)
    strides = (x.stride(0), weight.qweight.stride(0), weight.scales.stride(0), y.stride(0))
    constants: dict[str, Any] = {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP": weight.group or 0,
        "SPLIT": grid[1] > 1,
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
    return Call(f"{_KERNELS}:fp8_gemm_kernel", grid, arguments, constants)


def scratch_of(workspace: Workspace, grid: tuple[int, int], tile: Tile) -> tuple[Tensor, Tensor] | None:
    """Return the sums and counters of a product; `None` if K is not split."""
    num_tiles, parts = grid
    if parts == 1:
        return None
    return workspace.sums(parts * num_tiles * tile.block_m * tile.block_n), workspace.counters(num_tiles)


def _dequantize_rows_by_kernel(
    weight: Fp8Weight, rows: slice, dtype: torch.dtype, workspace: Workspace | None = None
) -> Tensor:
    """Do as `dequantize_rows`, by the kernel if `dtype` is the original one; else PyTorch rounds twice."""
    if weight.dtype is not dtype:
        return dequantize_rows(weight, rows, dtype, workspace)
    qweight, scales = weight.qweight[rows], weight.scales[rows]
    out = (workspace or Workspace(qweight.device)).rows(len(qweight), weight.width, dtype)
    dequantize_call(qweight, scales, out, weight.group).launch()
    return out


def dequantize_call(qweight: Tensor, scales: Tensor, out: Tensor, group: int | None) -> Call:
    """Return the kernel launch that dequantizes packed rows."""
    num_rows, width = out.shape
    block = Tile(block_n=32, block_k=128).fitted(group)
    grid = (ceil(width / block.block_k), ceil(num_rows / block.block_n))
    strides = (qweight.stride(0), scales.stride(0), out.stride(0))
    constants: dict[str, Any] = {
        "BLOCK_N": block.block_n,
        "BLOCK_K": block.block_k,
        "GROUP": group or 0,
        "DTYPE": _triton_dtype(out.dtype),
    }
    arguments = (qweight, scales, out, num_rows, width, *strides)
    return Call(f"{_KERNELS}:dequantize_kernel", grid, arguments, constants)


def aligned(x: Tensor) -> Tensor:
    """Return contiguous rows, aligned to 16 bytes: others need another program, whose bits may differ."""
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGNMENT_BYTES == 0 else x.clone()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _triton_dtype(dtype: torch.dtype) -> Any:
    return getattr(import_module(_KERNELS).tl, _name(dtype))
