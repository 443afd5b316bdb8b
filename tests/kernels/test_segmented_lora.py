"""`segmented_lora`: its plan, pool and torch path; `test_interpreted` runs its kernels."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels import tables
from hotswap.kernels.segmented_lora import (
    PAGE_RANKS,
    Capacity,
    PageAllocator,
    RankPlace,
    RankPool,
    SegmentPlan,
    Tile,
    make_plan,
    segmented_lora,
    shrink,
    tile_for,
    tiles,
    tiles_of,
)
from hotswap.kernels.segmented_lora.launch import expand_call, shrink_call
from hotswap.kernels.segmented_lora.reference import Adapter, segmented_lora_reference
from hotswap.kernels.segmented_lora.sweep import neighbours, sweep
from hotswap.kernels.segmented_lora.tiles import heuristic
from hotswap.kernels.targets import TARGETS, Device

TILES = st.builds(Tile, rows=st.sampled_from([16, 32, 64]), pages=st.sampled_from([1, 2, 4]))
PLACES = (
    RankPlace((3,)),
    RankPlace((0, 9), 0.5),
    None,
    RankPlace((5, 2, 8, 11), -2.0),
    RankPlace((1, 4, 7), 0.25),
)
MIXES = st.lists(st.integers(-1, len(PLACES) - 1), max_size=90)


def _records(plan: SegmentPlan, start: int, count: int) -> list[list[int]]:
    return plan.work[start : start + 5 * count].view(-1, 5).tolist()


@given(slots=MIXES, tile=TILES)
def test_a_plan_names_each_row_with_its_own_pages_once(slots: list[int], tile: Tile) -> None:
    plan = make_plan(slots, PLACES, tile=tile)
    work, room = plan.work.tolist(), plan.capacity
    assert len(work) == 5 * (room.items + room.tiles) + room.rows + room.pages
    seen: Counter[int] = Counter()
    for first, count, page_at, num_pages, _ in _records(plan, plan.tile_at, room.tiles):
        assert 0 < count <= tile.rows
        rows = work[plan.row_at + first : plan.row_at + first + count]
        for row in rows:
            place = PLACES[slots[row]]
            assert place is not None
            assert tuple(work[page_at : page_at + num_pages]) == place.pages
        seen.update(rows)
    assert seen == Counter(row for row, slot in enumerate(slots) if slot >= 0 and PLACES[slot] is not None)


@given(slots=MIXES, tile=TILES)
def test_the_work_of_an_adapter_depends_on_its_own_rank(slots: list[int], tile: Tile) -> None:
    plan = make_plan(slots, PLACES, tile=tile)
    items = _records(plan, plan.item_at, plan.capacity.items)
    computed = sum(count * num_pages for _, count, _, num_pages, _ in items)
    places = [PLACES[slot] for slot in slots if slot >= 0]
    assert computed == sum(len(place.pages) for place in places if place is not None)
    assert all(num_pages <= tile.pages for _, _, _, num_pages, _ in items)


@given(slots=MIXES, tile=TILES)
def test_a_capacity_holds_every_mix_it_was_made_for(slots: list[int], tile: Tile) -> None:
    adapted = [slot for slot in slots if slot >= 0 and PLACES[slot] is not None]
    capacity = Capacity.of(len(adapted), len(set(adapted)), 4, tile)
    plan = make_plan(slots, PLACES, tile=tile, capacity=capacity)
    assert plan.capacity == capacity


def test_a_mix_that_exceeds_its_capacity_is_refused() -> None:
    capacity = Capacity.of(3, 1, 1, Tile())
    with pytest.raises(ConfigError, match="capacity"):
        make_plan([0, 0, 0, 0], PLACES, capacity=capacity)


@pytest.mark.parametrize("slot", [-2, 5])
def test_a_slot_number_out_of_range_is_refused(slot: int) -> None:
    with pytest.raises(ConfigError, match="slot"):
        make_plan([0, slot], PLACES)


def test_the_plan_has_the_bits_of_the_scales() -> None:
    plan = make_plan([1, 3, 4], PLACES)
    bits = plan.work[plan.tile_at : plan.row_at].view(-1, 5)[:, 4]
    assert sorted(bits.view(torch.float32).tolist()) == [-2.0, 0.25, 0.5]


# ---------------------------------------------------------------------- the pool


@given(st.lists(st.one_of(st.integers(1, 70), st.none()), max_size=40))
def test_pages_are_allocated_once_until_freed(requests: list[int | None]) -> None:
    allocator, held = PageAllocator(12), list[tuple[int, ...]]()
    for rank in requests:
        if rank is None:
            if held:
                allocator.free(held.pop(0))
            continue
        free = allocator.num_free
        pages = allocator.allocate(rank)
        assert (pages is None) == (-(-rank // PAGE_RANKS) > free)
        if pages is not None:
            assert len(pages) == -(-rank // PAGE_RANKS)
            held.append(pages)
        taken = [page for pages in held for page in pages]
        assert len(set(taken)) == len(taken) == 12 - allocator.num_free
    for pages in held:
        allocator.free(pages)
    assert allocator.num_free == 12


def _pair(rank: int, width_in: int, width_out: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    down, up = (torch.randn(rank, width, generator=generator).to(dtype) for width in (width_in, width_out))
    return down, up


def test_put_overwrites_the_previous_adapter_of_a_page() -> None:
    pool, place = RankPool(4, 24, (40, 8), dtype=torch.float32), RankPlace((2, 0))
    pool.put(place, [_pair(32, 24, 40, torch.float32), _pair(30, 24, 8, torch.float32)])
    small = _pair(3, 24, 40, torch.float32)
    pool.put(RankPlace((2,)), [small, None])
    ranks = slice(2 * PAGE_RANKS, 3 * PAGE_RANKS)
    for piece, parts in enumerate((small, (torch.zeros(0, 24), torch.zeros(0, 8)))):
        for held, given_part in zip(pool.part(piece), parts, strict=True):
            assert torch.equal(held[ranks][: len(given_part)], given_part)
            assert not held[ranks][len(given_part) :].any()
            assert held[:PAGE_RANKS].any(), "the other page is unchanged"


@pytest.mark.parametrize("shapes", [((4, 23), (4, 40)), ((4, 24), (4, 41)), ((17, 24), (17, 40))])
def test_a_part_that_does_not_fit_is_refused(shapes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    pool = RankPool(4, 24, (40,), dtype=torch.float32)
    with pytest.raises(ConfigError, match="Slice 0"):
        pool.put(RankPlace((1,)), [(torch.zeros(shapes[0]), torch.zeros(shapes[1]))])


# ---------------------------------------------------------------------- the torch path


@given(slots=st.lists(st.integers(-1, 4), max_size=40), tile=TILES, seed=st.integers(0, 99))
def test_torch_matches_float64(slots: list[int], tile: Tile, seed: int) -> None:
    widths, width_in = (40, 24, 7), 52
    pool = RankPool(12, width_in, widths, dtype=torch.float32)
    for page in range(12):
        ranks = slice(page * PAGE_RANKS, (page + 1) * PAGE_RANKS)
        pool.a[:, ranks] = pool.b[ranks] = float("nan")
    adapters: list[Adapter | None] = []
    for place in PLACES:
        if place is None:
            adapters.append(None)
            continue
        rank = Random(seed).randint(1, PAGE_RANKS * len(place.pages))
        parts = [None, *(_pair(rank, width_in, width, torch.float32) for width in widths[1:])]
        pool.put(place, parts)
        adapters.append(Adapter([p and p[0] for p in parts], [p and p[1] for p in parts], place.scale))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(slots), width_in, generator=generator)
    before = torch.randn(len(slots), sum(widths), generator=generator)
    for row, slot in enumerate(slots):
        if slot < 0 or PLACES[slot] is None:
            x[row] = before[row] = float("nan")
    out = segmented_lora(before.clone(), x, pool, make_plan(slots, PLACES, tile=tile))
    right = segmented_lora_reference(before, x, adapters, slots, widths)
    assert torch.allclose(out.double(), right, rtol=1e-5, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize(
    ("out", "x"),
    [
        (torch.zeros(3, 41), torch.zeros(3, 24)),
        (torch.zeros(3, 40), torch.zeros(3, 25)),
        (torch.zeros(40, 3).t(), torch.zeros(3, 24)),
        (torch.zeros(3, 40), torch.zeros(3, 24, dtype=torch.bfloat16)),
        (torch.zeros(3, 40), torch.zeros(24)),
    ],
)
def test_tensors_that_do_not_fit_are_refused(out: Tensor, x: Tensor) -> None:
    pool = RankPool(12, 24, (40,), dtype=torch.float32)
    with pytest.raises(ConfigError):
        segmented_lora(out, x, pool, make_plan([0, 1, -1], PLACES))


# ---------------------------------------------------------------------- tiles


@settings(max_examples=30)
@given(mixes=st.lists(MIXES.filter(lambda slots: any(PLACES[s] for s in slots if s >= 0)), min_size=2))
def test_a_new_mix_compiles_nothing(mixes: list[list[int]]) -> None:
    pytest.importorskip("triton", reason="Triton is made for Linux alone")
    from tests.kernels.launches import specialised

    pool = RankPool(12, 96, (64, 32), dtype=torch.bfloat16)
    for tile in tiles_of(96, Device("any", TARGETS["sm_90"], 132)):
        found: set[str] = set()
        for slots in mixes:
            plan = make_plan(slots, PLACES, tile=tile)
            x = torch.zeros(len(slots), 96, dtype=torch.bfloat16)
            out, h = torch.zeros(len(slots), 96, dtype=torch.bfloat16), shrink(x, pool, plan)
            found.add(repr(specialised(shrink_call(h, x, pool, plan))))
            found.add(repr(specialised(expand_call(out, h, pool, plan))))
        assert len(found) == 2


@given(rows=st.integers(0, 5000), target=st.sampled_from([None, *sorted(TARGETS)]))
def test_every_step_has_a_tile_that_was_compiled_ahead(rows: int, target: str | None) -> None:
    device = Device("any", TARGETS.get(target or ""), 100)
    assert tile_for(rows, 4096, device) in tiles_of(4096, device)


def test_a_measured_tile_is_used_and_compiled_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, best = Device("H9", TARGETS["sm_90"], 132), Tile(rows=32, columns=64)
    record = sweep(4096, 64, Tile(), lambda tile: 1.0 if tile == best else 2.0 + (tile.rows != 32))
    tables.write(tmp_path / "table.json", "H9", "sm_90", {}, [record])
    monkeypatch.setattr(tiles, "TABLE", tmp_path / "table.json")
    assert tile_for(40, 5120, device) == best
    assert tile_for(9999, 4096, device) == best
    assert best in tiles_of(4096, device)
    assert tile_for(40, 40_960, device) == heuristic(40, device), "too far from the measured shape"


@given(st.randoms(use_true_random=False))
def test_a_sweep_is_never_slower_than_its_start(random: Random) -> None:
    cost: dict[Tile, float] = {}

    def measure(tile: Tile) -> float:
        return cost.setdefault(tile, random.choice([float("inf"), random.uniform(1, 100)]))

    record = sweep(1024, 16, Tile(), measure)
    assert cost[Tile(**dict(record.choice))] <= cost[Tile()]  # type: ignore[arg-type]
    assert len(cost) <= 1 + 2 * len(list(neighbours(Tile())))


def test_a_sweep_stops_without_time() -> None:
    tried: list[Tile] = []

    def measure(tile: Tile) -> float:
        tried.append(tile)
        return 1.0

    assert sweep(1024, 16, Tile(), measure, has_time=lambda: len(tried) < 4).figures["tried"] == 4


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from hotswap.kernels import kv_blocks, segmented_lora
pool = segmented_lora.RankPool(2, 16, (16,), dtype=torch.float32)
plan = segmented_lora.make_plan([0, -1], [segmented_lora.RankPlace((1,))])
print(float(segmented_lora.segmented_lora(torch.ones(2, 16), torch.ones(2, 16), pool, plan).sum()))
"""


def test_adapters_need_no_triton_on_a_cpu() -> None:
    ended = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "32.0"
