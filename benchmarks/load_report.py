"""The report of `benchmarks.load` as tables on a terminal."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks import checkpoints, ranks, resident
from benchmarks.measure import Summary
from benchmarks.peers import CONTESTANTS, Contestant, Memory
from benchmarks.table import show
from benchmarks.timed_run import Cache

__all__ = ["show_report"]

_TITLES: dict[Memory, str] = {
    "gone": "bytes dropped",
    "fresh": "into new memory",
    "existing": "into existing memory",
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
        running = [c for c in CONTESTANTS if c.memory == memory and c.key in case[cache]]
        title = (
            f"{checkpoints.SHAPES[case['shape']]}, {case['bytes'] / 1e9:g} GB, {cache}, {words} "
            f"(page cache held {share['least']:.0%} to {share['most']:.0%} at the start)"
        )
        head = ("", "seconds [min-max]", "GB/s", "ratio to raw", "over hotswap", "CPU s", "extra MB")
        show(title, head, [_row(contestant, case, cache) for contestant in running])


def _row(contestant: Contestant, case: dict[str, Any], cache: Cache) -> list[str]:
    of = case[cache][contestant.key]
    seconds, limit, over = (
        Summary.of(of["seconds"]),
        of.get("ratio"),
        of.get("over_hotswap"),
    )
    return [
        contestant.what,
        seconds.format(),
        f"{case['bytes'] / seconds.median / 1e9:.2f}",
        f"{limit:.3f}" if limit is not None else "",
        f"{over:.2f}" if over is not None else "",
        f"{of['cpu_s']:.2f}",
        f"{of['peak_extra_bytes'][0] / 1e6:,.0f}",
    ]


def _print_rest(report: dict[str, Any]) -> None:
    ablation = report["ablation"] or {"seconds": {}, "ratios": {}, "not_offered": {}}
    rows = [
        [key, Summary.of(seconds).format(), f"{ablation['ratios'][key]:.3f}"]
        for key, seconds in ablation["seconds"].items()
    ]
    show("ablation, cold", ("", "seconds [min-max]", "ratio to all on"), rows)
    for size, by_key in report["many_over_one"].items():
        many = [[key, f"{ratio:.2f}"] for key, ratio in by_key.items()]
        show(f"ten thousand tensors over one, {int(size) / 1e9:g} GB, cold", ("", "times"), many)
    ranks.show_report(report["ranks"])
    resident.show_report(report["swap"])
    for key, why in {**ablation["not_offered"], **report["unavailable"]}.items():
        print(f"not measured: {key}: {why}")
    for case in report["cases"]:
        for key, why in case["failed"].items():
            print(f"not measured: {key}, {checkpoints.SHAPES[case['shape']]}: {why}")
    for fault in report["faults"]:
        print(f"FAULT: {fault}", file=sys.stderr)
