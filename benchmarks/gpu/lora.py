"""Adapters of mixed batches: right against float64, swept, and beside a loop over adapters in torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.session import Session, relative_error
from benchmarks.table import show
from hotswap.kernels import tables
from hotswap.kernels.segmented_lora import (
    PageAllocator,
    RankPlace,
    RankPool,
    SegmentPlan,
    Tile,
    make_plan,
    segmented_lora,
    tile_for,
)
from hotswap.kernels.segmented_lora.pool import pages_for
from hotswap.kernels.segmented_lora.reference import Adapter, segmented_lora_reference
from hotswap.kernels.segmented_lora.sweep import sweep
from hotswap.kernels.targets import device_of

__all__ = ["check", "compare"]

# Queries, keys and values of a 70B Llama.
WIDTH, WIDTHS = 8192, (8192, 1024, 1024)
NUM_ADAPTERS = 32
RANKS = {"rank 16": (16,), "ranks 8 to 64": (8, 16, 32, 64)}
# Rows of a step, and among how many adapters they are dealt out.
MIXES = ((1, 1), (16, 1), (16, 16), (32, 32), (64, 32), (256, 32), (2048, 8))
# What is between A and B is rounded to 16 bits, and so is the result.
BOUND = 8e-3
_SWEEP_SHARE = 0.3


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    pools: list[RankPool]
    places: list[RankPlace]
    adapters: list[Adapter]
    ranks: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Of all adapters, without what fills their pages."""
        pool = self.pools[0]
        each = (pool.width_in * pool.num_slices + sum(pool.widths)) * pool.dtype.itemsize
        return sum(self.ranks) * each


def check(session: Session) -> None:
    """Compare with float64: mixed ranks, rows without adapter, the same bits again."""
    loaded = _load(session, (4, 7, 8, 16, 24, 32, 64), *_sizes(session, checked=True))
    pool, worst = loaded.pools[0], 0.0
    for num_rows in (1, 17) if session.is_dry else (1, 17, 130, 700):
        slots = [(5 * row) % 8 - 1 for row in range(num_rows)]
        x = torch.randn(num_rows, pool.width_in, device=session.device).to(session.dtype)
        before = torch.randn(num_rows, sum(pool.widths), device=session.device)
        right = segmented_lora_reference(before, x, loaded.adapters, slots, pool.widths)
        plan = _plan(session, loaded, slots)
        first, again = (segmented_lora(before.clone(), x, pool, plan) for _ in range(2))
        change = right - before.double()
        error = relative_error(first.double() - before.double(), change) if change.any() else 0.0
        worst = max(worst, error)
        untouched = [row for row, slot in enumerate(slots) if slot < 0]
        same = torch.equal(first, again) and torch.equal(first[untouched], before[untouched])
        if not error <= BOUND or not same:
            session.report.setdefault("faults", []).append(
                f"adapters of {num_rows} rows: error {error:.2e}, bits as they should be: {same}"
            )
    session.report["lora_error"] = worst
    print(f"adapters against float64: {worst:.2e}")


def compare(session: Session, out: Path) -> None:
    """Sweep the tiles, and set the kernels beside a loop and what bytes alone would take."""
    records: list[tables.Record] = []
    lines: list[list[str]] = []
    found: list[dict[str, float | str]] = []
    for name, ranks in RANKS.items():
        count = 2 if session.is_dry else NUM_ADAPTERS
        loaded = _load(session, (ranks * count)[:count], *_sizes(session))
        for num_rows, used in ((3, 2),) if session.is_dry else MIXES:
            if session.remaining_s < 20 and not session.is_dry:
                session.report.setdefault("left_out", []).append(f"adapters, {name}, {num_rows} rows")
                continue
            slots = [row % used for row in range(num_rows)]
            if name == "rank 16" and used in (2, 8, NUM_ADAPTERS):
                records.append(_swept(session, loaded, slots))
            ours, loop, floor = _times(session, loaded, slots, records)
            found.append({"ranks": name, "rows": num_rows, "adapters": used, "us": ours, "loop_us": loop})
            found[-1]["floor_us"] = floor
            lines.append(
                [f"{name}, {num_rows} rows of {used}", f"{ours:.1f}", f"{loop / ours:.2f}", f"{floor:.1f}"]
            )
        del loaded
        session.free()
    device = device_of(session.device)
    target = device.target.name if device.target else "sm_90"
    about = {"num_units": session.num_units, **session.report.get("versions", {})}
    tables.write(out / "segmented_lora.table.json", device.name, target, about, records)
    session.report["lora"] = found
    head = ("queries, keys and values", "us", "loop takes times", "floor us")
    show(f"adapters on {device.name}, {WIDTH} to {WIDTHS}", head, lines)


