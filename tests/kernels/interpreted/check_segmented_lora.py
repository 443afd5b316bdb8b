"""The kernels of `segmented_lora` in Triton's interpreter, against float64; run by `test_interpreted`.

Uninitialized memory is NaN here, and so are the pages without an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import pytest
import torch
from torch import Tensor

from hotswap.kernels.segmented_lora import (
    PAGE_RANKS,
    Capacity,
    PageAllocator,
    RankPlace,
    RankPool,
    SegmentPlan,
    Tile,
    expand,
    make_plan,
    segmented_lora,
    shrink,
)
from hotswap.kernels.segmented_lora.reference import Adapter, segmented_lora_reference
from tests.kernels.interpreted.guard import guarded

RANKS = (4, 7, 8, 16, 24, 32, 64)
# What is between A and B is rounded to the pool's dtype: half a unit in its last place, at most.
TOLERANCE = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 1e-6}
PROJECTIONS = {
    "one": (256, (128,)),
    "qkv": (200, (144, 48, 48)),
    "odd": (75, (37, 5)),
}
TILES = {
    "decode": Tile(rows=16, pages=1, depth=64, columns=128, part=128),
    "wide": Tile(rows=16, pages=4, depth=128, columns=64, part=0),
    "prefill": Tile(rows=32, pages=2, depth=64, columns=128, part=64),
}
MIXES: dict[str, tuple[int, ...]] = {
    "no rows": (),
    "no adapters": (-1, -1, -1),
    "one": (0,),
    "one of three": (-1, -1, 3),
    "many rows": (6,) * 37,
    "all": (*range(7), -1, *range(6, -1, -1)),
    "at tile edges": (5,) * 16 + (-1,) * 5 + (1,) * 17 + (5, 7),
    "random": tuple(Random(3).choices([-1, *range(8)], k=41)),
}


@pytest.fixture(autouse=True)
def _nan_in_uninitialized_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # fills the memory of `torch.empty`
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    pool: RankPool
    places: list[RankPlace | None]
    adapters: list[Adapter | None]

    @property
    def widths(self) -> Sequence[int]:
        return self.pool.widths


def load(dtype: torch.dtype, width_in: int, widths: Sequence[int], seed: int = 1) -> Loaded:
    """Adapters of all ranks, loaded twice so that their pages are not adjacent, and an empty slot."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    num_pages = 4 + sum(-(-rank // PAGE_RANKS) for rank in RANKS)
    allocator = PageAllocator(num_pages)
    pool = RankPool(num_pages, width_in, widths, dtype=dtype)
    places: list[RankPlace | None] = [None] * (len(RANKS) + 1)
    adapters: list[Adapter | None] = [None] * (len(RANKS) + 1)
    for _ in range(2):
        for slot in random.sample(range(len(RANKS)), len(RANKS)):
            former = places[slot]
            if former is not None:
                allocator.free(former.pages)
            pages = allocator.allocate(RANKS[slot])
            assert pages is not None
            parts = [_part(generator, dtype, RANKS[slot], width_in, width) for width in widths]
            if slot == 2:
                parts[-1] = None
            places[slot] = place = RankPlace(pages, 2.0 / (slot + 1))
            pool.put(place, parts)
            adapters[slot] = Adapter([p and p[0] for p in parts], [p and p[1] for p in parts], place.scale)
    held = {page for place in places if place for page in place.pages}
    for page in set(range(num_pages)) - held:
        ranks = slice(page * PAGE_RANKS, (page + 1) * PAGE_RANKS)
        pool.a[:, ranks] = pool.b[ranks] = float("nan")
    return Loaded(pool, places, adapters)


def _part(
    generator: torch.Generator, dtype: torch.dtype, rank: int, width_in: int, width: int
) -> tuple[Tensor, Tensor] | None:
    down = torch.randn(rank, width_in, generator=generator) / width_in**0.5
    up = torch.randn(rank, width, generator=generator) / rank**0.5
    return down.to(dtype), up.to(dtype)


