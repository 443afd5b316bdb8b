"""LoRA and KV block kernels on a CUDA device, against float64 and against plain copies."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch
from torch import Tensor

from hotswap.kernels.kv_blocks import BlockTable, gather, scatter
from hotswap.kernels.kv_blocks.reference import gather_reference, scatter_reference
from hotswap.kernels.segmented_lora import (
    Capacity,
    RankPlace,
    RankPool,
    SegmentPlan,
    Tile,
    make_plan,
    segmented_lora,
    tile_for,
    tiles_of,
)
from hotswap.kernels.segmented_lora.reference import Adapter, segmented_lora_reference
from tests.kernels.kv_pools import CACHES, make_pools, same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

CUDA = torch.device("cuda")
# Relative to the update: the result of A is rounded, and the sum is rounded when it is written.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}
RANKS = (4, 7, 16, 24, 64)
PLACES = (RankPlace((3,)), RankPlace((9,), 0.5), RankPlace((0,)), RankPlace((5, 2)), RankPlace((8, 1, 7, 4)))


def loaded(dtype: torch.dtype, width_in: int, widths: Sequence[int]) -> tuple[RankPool, list[Adapter]]:
    """Adapters of all ranks; free pages are filled with NaN."""
    generator = torch.Generator().manual_seed(1)
    pool = RankPool(12, width_in, widths, dtype=dtype, device=CUDA)
    pool.a.fill_(float("nan"))
    pool.b[6 * 16 : 7 * 16].fill_(float("nan"))
    adapters: list[Adapter] = []
    for rank, place in zip(RANKS, PLACES, strict=True):
        downs = [(torch.randn(rank, width_in, generator=generator) / width_in**0.5).to(dtype) for _ in widths]
        ups = [(torch.randn(rank, width, generator=generator) / rank**0.5).to(dtype) for width in widths]
        pool.put(place, list(zip(downs, ups, strict=True)))
        adapters.append(Adapter(downs, ups, place.scale))
    return pool, adapters


def mix(count: int) -> list[int]:
    return Random(count).choices(range(-1, len(RANKS)), k=count)


@pytest.mark.parametrize("num_rows", [0, 1, 63, 300, 1000])
@pytest.mark.parametrize(
    ("width_in", "widths"), [(4096, (4096, 1024, 1024)), (1000, (272, 48)), (75, (37, 5))]
)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_row_gets_its_update(
    dtype: torch.dtype, width_in: int, widths: tuple[int, ...], num_rows: int
) -> None:
    pool, adapters = loaded(dtype, width_in, widths)
    slots = mix(num_rows)
    adapted = torch.tensor([slot >= 0 for slot in slots], dtype=torch.bool)
    x, before = torch.randn(num_rows, width_in).to(dtype), torch.zeros(num_rows, sum(widths))
    x[~adapted] = float("nan")
    right = segmented_lora_reference(before, x, adapters, slots, widths)
    for tile in {tile_for(num_rows, width_in, CUDA), *tiles_of(width_in, CUDA)}:
        plan = make_plan(slots, PLACES, tile=tile, device=CUDA)
        outs = [segmented_lora(before.clone().to(CUDA), x.to(CUDA), pool, plan) for _ in range(2)]
        assert torch.equal(*outs), "the same call gave other bits"
        error = (outs[0].cpu().double() - right).norm() / right.norm().clamp(min=1e-30)
        assert error <= TOLERANCE[dtype], f"{tile}: relative error {error:.2e}"


def test_one_captured_graph_works_for_every_mix() -> None:
    pool, adapters = loaded(torch.bfloat16, 512, (256, 64))
    capacity = Capacity.of(32, len(RANKS), 4, Tile())
    x, out = torch.zeros(32, 512, dtype=torch.bfloat16, device=CUDA), torch.zeros(32, 320, device=CUDA)

    def planned(slots: Sequence[int]) -> SegmentPlan:
        return make_plan(slots, PLACES, capacity=capacity, width=64, device=CUDA)

    static = planned([-1] * 32)
    segmented_lora(out, x, pool, static)  # builds the kernels
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        segmented_lora(out, x, pool, static)
    for count in (32, 5, 1):
        slots = [*mix(count), *[-1] * (32 - count)]
        given = torch.randn(32, 512).to(torch.bfloat16)
        x.copy_(given)
        out.zero_()
        static.work.copy_(planned(slots).work)
        graph.replay()
        right = segmented_lora_reference(torch.zeros(32, 320), given, adapters, slots, (256, 64))
        assert (out.cpu().double() - right).norm() <= 2**-7 * right.norm()


@pytest.mark.parametrize("where", ["device", "pinned"])
@pytest.mark.parametrize("cache", CACHES)
def test_blocks_go_to_the_buffer_and_back(cache: str, where: str) -> None:
    pools, blocks = make_pools(cache, torch.bfloat16), [7, -1, 19, 0]
    table, right = BlockTable([pool.to(CUDA) for pool in pools]), _poisoned(pools, 4)
    staging = right.pin_memory() if where == "pinned" else right.to(CUDA)
    gather(table, blocks, staging)
    torch.cuda.synchronize()
    assert same(staging.cpu(), gather_reference(pools, blocks, right))
    targets = [torch.zeros_like(pool).to(CUDA) for pool in pools]
    scatter(BlockTable(targets), blocks, staging)
    filled = scatter_reference([torch.zeros_like(pool) for pool in pools], blocks, staging.cpu())
    assert all(same(target.cpu(), expected) for target, expected in zip(targets, filled, strict=True))


def _poisoned(pools: Sequence[Tensor], count: int) -> Tensor:
    size = sum(pool[0].numel() * pool.itemsize for pool in pools)
    return torch.full((count, size), 0xA5, dtype=torch.uint8)