def _swept(session: Session, loaded: _Loaded, slots: Sequence[int]) -> tables.Record:
    until_s = session.remaining_s * (1 - _SWEEP_SHARE / 3)
    start = tile_for(len(slots), WIDTH, session.device)

    def measure(tile: Tile) -> float:
        try:
            return _time(session, loaded, _plan(session, loaded, slots, tile))
        except Exception as exc:  # Triton's own errors, where it asks for more than there is
            print(f"  {tile}: {str(exc).splitlines()[0][:80]}")
            return math.inf

    def has_time() -> bool:
        return not session.is_dry and session.remaining_s > until_s

    return sweep(WIDTH, len(slots), start, measure, has_time=has_time)


def _times(
    session: Session, loaded: _Loaded, slots: Sequence[int], records: Sequence[tables.Record]
) -> tuple[float, float, float]:
    """Microseconds of the kernels, of a loop, and of the bytes that must move."""
    swept = [Tile(**dict(record.choice)) for record in records if record.rows >= len(slots)]  # type: ignore[arg-type]
    tile = swept[0] if swept else tile_for(len(slots), WIDTH, session.device)
    ours = _time(session, loaded, _plan(session, loaded, slots, tile))
    pool, rows = loaded.pools[0], len(slots)
    x, out = _rows(session, loaded, rows)
    dealt = {slot: torch.tensor([r for r in range(rows) if slots[r] == slot]) for slot in set(slots)}
    on_device = {slot: index.to(session.device) for slot, index in dealt.items()}
    loop = session.replayed([partial(_loop, out, x, loaded, on_device)]).median
    used = sum(loaded.ranks[slot] for slot in dealt)
    each = (pool.width_in * pool.num_slices + sum(pool.widths)) * pool.dtype.itemsize
    moved = used * each + rows * (pool.width_in + 2 * sum(pool.widths)) * pool.dtype.itemsize
    return ours, loop, moved / session.bytes_per_s * 1e6


def _time(session: Session, loaded: _Loaded, plan: SegmentPlan) -> float:
    x, out = _rows(session, loaded, len(plan.rows))
    return session.replayed([partial(segmented_lora, out, x, pool, plan) for pool in loaded.pools]).median


def _loop(out: Tensor, x: Tensor, loaded: _Loaded, rows_of: dict[int, Tensor]) -> None:
    """What serves adapters without kernels: for each, its rows, through each of its pairs."""
    for slot, rows in rows_of.items():
        adapter, at = loaded.adapters[slot], 0
        hidden = x.index_select(0, rows)
        for down, up in zip(adapter.down, adapter.up, strict=True):
            assert down is not None
            assert up is not None
            out[:, at : at + up.shape[1]].index_add_(0, rows, (hidden @ down.t()) @ up)
            at += up.shape[1]


def _rows(session: Session, loaded: _Loaded, count: int) -> tuple[Tensor, Tensor]:
    pool = loaded.pools[0]
    x, out = (torch.randn(count, width, device=session.device) for width in (pool.width_in, sum(pool.widths)))
    return x.to(session.dtype), out.to(session.dtype)


def _plan(session: Session, loaded: _Loaded, slots: Sequence[int], tile: Tile | None = None) -> SegmentPlan:
    tile = tile or tile_for(len(slots), WIDTH, session.device)
    return make_plan(slots, loaded.places, tile=tile, device=session.device)


def _sizes(session: Session, *, checked: bool = False) -> tuple[int, tuple[int, ...]]:
    if session.is_dry:
        return 200, (144, 48)
    return (1000, (1024, 272, 48)) if checked else (WIDTH, WIDTHS)


def _load(session: Session, ranks: tuple[int, ...], width_in: int, widths: tuple[int, ...]) -> _Loaded:
    """Adapters in pages that are no neighbours, and again as pairs; in copies that no cache holds."""
    num_pages = 2 * sum(pages_for(rank) for rank in ranks)
    allocator, places, adapters = PageAllocator(num_pages), list[RankPlace](), list[Adapter]()
    pool = RankPool(num_pages, width_in, widths, dtype=session.dtype, device=session.device)
    gaps: list[tuple[int, ...]] = []
    for rank in ranks:
        pages, gap = allocator.allocate(rank), allocator.allocate(1)
        assert pages is not None
        gaps += [gap] if gap else []
        parts = [
            (
                (torch.randn(rank, width_in) / width_in**0.5).to(session.dtype),
                (torch.randn(rank, width) / rank**0.5).to(session.dtype),
            )
            for width in widths
        ]
        places.append(RankPlace(pages))
        pool.put(places[-1], list(parts))
        downs, ups = ([part.to(session.device) for part in side] for side in zip(*parts, strict=True))
        adapters.append(Adapter(downs, ups))
    loaded = _Loaded([pool], places, adapters, ranks)
    for _ in range(session.copies(loaded.size_bytes) - 1):
        copy = RankPool(num_pages, width_in, widths, dtype=session.dtype, device=session.device)
        copy.a.copy_(pool.a)
        copy.b.copy_(pool.b)
        loaded.pools.append(copy)
    return loaded
