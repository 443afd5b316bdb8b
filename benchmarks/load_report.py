"""The report of `benchmarks.load` as tables on a terminal."""

from __future__ import annotations

import statistics
import sys
from typing import Any

from benchmarks import checkpoints, device, ranks, resident
from benchmarks.measure import Summary
from benchmarks.peers import CONTESTANTS, LIMITS, Contestant, Memory
from benchmarks.table import show
from benchmarks.timed_run import Cache

__all__ = ["show_report"]

_TITLES: dict[Memory, str] = {
    "gone": "bytes let go",
    "fresh": "into memory made under the clock",
    "existing": "into memory that exists",
}


def show_report(report: dict[str, Any]) -> None:
    """Print the tables of `benchmarks.load`."""
    for case in report["cases"]:
        for cache in ("cold", "warm"):
            if case[cache]:
                _print_case(case, cache)
    _print_rest(report)


def _print_case(case: dict[str, Any], cache: Cache) -> None:
    share = case["cached_share"][cache]
    for memory, words in _TITLES.items():
        running = [c for c in CONTESTANTS if c.memory == memory and f"{c.key}_s" in case[cache]]
        title = (
            f"{checkpoints.SHAPES[case['shape']]}, {case['bytes'] / 1e9:g} GB, {cache}, {words} "
            f"(page cache held {share['least']:.0%} to {share['most']:.0%} at the start)"
        )
        head = ("", "seconds [min-max]", "GB/s", "ratio to raw", "over hotswap", "CPU s", "extra MB")
        show(title, head, [_row(contestant, case, cache) for contestant in running])


def _row(contestant: Contestant, case: dict[str, Any], cache: Cache) -> list[str]:
    key = contestant.key
    seconds: list[float] = case[cache][f"{key}_s"]
    limit = case["ratios"][cache][key].get(LIMITS[contestant.memory])
    over = case["over_hotswap"][cache].get(key)
    extra = statistics.median(case["peak_extra_bytes"][cache][key]) / 1e6
    return [
        contestant.what,
        Summary.of(seconds).format(),
        f"{case['bytes'] / statistics.median(seconds) / 1e9:.2f}",
        f"{limit:.3f}" if limit is not None else "",
        f"{over:.2f}" if over is not None else "",
        f"{statistics.median(case['cpu_s'][cache][key]):.2f}",
        f"{extra:,.0f}",
    ]


def _print_rest(report: dict[str, Any]) -> None:
    ablation = report["ablation"] or {"ratios": {}, "not_offered": {}}
    names = {key: seconds for key, seconds in ablation.items() if key.endswith("_s")}
    rows = [
        [key.removesuffix("_s"), Summary.of(seconds).format(), f"{ablation['ratios'][key[:-2]]:.3f}"]
        for key, seconds in names.items()
    ]
    show("ablation, cold", ("", "seconds [min-max]", "ratio to all on"), rows)
    for size, by_key in report["many_over_one"].items():
        many = [[key.removesuffix("_s"), f"{ratio:.2f}"] for key, ratio in by_key.items()]
        show(f"ten thousand tensors over one, {int(size) / 1e9:g} GB, cold", ("", "times"), many)
    ranks.show_report(report["ranks"])
    resident.show_report(report["swap"])
    device.show_report(report["device"])
    for key, why in {**ablation["not_offered"], **report["unavailable"]}.items():
        print(f"not measured: {key}: {why}")
    for case in report["cases"]:
        for key, why in case["failed"].items():
            print(f"not measured: {key}, {checkpoints.SHAPES[case['shape']]}: {why}")
    for fault in report["faults"]:
        print(f"FAULT: {fault}", file=sys.stderr)
