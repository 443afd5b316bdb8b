"""`segmented_lora`: LoRA updates of a batch with several adapters, in Triton or in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels.calls import Call
from hotswap.kernels.segmented_lora.plan import PAGE_RANKS, SegmentPlan
from hotswap.kernels.segmented_lora.pool import RankPool
from hotswap.kernels.segmented_lora.tiles import Tile
from hotswap.kernels.targets import device_of, runs_triton

__all__ = ["expand", "expand_call", "has_kernels", "segmented_lora", "shrink", "shrink_call"]

_KERNELS = "hotswap.kernels.segmented_lora.kernel"


def segmented_lora(out: Tensor, x: Tensor, pool: RankPool, plan: SegmentPlan) -> Tensor:
    """Add the LoRA updates of a batch to `out` in place; two launches for any mix of adapters.

    Row *i* gets `scale * x[i] @ A.T @ B` of its adapter for each slice. Rows that are not in the plan are
    neither read nor written. Sums are in fp32 and in a fixed order: the same call gives the same bits. The
    result of A is rounded to the pool's dtype, as between two linear layers.

    Args:
        out: `[rows, sum of the slices' widths]`, of any floating dtype; columns are contiguous.
        x: `[rows, width_in]` of the pool's dtype; columns are contiguous.
        pool: A and B of every adapter.
        plan: The adapter of each row.

    Returns:
        `out`.

    Raises:
        ConfigError: a tensor does not match the pool.

    Source: Chen et al., Punica, arXiv:2310.18547, section 4; Sheng et al., S-LoRA, arXiv:2311.03285,
    section 5.
    """
    expand(out, shrink(x, pool, plan), pool, plan)
    return out


def shrink(x: Tensor, pool: RankPool, plan: SegmentPlan) -> Tensor:
    """Multiply the planned rows by A of each slice, for `expand`; one launch.

    Returns:
        fp32 `[parts, slices, positions, ranks]`, to be summed over the parts. Elements beyond an adapter's
        own pages or beyond the planned positions are undefined.
    """
    _check("x", x, pool.width_in, pool)
    if x.dtype is not pool.dtype:
        raise ConfigError(f"x is {x.dtype} and the pool {pool.dtype}; convert one of them.")
    parts = _num_parts(pool, plan)
    h = torch.empty(
        parts, pool.num_slices, plan.capacity.rows, plan.width, dtype=torch.float32, device=x.device
    )
    if not plan.capacity.items:
        return h
    if has_kernels(x.device):
        shrink_call(h, x, pool, plan).launch()
    else:
        _shrink_in_torch(h, x, pool, plan)
    return h


def expand(out: Tensor, h: Tensor, pool: RankPool, plan: SegmentPlan, *, piece: int | None = None) -> None:
    """Multiply the result of `shrink` by B and add it to `out` in place; one launch.

    Args:
        out: `[rows, columns]`, the columns of all slices or of one.
        h: Result of `shrink` with the same pool and plan.
        pool: A and B of every adapter.
        plan: The adapter of each row.
        piece: A single slice; `None` for all.
    """
    first, last = _pieces(pool, piece)
    _check("out", out, pool.start_of(last) - pool.start_of(first), pool)
    if not plan.capacity.tiles:
        return
    if has_kernels(out.device):
        expand_call(out, h, pool, plan, piece).launch()
    else:
        _expand_in_torch(out, h, pool, plan, first, last)


def has_kernels(device: torch.device) -> bool:
    """Whether Triton is used on a device; without tensor cores in Triton, PyTorch is faster."""
    target = device_of(device).target
    return runs_triton(device) and (target is None or bool(target.mma))


def _num_parts(pool: RankPool, plan: SegmentPlan) -> int:
    return -(-pool.width_in // plan.tile.part) if plan.tile.part else 1


def shrink_call(h: Tensor, x: Tensor, pool: RankPool, plan: SegmentPlan) -> Call:
    """Return the kernel launch of `shrink`."""
    tile = plan.tile
    depth = tile.depth * 2 // max(2, x.itemsize)  # the same number of bytes for all dtypes
    grid = (plan.capacity.items, h.shape[0], pool.num_slices)
    tensors = (x, pool.a, h, plan.work)
    numbers = (plan.item_at, plan.row_at, pool.width_in, (tile.part or _full_width(pool, tile)) // depth)
    strides = (x.stride(0), pool.a.stride(0), pool.a.stride(1), *_strides(h))
    constants = {
        "BLOCK_M": tile.rows,
        "PAGES": tile.pages,
        "BLOCK_K": depth,
        "EVEN_K": pool.width_in % depth == 0,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    return Call(f"{_KERNELS}:shrink_kernel", grid, (*tensors, *numbers, *strides), constants)


def expand_call(out: Tensor, h: Tensor, pool: RankPool, plan: SegmentPlan, piece: int | None = None) -> Call:
    """Return the kernel launch of `expand`."""
    tile = plan.tile
    first, last = _pieces(pool, piece)
    blocks = pool.blocks_of(tile.columns, first, last)
    grid = (len(blocks), plan.capacity.tiles)
    tensors = (h, pool.b, out, plan.work, pool.blocks(tile.columns))
    numbers = (plan.tile_at, plan.row_at, blocks.start, pool.start_of(first), h.shape[0])
    strides = (*_strides(h), pool.b.stride(0), out.stride(0))
    constants = {
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "PAGES": tile.pages,
        "ALIGNED": pool.is_aligned,
        "num_warps": tile.warps,
        "num_stages": 2,
    }
    return Call(f"{_KERNELS}:expand_kernel", grid, (*tensors, *numbers, *strides), constants)


def _strides(h: Tensor) -> tuple[int, int, int]:
    """Return the strides of parts and slices in pages, and of positions in elements."""
    return h.stride(0) // PAGE_RANKS, h.stride(1) // PAGE_RANKS, h.stride(2)


def _full_width(pool: RankPool, tile: Tile) -> int:
    """Return the width of the input, rounded up to whole steps."""
    return -(-pool.width_in // tile.depth) * tile.depth


def _pieces(pool: RankPool, piece: int | None) -> tuple[int, int]:
    return (0, pool.num_slices) if piece is None else (piece, piece + 1)


def _ranks(segment_pages: tuple[int, ...], device: torch.device) -> Tensor:
    ranks = [page * PAGE_RANKS + rank for page in segment_pages for rank in range(PAGE_RANKS)]
    return torch.tensor(ranks, device=device)


def _shrink_in_torch(h: Tensor, x: Tensor, pool: RankPool, plan: SegmentPlan) -> None:
    h[1:] = 0
    for segment in plan.segments:
        rows = torch.tensor(plan.rows[segment.first : segment.last], device=x.device)
        ranks = _ranks(segment.place.pages, x.device)
        a = pool.a[:, ranks, : pool.width_in].float()
        h[0, :, segment.first : segment.last, : len(ranks)] = x[rows].float() @ a.transpose(1, 2)


def _expand_in_torch(
    out: Tensor, h: Tensor, pool: RankPool, plan: SegmentPlan, first: int, last: int
) -> None:
    for segment in plan.segments:
        rows = torch.tensor(plan.rows[segment.first : segment.last], device=out.device)
        ranks = _ranks(segment.place.pages, out.device)
        held = h[:, :, segment.first : segment.last, : len(ranks)].sum(0).to(pool.dtype).float()
        for piece in range(first, last):
            at = pool.start_of(piece) - pool.start_of(first)
            columns = slice(at, at + pool.widths[piece])
            change = held[piece] @ pool.part(piece)[1][ranks].float() * segment.place.scale
            out[rows, columns] = (out[rows, columns].float() + change).to(out.dtype)


def _check(name: str, tensor: Tensor, columns: int, pool: RankPool) -> None:
    if tensor.ndim != 2 or tensor.shape[1] != columns or (columns > 1 and tensor.stride(1) != 1):
        raise ConfigError(
            f"{name} is {tuple(tensor.shape)} with strides {tensor.stride()}; it must be [rows, {columns}], "
            "with contiguous columns."
        )
    if tensor.device != pool.device:
        raise ConfigError(f"{name} is on {tensor.device} and the pool on {pool.device}; move one of them.")
