"""`Fp8Product`: products with one weight, whose launches are prepared once."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hotswap.kernels.calls import Relaunch
from hotswap.kernels.fp8_gemm.launch import (
    aligned,
    check_operands,
    fp8_linear,
    fused_tile,
    gemm_call,
    kernel_device,
    scratch_of,
)
from hotswap.kernels.fp8_gemm.pack import Fp8Weight
from hotswap.kernels.fp8_gemm.tiles import Tile
from hotswap.kernels.fp8_gemm.workspace import Workspace

__all__ = ["Fp8Product"]

# The launches of larger products are not kept: they take longer on the device than on the host.
_MOST_ROWS: Final = 512
# Tensors of a launch, which come before its numbers.
_NUM_TENSORS: Final = 7


class Fp8Product:
    """`fp8_linear` with one weight, again and again: the same bits, with less work of the host.

    The first product of each number of rows checks its arguments, chooses the tile and has Triton find the
    program; later ones launch that program. For one thread at a time, like its workspace.

    Args:
        weight: `[N, K]`.
        bias: `[N]`, of the dtype of inputs.
        workspace: Scratch memory, shared by products on this stream.
    """

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, workspace: Workspace) -> None:
        self.weight = weight
        self._bias, self._workspace = bias, workspace
        self._num_columns, self._width = weight.shape
        device = weight.qweight.device
        self._device = kernel_device(device)
        # Triton launches on the thread's current device.
        self._on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        self._launches: dict[tuple[int, torch.dtype], _Launch] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T + bias` for `[..., K]`.

        Raises:
            ConfigError: `x` does not match.
        """
        shape = x.shape
        launch = self._launches.get((x.numel() // self._width, x.dtype)) if self._width else None
        if launch is None or shape[-1] != self._width:
            return self._prepare(x)
        y = x.new_empty((*shape[:-1], self._num_columns))
        sums, counters = scratch_of(self._workspace, launch.grid, launch.tile) or (y, y)
        weight, bias = self.weight, y if self._bias is None else self._bias
        with self._on_device:
            launch.program.launch(aligned(x), weight.qweight, weight.scales, bias, y, sums, counters)
        return y

    def _prepare(self, x: Tensor) -> Tensor:
        """Compute a product, and keep its launch for the next one of as many rows."""
        check_operands(x, self.weight, self._bias)
        rows = aligned(x.reshape(-1, self._width))
        tile = fused_tile(rows, self.weight, self._device)
        if tile is None or len(rows) > _MOST_ROWS:
            return fp8_linear(x, self.weight, self._bias, workspace=self._workspace)
        y = rows.new_empty(len(rows), self._num_columns)
        call = gemm_call(rows, self.weight, self._bias, y, tile, self._device, self._workspace)
        program = call.launch()
        if program is not None:
            kept = Relaunch(call, program, _NUM_TENSORS)
            self._launches[len(rows), x.dtype] = _Launch(kept, (call.grid[0], call.grid[1]), tile)
        return y.view(*x.shape[:-1], self._num_columns)


@dataclass(frozen=True, slots=True)
class _Launch:
    """The launch of products of one number of rows."""

    program: Relaunch
    grid: tuple[int, int]
    tile: Tile
