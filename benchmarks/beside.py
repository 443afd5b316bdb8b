"""Inter-token latency of streams on one engine while another engine of the same process is swapped.

    python -m benchmarks.beside                      16 streams, models of 500 MB
    python -m benchmarks.beside --json report.json

One engine streams 16 requests, the other is swapped back and forth between two models that are resident in
host memory, each engine on a thread of its own. Phases with swaps and without take turns; the figure is the
inter-token latency of the streams.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import anyio

from benchmarks.by_hand import ByHand
from benchmarks.command import parser_of, save
from benchmarks.measure import WORK, Summary, brief, machine, ratios, rounds, workspace
from benchmarks.resident import Spec, write_pair
from benchmarks.table import show
from hotswap import Fleet, Model, ModelId, Sampling
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.torch import TorchEngine
from hotswap.hardware import parse_bytes
from hotswap.policies import LeastLoadedRouter

__all__ = ["Settings", "main", "measure"]

LIMIT = 1.25
_SERVED, _PAIR = ModelId("served"), (ModelId("a"), ModelId("b"))
_KV_TOKENS = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        streams: Requests that one engine serves all the time.
        size_bytes: Of each of the models that the other engine is swapped between.
        served_bytes: Of the model that streams.
        pause_s: Between the end of a swap and the beginning of the next.
        phase_s: How long a phase lasts.
        repeats: Phases of each kind.
    """

    streams: int = 16
    size_bytes: int = 500_000_000
    served_bytes: int = 60_000_000
    pause_s: float = 0.5
    phase_s: float = 8.0
    repeats: int = 9


def measure(settings: Settings, directory: Path = WORK) -> dict[str, Any]:
    """Carry the benchmark out and return its report, seconds of each phase."""
    with workspace("beside", directory) as work:
        root = write_pair(Spec(8, settings.size_bytes), work)
        served = write_pair(Spec(8, settings.served_bytes), work / "served")
        (served / _PAIR[0]).rename(root / _SERVED)
        facts = {"machine": machine(work), "settings": asdict(settings), "limit": LIMIT}
        return {**facts, **anyio.run(_measure, root, settings)}


async def _measure(root: Path, settings: Settings) -> dict[str, Any]:
    disk = NvmeStore(root)
    streaming = TorchEngine(
        "streams", threads=1, kv_tokens=_KV_TOKENS, max_requests=settings.streams, prefix_reuse=False
    )
    size_bytes = (await disk.manifest(_PAIR[0])).buffer_bytes
    swapped = TorchEngine("swaps", threads=1, kv_tokens=64, memory_bytes=size_bytes * 5 // 4 + (1 << 20))
    store = TieredStore(PinnedStore(3 * size_bytes + settings.served_bytes * 2), disk)
    fleet = Fleet(
        engines=[streaming, swapped],
        store=store,
        models=[Model(model) for model in (_SERVED, *_PAIR)],
        router=LeastLoadedRouter(),
        scheduler=ByHand(),
    )
    async with fleet:
        for model in (_SERVED, *_PAIR):
            await store.prefetch(model)
        await fleet.swap("streams", to=_SERVED)
        for model in _PAIR:
            await fleet.swap("swaps", to=model)
        gaps = _Gaps()
        async with anyio.create_task_group() as tasks:
            for index in range(settings.streams):
                tasks.start_soon(_stream, fleet, index, gaps)
            await gaps.settled(settings.streams)
            series: dict[str, list[float]] = {"quiet": [], "swapping": []}
            swap_s: list[float] = []
            turns = itertools.cycle(_PAIR)  # the second is there
            for kind in rounds(tuple(series), settings.repeats):
                gaps.begin()
                with anyio.move_on_after(settings.phase_s):
                    if kind == "swapping":
                        await _swap_on(fleet, turns, settings.pause_s, swap_s)
                    await anyio.sleep_forever()
                await gaps.some()
                series[kind].append(gaps.p99())
            tasks.cancel_scope.cancel()
    return {
        **{f"{kind}_p99_s": figures for kind, figures in series.items()},
        "rise": [1 / ratio for ratio in ratios(series["quiet"], series["swapping"])],
        "swap_s": swap_s,
    }


class _Gaps:
    """Times between the tokens of all streams."""

    def __init__(self) -> None:
        self._gaps: list[float] = []
        self._seen: set[int] = set()
        self._all = anyio.Event()
        self._wanted = 0

    def add(self, stream: int, seconds: float) -> None:
        self._gaps.append(seconds)
        self._seen.add(stream)
        if len(self._seen) == self._wanted:
            self._all.set()

    async def settled(self, streams: int) -> None:
        """Wait until all streams decode."""
        self._wanted = streams
        await self._all.wait()

    def begin(self) -> None:
        self._gaps.clear()

    async def some(self) -> None:
        """Wait until a percentile can be told, also where a phase is short and the machine busy."""
        while len(self._gaps) < 2:  # noqa: ASYNC110 - a list has no event
            await anyio.sleep(0.001)

    def p99(self) -> float:
        return statistics.quantiles(self._gaps, n=100, method="inclusive")[-1]


async def _stream(fleet: Fleet, index: int, gaps: _Gaps) -> None:
    """Send one request after the other, so that one always runs."""
    sampling = Sampling(max_tokens=200, ignore_eos=True)
    while True:
        last_s = 0.0
        async with fleet.stream(_SERVED, [3 + index, 5, 8], sampling) as tokens:
            async for _ in tokens:
                now_s = time.perf_counter()
                if last_s:
                    gaps.add(index, now_s - last_s)
                last_s = now_s


async def _swap_on(fleet: Fleet, turns: Iterator[ModelId], pause_s: float, seconds: list[float]) -> None:
    for model in turns:
        with anyio.CancelScope(shield=True):  # a phase ends between two swaps
            seconds.append((await fleet.swap("swaps", to=model)).seconds)
        await anyio.sleep(pause_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the report; 1 if the latency rises by more than the limit."""
    parser = parser_of("beside", __doc__)
    default = Settings()
    parser.add_argument("--streams", type=int, default=default.streams)
    parser.add_argument("--size", type=parse_bytes, default=default.size_bytes, help="of a swapped model")
    parser.add_argument("--repeats", type=int, default=default.repeats, help="phases of each kind")
    options = parser.parse_args(arguments)
    report = measure(Settings(streams=options.streams, size_bytes=options.size, repeats=options.repeats))
    rows = [
        [kind, Summary.of([1e3 * seconds for seconds in report[f"{kind}_p99_s"]]).format(1)]
        for kind in ("quiet", "swapping")
    ]
    swaps, rise = Summary.of(report["swap_s"]), Summary.of(report["rise"])
    rows.append(["rise, in turns", rise.format(3)])
    rows.append([f"a swap, ms ({len(report['swap_s'])} of them)", f"{1e3 * swaps.median:.1f}"])
    show(f"inter-token latency P99, ms, {options.streams} streams", ["", "median [min-max]"], rows)
    save(brief(report), options.json)
    return 0 if rise.median <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