def rows(loaded: Loaded, count: int, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Inputs, and initial outputs in fp32."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, loaded.pool.width_in, generator=generator).to(loaded.pool.dtype)
    return x, torch.randn(count, sum(loaded.widths), generator=generator)


def has_adapter(loaded: Loaded, slots: Sequence[int]) -> Tensor:
    return torch.tensor([slot >= 0 and loaded.places[slot] is not None for slot in slots], dtype=torch.bool)


# All mixes with one projection, and those of many adapters with all: the interpreter is slow.
CASES = [
    *((torch.bfloat16, "qkv", tile, mix) for tile in TILES for mix in MIXES),
    *(
        (torch.bfloat16, projection, tile, mix)
        for projection in ("one", "odd")
        for tile in TILES
        for mix in ("one of three", "at tile edges", "random")
    ),
    *((torch.float16, projection, tile, "random") for projection in PROJECTIONS for tile in TILES),
    *((torch.float32, "qkv", tile, "random") for tile in TILES),
]


@pytest.mark.parametrize(("dtype", "projection", "tile", "mix"), CASES, ids=lambda value: str(value))
def test_every_row_gets_its_update(dtype: torch.dtype, projection: str, tile: str, mix: str) -> None:
    loaded, slots = load(dtype, *PROJECTIONS[projection]), MIXES[mix]
    x, before = rows(loaded, len(slots))
    adapted = has_adapter(loaded, slots)
    x[~adapted] = float("nan")
    plan = make_plan(slots, loaded.places, tile=TILES[tile])
    out = segmented_lora(before.clone(), x, loaded.pool, plan)
    right = segmented_lora_reference(before, x, loaded.adapters, slots, loaded.widths)
    assert torch.equal(out[~adapted], before[~adapted]), "a row without adapter was written to"
    change = (right - before.double())[adapted]
    error = (out.double() - right)[adapted].norm() / change.norm().clamp(min=1e-30)
    assert not adapted.any() or error < TOLERANCE[dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_outputs_of_the_pools_dtype_are_rounded_once(dtype: torch.dtype) -> None:
    loaded, slots = load(dtype, 96, (64, 32)), MIXES["all"]
    x, before = rows(loaded, len(slots))
    exact = segmented_lora(before.to(dtype).float(), x, loaded.pool, make_plan(slots, loaded.places))
    out = segmented_lora(before.to(dtype), x, loaded.pool, make_plan(slots, loaded.places))
    assert torch.equal(out, exact.to(dtype))


def test_the_same_call_gives_the_same_bits() -> None:
    loaded, slots = load(torch.bfloat16, 300, (96, 64)), MIXES["random"]
    x, before = rows(loaded, len(slots))
    first, again = (
        segmented_lora(before.clone(), x, loaded.pool, make_plan(slots, loaded.places, tile=TILES["decode"]))
        for _ in range(2)
    )
    assert torch.equal(first, again)


def test_a_slice_alone_gets_the_same_bits_as_among_the_others() -> None:
    loaded, slots = load(torch.bfloat16, 200, (144, 48, 40)), MIXES["random"]
    x, before = rows(loaded, len(slots))
    plan = make_plan(slots, loaded.places, tile=TILES["decode"])
    together = segmented_lora(before.clone(), x, loaded.pool, plan)
    h = shrink(x, loaded.pool, plan)
    starts = [loaded.pool.start_of(piece) for piece in range(4)]
    parts = [before[:, first:last].contiguous() for first, last in pairwise(starts)]
    for piece, part in enumerate(parts):
        expand(part, h, loaded.pool, plan, piece=piece)
    assert torch.equal(torch.cat(parts, 1), together)


def test_plans_of_equal_capacity_are_interchangeable() -> None:
    """The `work` of another plan, copied into a static plan, gives the result of the other plan."""
    loaded, tile = load(torch.float16, 128, (64, 64)), TILES["decode"]
    capacity = Capacity.of(48, 8, 4, tile)
    static = _plan(loaded, MIXES["all"], tile, capacity)
    for mix in ("random", "one", "no rows", "many rows"):
        slots = (*MIXES[mix], *[-1] * (48 - len(MIXES[mix])))
        x, before = rows(loaded, 48)
        expected = segmented_lora(before.clone(), x, loaded.pool, make_plan(slots, loaded.places, tile=tile))
        static.work.copy_(_plan(loaded, slots, tile, capacity).work)
        assert torch.equal(segmented_lora(before.clone(), x, loaded.pool, static), expected), mix


def _plan(loaded: Loaded, slots: Sequence[int], tile: Tile, capacity: Capacity) -> SegmentPlan:
    return make_plan(slots, loaded.places, tile=tile, capacity=capacity, width=64)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_nothing_outside_the_tensors_is_read_or_written(projection: str, tile: str) -> None:
    """Each tensor is followed by an inaccessible page, so an access beyond it crashes the process."""
    loaded, slots = load(torch.float16, *PROJECTIONS[projection]), (*MIXES["random"], 6)
    x, before = rows(loaded, len(slots))
    pool = loaded.pool
    pool.a, pool.b = guarded(pool.a), guarded(pool.b)
    plan = make_plan(slots, loaded.places, tile=TILES[tile])
    blocks = pool.blocks(plan.tile.columns)
    pool._blocks[plan.tile.columns] = guarded(blocks)
    plan = SegmentPlan(guarded(plan.work), plan.capacity, plan.tile, plan.width, plan.segments, plan.rows)
    out = guarded(before)
    expand(out, guarded(shrink(guarded(x), pool, plan)), pool, plan)
    right = segmented_lora_reference(before, x, loaded.adapters, slots, loaded.widths)
    assert torch.allclose(out.double(), right, rtol=0, atol=1e-2)
