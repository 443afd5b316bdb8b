"""Products with one-byte weights: right by float64, swept, and beside cuBLAS and the published recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.published import SCALE_COLUMNS, published_linear
from benchmarks.gpu.session import Session, relative_error
from benchmarks.measure import Summary
from benchmarks.table import show
from hotswap.kernels import tables
from hotswap.kernels.fp8_gemm import (
    Fp8Weight,
    Tile,
    Workspace,
    dequantize_rows,
    fp8_linear,
    fp8_linear_reference,
    heuristic,
    pack,
)
from hotswap.kernels.fp8_gemm.sweep import Point, search
from hotswap.kernels.fp8_gemm.tiles import DENSE, TABLE, kind_of
from hotswap.kernels.targets import TARGETS, Device, device_of

__all__ = ["SHAPES", "check", "compare", "compare_paths"]

# Weights [N, K] of the layers of Llamas: 8B, 70B and 405B on eight devices each, 70B on one.
SHAPES = {
    "8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "70B/8": ((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584)),
    "405B/8": ((2304, 16384), (16384, 2048), (13312, 16384), (16384, 6656)),
    "70B": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
}
ROWS = (1, 16, 32, 64, 128, 256, 1024, 4096)
GROUP = 128
# Errors that rounding the result to its dtype explains.
BOUNDS = {torch.bfloat16: 2e-3, torch.float16: 3e-4}
# Of whole weights, which cuBLAS multiplies: PyTorch lets it add up parts of K in 16 bits.
DENSE_BOUNDS = {torch.bfloat16: 3.5e-3, torch.float16: 4.5e-4}
# Share of the time that is left which a sweep may take of it.
_SWEEP_SHARE = 0.6
_PUBLISHED_ROWS = 256


def check(session: Session) -> None:
    """Compare products with float64: ragged sizes, every code, zeros, NaN where nothing was written."""
    sizes = ((9, 256, 256), (17, 72, 300)) if session.is_dry else ((1, 8192, 8192), (7, 1280, 8192))
    more = () if session.is_dry else ((33, 4096, 14336), (130, 1000, 1024), (64, 8192, 1000))
    worst: dict[str, float] = {}
    for dtype in BOUNDS:
        for rows, columns, width in (*sizes, *more):
            weight = replace(_weight(columns, width, session), dtype=dtype)
            x = torch.randn(rows, width, device=session.device).to(dtype)
            right = fp8_linear_reference(x, weight)
            held, workspace = pack(weight), Workspace(session.device)
            for tile in _tiles(rows, (columns, width), session):
                first, again = (
                    fp8_linear(x, held, tile=tile, workspace=workspace, out=_nothing(rows, columns, dtype, x))
                    for _ in range(2)
                )
                error = relative_error(first, right)
                name = str(dtype).removeprefix("torch.")
                method = f"{name} {tile.path}"
                worst[method] = max(worst.get(method, 0.0), error)
                bound = (DENSE_BOUNDS if tile.path == "dense" else BOUNDS)[dtype]
                if not error <= bound or not torch.equal(first, again):
                    session.report.setdefault("faults", []).append(
                        f"fp8 {name} {rows}x{columns}x{width} {tile}: error {error:.2e}, "
                        f"same bits {torch.equal(first, again)}"
                    )
    session.report["fp8_errors"] = worst
    print("fp8 against float64: " + ", ".join(f"{name} {error:.2e}" for name, error in worst.items()))
    _check_published(session)


def _check_published(session: Session) -> None:
    """The recipe that is compared with computes what it should, too, but for zeros and subnormals."""
    case = _Case((128, 256), session)
    x, out = case.input(3), torch.empty(3, 128, dtype=torch.bfloat16, device=session.device)
    published_linear(x.to(torch.bfloat16), case.columns[0], case.column_scales, out)
    quantized = case.columns[0].t().contiguous().view(torch.float8_e4m3fn)
    scales = case.column_scales.t().repeat_interleave(SCALE_COLUMNS, 0)
    error = relative_error(out, x.double() @ (quantized.double() * scales.double()).T)
    session.report["published_error"] = error
    if not error < 0.02:
        session.report.setdefault("faults", []).append(f"the published recipe is off by {error:.2e}")


def compare(session: Session, names: Sequence[str], out: Path) -> None:
    """Sweep every shape, set the best beside the others, and write the table of the device."""
    end_s = session.remaining_s * (1 - _SWEEP_SHARE)

    def point(case: _Case, rows: int, num_left: int) -> tables.Record:
        # Each point may use its share, so that the last are not left to chance.
        return _swept(session, case, rows, session.remaining_s - (session.remaining_s - end_s) / num_left)

    _report(session, names, out, point)


def compare_paths(session: Session, names: Sequence[str], out: Path) -> None:
    """Time the tiles of the shipped table and the dense path again, and write the table of the device."""
    device = _device(session)
    assert device.target is not None, "a phase without kernels does not begin"
    target, dtype = device.target, _name(session.dtype)

    def point(case: _Case, rows: int, num_left: int) -> tables.Record:
        found = tables.load(TABLE).find(device.name, target.name, kind_of(dtype, GROUP), case.shape, rows)
        tile = heuristic(rows, case.shape, target, device.num_units) if found is None else Tile.of(found)
        return _timed(session, case, rows, tile.fitted(GROUP))

    _report(session, names, out, point)


def _report(
    session: Session, names: Sequence[str], out: Path, point: Callable[[_Case, int, int], tables.Record]
) -> None:
    """Measure every point; the function gets its case, its rows and the number of points that are left."""
    shapes = [(128, 256)] if session.is_dry else [shape for name in names for shape in SHAPES[name]]
    rows_of = (1, 17) if session.is_dry else ROWS
    records: list[tables.Record] = []
    for index, shape in enumerate(shapes):
        if session.remaining_s < 60 and not session.is_dry:
            session.report.setdefault("left_out", []).append(f"fp8 from shape {shape} on, for want of time")
            break
        case = _Case(shape, session)
        records += [
            point(case, rows, (len(shapes) - index) * len(rows_of) - place)
            for place, rows in enumerate(rows_of)
        ]
        del case
        session.free()
        _keep(session, records, out)  # in case the rest is cut off
    head = ("N x K, rows", "us", "vs bf16", "of floor", "dense", "vs published", "noise", "path")
    show(f"fp8 beside bf16 on {_device(session).name}", head, [_line(record) for record in records])
    _show_means(records)


def _keep(session: Session, records: Sequence[tables.Record], out: Path) -> None:
    """Write the table of the device, and the same into the report."""
    device = _device(session)
    assert device.target is not None, "a phase without kernels does not begin"
    about = {"num_units": session.num_units, **session.report.get("versions", {})}
    tables.write(out / "fp8_gemm.table.json", device.name, device.target.name, about, records)
    session.report["fp8"] = [
        {"kind": r.kind, "shape": r.shape, "rows": r.rows, "choice": dict(r.choice), **r.figures}
        for r in records
    ]


def _swept(session: Session, case: _Case, rows: int, stop_s: float) -> tables.Record:
    def measure(point: Point, tile: Tile) -> float:
        if session.remaining_s < stop_s:
            return math.inf
        try:
            return case.time(point.rows, partial(case.ours, tile)).median
        except Exception as exc:  # Triton's own errors, where it asks for more than there is
            print(f"  {tile}: {str(exc).splitlines()[0][:80]}")
            return math.inf

    device = _device(session)
    assert device.target is not None, "a phase without kernels does not begin"
    tile = heuristic(rows, case.shape, device.target, device.num_units)
    if not session.is_dry:
        tile, _ = search(Point(rows, case.shape, _name(session.dtype), GROUP), device, measure)
    return _timed(session, case, rows, tile)


def _timed(session: Session, case: _Case, rows: int, tile: Tile) -> tables.Record:
    """Time a tile beside the others; the record has the dense path if that is faster."""
    bf16 = case.time(rows, case.whole)
    ours, dense = (case.time(rows, partial(case.ours, method)) for method in (tile, DENSE))
    again = case.time(rows, case.whole)
    figures = {
        "us": ours.median,
        "least_us": ours.least,
        "most_us": ours.most,
        "bf16_us": min(bf16.median, again.median),
        "bf16_noise": abs(bf16.median - again.median) / min(bf16.median, again.median),
        "dense_us": dense.median,
        "floor_us": _floor_us(rows, case.shape, session),
    }
    if rows <= _PUBLISHED_ROWS and session.dtype is torch.bfloat16:
        figures["published_us"] = case.time(rows, case.published).median
    if dense.median < ours.median:
        tile, figures["us"] = DENSE, dense.median
    return tables.Record(kind_of(_name(session.dtype), GROUP), case.shape, rows, tile.choice, figures)


class _Case:
    """The weights of one shape in the formats of all contestants, in enough copies to miss the cache."""

    def __init__(self, shape: tuple[int, int], session: Session) -> None:
        self.shape, self._session = shape, session
        columns, width = shape
        weight = _weight(columns, width, session, whole=True)
        count = session.copies(columns * width)
        held = pack(weight)
        self.held = [
            Fp8Weight(held.qweight.clone(), held.scales.clone(), width, GROUP, session.dtype)
            for _ in range(count)
        ]
        self.dense = [dequantize_rows(weight, slice(None), session.dtype) for _ in range(count)]
        quantized = weight.qweight.view(torch.uint8).t().contiguous()
        self.columns = [quantized.clone() for _ in range(count)]
        self.column_scales = torch.rand(width, -(-columns // SCALE_COLUMNS), device=session.device) + 0.5
        self.workspace = Workspace(session.device)

    def input(self, rows: int) -> Tensor:
        return torch.randn(rows, self.shape[1], device=self._session.device).to(self._session.dtype)

    def time(self, rows: int, call: Callable[[int, Tensor, Tensor], object]) -> Summary:
        """Microseconds of a product of so many rows, the copies in turns."""
        x = self.input(rows)
        out = torch.empty(rows, self.shape[0], dtype=x.dtype, device=x.device)
        return self._session.replayed([partial(call, index, x, out) for index in range(len(self.held))])

    def ours(self, tile: Tile, index: int, x: Tensor, out: Tensor) -> object:
        return fp8_linear(x, self.held[index], tile=tile, workspace=self.workspace, out=out)

    def whole(self, index: int, x: Tensor, out: Tensor) -> object:
        return torch.mm(x, self.dense[index].t(), out=out)

    def published(self, index: int, x: Tensor, out: Tensor) -> object:
        published_linear(x, self.columns[index], self.column_scales, out)
        return out


def _weight(columns: int, width: int, session: Session, *, whole: bool = False) -> Fp8Weight:
    """Random FP8 values, every finite one among them, or only those that are no zeros and no subnormals.

    Scales have four significant bits, as conversions choose them.
    """
    quantized = torch.arange(256, dtype=torch.uint8, device=session.device)
    finite = quantized[(quantized & 127) != 127]
    finite = finite[(finite & 120) != 0] if whole else finite
    chosen = finite[torch.randint(len(finite), (columns, width), device=session.device)]
    groups = -(-width // GROUP)
    scales = torch.randint(8, 16, (columns, groups), device=session.device) * 2.0**-10
    if not whole:
        chosen[:, :GROUP] = 0
    return Fp8Weight(chosen.view(torch.float8_e4m3fn), scales, width, GROUP, session.dtype)


def _tiles(rows: int, shape: tuple[int, int], session: Session) -> list[Tile]:
    device = _device(session)
    assert device.target is not None, "a phase without kernels does not begin"
    usual = heuristic(min(rows, 256), shape, device.target, device.num_units)
    made = {usual, Tile(), Tile(parts=3), Tile(32, 64, 64, parts=2), DENSE}
    if device.target.wide_mma:
        made |= {Tile(64, 128, 128, 8, 3, weights_left=True), Tile(64, 64, 128, 4, 3, 2, weights_left=True)}
    return sorted(made, key=repr)


def _nothing(rows: int, columns: int, dtype: torch.dtype, like: Tensor) -> Tensor:
    return torch.full((rows, columns), torch.nan, dtype=dtype, device=like.device)


def _device(session: Session) -> Device:
    return Device("dry", TARGETS["sm_90"], 4) if session.is_dry else device_of(session.device)


def _floor_us(rows: int, shape: tuple[int, int], session: Session) -> float:
    """What bytes and products alone would take."""
    columns, width = shape
    moved = columns * width + 4 * columns * -(-width // GROUP) + 2 * rows * (columns + width)
    return max(moved / session.bytes_per_s, 2 * rows * columns * width / session.flops) * 1e6


def _line(record: tables.Record) -> list[str]:
    figures, us = record.figures, record.figures["us"]
    published = figures.get("published_us")
    return [
        f"{record.shape[0]} x {record.shape[1]}, {record.rows}",
        f"{us:.1f}",
        f"{figures['bf16_us'] / us:.2f}",
        f"{figures['floor_us'] / us:.0%}",
        f"{figures['dense_us']:.1f}",
        "" if published is None else f"{published / us:.2f}",
        f"{figures['bf16_noise']:.1%}",
        str(record.choice["path"]),
    ]


def _show_means(records: Sequence[tables.Record]) -> None:
    for rows in sorted({record.rows for record in records}):
        some = [record.figures for record in records if record.rows == rows]
        gain, share = (
            math.exp(sum(math.log(f[name] / f["us"]) for f in some) / len(some))
            for name in ("bf16_us", "floor_us")
        )
        print(f"rows {rows}: {gain:.2f} times bf16 and {share:.0%} of the floor, geometric means")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
