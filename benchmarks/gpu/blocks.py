"""KV blocks of all layers: gathered by one launch, on the device and to pinned memory, beside one a layer."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.session import Session
from benchmarks.measure import Summary
from benchmarks.table import show
from hotswap.kernels.kv_blocks import BlockTable, gather, scatter

__all__ = ["run"]

# A Llama of 8B: 32 layers of 8 heads of 128, 16 tokens a block.
NUM_LAYERS, SHAPE, NUM_POOL_BLOCKS = 32, (8, 16, 128), 2048
COUNTS = (16, 64, 256)
_REPEATS = 5


def run(session: Session) -> None:
    """Measure and check each method; wall time, since the host's part of it counts here."""
    layers, shape, pool_blocks = (
        (2, (1, 4, 16), 12) if session.is_dry else (NUM_LAYERS, SHAPE, NUM_POOL_BLOCKS)
    )
    pools = [
        torch.randn(pool_blocks, *shape, device=session.device).to(session.dtype) for _ in range(2 * layers)
    ]
    table, found, lines = BlockTable(pools), list[dict[str, float | str]](), list[list[str]]()
    for count in (4,) if session.is_dry else COUNTS:
        blocks = torch.randperm(pool_blocks)[:count].tolist()
        size = count * table.block_bytes
        staging = torch.empty(size, dtype=torch.uint8, device=session.device)
        host = torch.empty(size, dtype=torch.uint8, pin_memory=not session.is_dry)
        methods = {
            "gather to the device": partial(gather, table, blocks, staging),
            "scatter from the device": partial(scatter, table, blocks, staging),
            "gather to pinned memory": partial(gather, table, blocks, host),
            "gather and copy to pinned": partial(_gather_and_copy, table, blocks, staging, host),
            "a call for each layer": partial(_by_layer, pools, blocks, staging),
        }
        for name, method in methods.items():
            try:
                method()
            except Exception as exc:
                session.report.setdefault("faults", []).append(f"{name} is not possible: {exc}")
                continue
            seconds = Summary.of([session.wall_s(method) for _ in range(_REPEATS)])
            found.append({"method": name, "blocks": count, "bytes": size, "s": seconds.median})
            shown = f"{1e6 * seconds.median:.0f}", f"{size / seconds.median / 1e9:.1f}"
            lines.append([f"{count} blocks, {name}", *shown])
            _compare(session, f"{count} blocks, {name}", host if "pinned" in name else staging, pools, blocks)
    session.report["kv_blocks"] = found
    show("KV blocks", ("", "us", "GB/s"), lines)


def _compare(session: Session, name: str, found: Tensor, pools: list[Tensor], blocks: list[int]) -> None:
    """Say so if what is in a buffer is not what is in the blocks."""
    right = torch.empty_like(found, device=session.device)
    _by_layer(pools, blocks, right)
    if not torch.equal(found.cpu(), right.cpu()):
        session.report.setdefault("faults", []).append(f"{name}: other bytes")


def _gather_and_copy(table: BlockTable, blocks: list[int], staging: Tensor, host: Tensor) -> None:
    gather(table, blocks, staging)
    host.copy_(staging, non_blocking=True)


def _by_layer(pools: list[Tensor], blocks: list[int], staging: Tensor) -> None:
    index = torch.tensor(blocks, device=staging.device)
    rows, at = staging.view(len(blocks), -1), 0
    for pool in pools:
        part = pool.index_select(0, index).view(len(blocks), -1).view(torch.uint8)
        rows[:, at : at + part.shape[1]] = part
        at += part.shape[1]
