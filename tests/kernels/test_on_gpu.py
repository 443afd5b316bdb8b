"""LoRA, KV block and attention kernels on a CUDA device, against float64 and against plain copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from hotswap.kernels.kv_blocks import BlockTable, gather, scatter
from hotswap.kernels.kv_blocks.reference import gather_reference, scatter_reference
from hotswap.kernels.paged_attention_gpu import Rows, Visible, append, attend, has_kernels
from hotswap.kernels.paged_attention_gpu.reference import attend_reference
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
from tests.kernels import paged_rows
from tests.kernels.kv_pools import CACHES, make_pools, same
from tests.kernels.paged_rows import Layer, Step, make_step, relative_error

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


ATTENTION = {
    "Llama 8B": Layer(32, 8, 128, 128, 32),
    "Qwen2 0.5B": Layer(14, 2, 64, 64, 16),
    "Gemma 2B": Layer(8, 1, 256, 256, 16, softcap=20.0),
    "gpt-oss": Layer(16, 2, 64, 64, 16, has_sinks=True),
    "DeepSeek": Layer(8, 8, 192, 128, 32),
    "Falcon": Layer(71, 1, 64, 64, 16),
    "Phi 3": Layer(8, 8, 96, 96, 48),
}
# Decodes at four lengths, a prompt, and a continuation.
CONTEXTS = ((0, 1), (16, 1), (999, 1), (8999, 1), (0, 70), (900, 100))


def attended(step: Step, rows: Rows | None = None, visible: Visible | None = None) -> Tensor:
    return attend(
        step.queries,
        step.keys,
        step.values,
        rows or step.rows,
        visible or step.form,
        scale=step.layer.key_dim**-0.5,
        softcap=step.layer.softcap,
        sinks=step.sinks,
    )


def attention_reference(step: Step) -> Tensor:
    return attend_reference(
        step.queries,
        step.keys,
        step.values,
        step.rows,
        step.visible,
        scale=step.layer.key_dim**-0.5,
        softcap=step.layer.softcap,
        sinks=step.sinks,
    )


@pytest.mark.parametrize("mask", ["causal", "window", "first and last"])
@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("dtype", paged_rows.TOLERANCE, ids=str)
def test_attention_matches_float64_and_repeats_bit_for_bit(dtype: torch.dtype, name: str, mask: str) -> None:
    assert has_kernels(CUDA)
    if mask != "causal" and name not in ("Llama 8B", "Qwen2 0.5B"):
        pytest.skip("masks are read in the same way for all shapes")
    host = make_step(replace(ATTENTION[name], dtype=dtype), CONTEXTS, mask=mask, padding=(2, 1, 1))
    step = host.to(CUDA)
    found = attended(step)
    error = relative_error(found, attention_reference(host))
    assert error <= paged_rows.TOLERANCE[dtype], f"relative error {error:.2e}"
    assert torch.equal(attended(step), found), "the same call gave other bits"
    assert not found[-2:].any(), "padding rows are zero"


@pytest.mark.parametrize("dtype", paged_rows.TOLERANCE, ids=str)
def test_the_bits_of_a_row_depend_on_no_other(dtype: torch.dtype) -> None:
    """Alone, a short row is computed by one launch, and beside a long one in splits."""
    step, row = make_step(replace(ATTENTION["Llama 8B"], dtype=dtype), CONTEXTS).to(CUDA), 0
    together = attended(step)
    for number, (before, count) in enumerate(CONTEXTS):
        own = slice(row, row + count)
        singles, tiles = (kept[kept[:, 0] == number] for kept in (step.rows.singles, step.rows.tiles))
        shift = torch.tensor([number, row, 0], dtype=torch.int32, device=CUDA)
        rows = Rows(step.rows.tables[number : number + 1], singles - shift, tiles - shift, False)
        visible = step.visible[own, : before + count].contiguous()
        alone = replace(step, queries=step.queries[own], visible=visible)
        assert torch.equal(attended(alone, rows), together[own])
        row += count


def test_one_captured_graph_serves_other_tables_and_positions() -> None:
    layer, num_keys = replace(ATTENTION["Llama 8B"], dtype=torch.bfloat16), 4096
    mixes = [((4000, 1), (17, 1), (300, 1)), ((1, 1),), ((90, 1), (2500, 1))]
    steps = [
        make_step(layer, mix, seed=seed, padding=(4 - len(mix), 4 - len(mix), 1), spare=200)
        for seed, mix in enumerate(mixes)
    ]
    blocks = 300
    keys, values = (torch.zeros(blocks, 8, 32, 128, dtype=layer.dtype, device=CUDA) for _ in range(2))
    queries = torch.zeros(4, 32, 128, dtype=layer.dtype, device=CUDA)
    mask = torch.zeros(4, num_keys, dtype=torch.bool, device=CUDA)
    rows = Rows(
        torch.zeros(4, num_keys // 32, dtype=torch.int32, device=CUDA),
        torch.zeros(4, 3, dtype=torch.int32, device=CUDA),
        torch.zeros(1, 3, dtype=torch.int32, device=CUDA),
    )

    def compute() -> Tensor:
        return attend(queries, keys, values, rows, Visible.of(mask), scale=128**-0.5)

    compute()  # builds the kernels
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = compute()
    for step in steps:
        given = step.to(CUDA)
        for pool, content in ((keys, given.keys), (values, given.values)):
            pool[: len(content)] = content[:blocks]
        queries.copy_(given.queries)
        mask.zero_()[:, : given.visible.shape[1]] = given.visible
        rows.tables[: len(given.rows.tables), : given.rows.tables.shape[1]] = given.rows.tables
        rows.singles.copy_(given.rows.singles)
        graph.replay()
        assert relative_error(out, attention_reference(step)) <= paged_rows.TOLERANCE[layer.dtype]


@pytest.mark.parametrize("name", ATTENTION)
def test_keys_and_values_are_written_to_their_slots_alone(name: str) -> None:
    layer, count = ATTENTION[name], 70
    shape = (9, layer.kv_heads, layer.block_tokens)
    dims = (layer.key_dim, layer.value_dim)
    keys, values = (torch.randn(*shape, dim, dtype=torch.bfloat16, device=CUDA) for dim in dims)
    rows = [torch.randn(count, layer.kv_heads, dim, dtype=torch.bfloat16, device=CUDA) for dim in dims]
    slots = torch.randperm(9 * layer.block_tokens, device=CUDA)[:count]
    blocks, offsets = slots // layer.block_tokens, slots % layer.block_tokens
    expected = keys.clone(), values.clone()
    for pool, part in zip(expected, rows, strict=True):
        pool[blocks, :, offsets] = part
    append(rows[0].transpose(0, 1), rows[1].transpose(0, 1), keys, values, blocks, offsets)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])
