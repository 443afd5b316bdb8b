"""Llumnix's figure 11: what dispatch and moves do to latency, beside the numbers of the paper.

    python -m benchmarks llumnix                      two workloads, 2,000 requests each, one seed
    python -m benchmarks llumnix --full --json FILE   five workloads, 10,000 requests each, five seeds

Sixteen A10s with LLaMA-7B as vLLM 0.1.7 batched: whole prompts first, 12,800 tokens of them in a step, one
KV block in a hundred kept free. Rates and thresholds are those of the artifact. Lengths are drawn by the rule
of the paper's power laws, arrivals are Poisson. A decode's time is that of a token after the first, as there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.measure import Summary, machine, write_json
from benchmarks.table import show
from hotswap import Router, Scheduler
from hotswap.policies import (
    Freeness,
    FreenessRouter,
    InOrder,
    RestoreFloors,
    RoundRobinRouter,
    VirtualUsageRescheduler,
    infaas_router,
)
from hotswap.simulation import Cluster, Outcome, Trace, generate, simulate
from hotswap.simulation.outcome import percentile
from hotswap.simulation.trace import power_law_lengths

__all__ = ["POINTS", "Point", "main", "measure"]

ENGINES = 16
CLUSTER = Cluster(
    num_engines=ENGINES,
    profile="a10-llama-7b",
    min_replicas=ENGINES,
    token_budget=12_800,
    batching="prefill_first",
    watermark=0.01,
)
MEANS = {"S": 128, "M": 256, "L": 512}
# The artifact looks for pairs after every 64 reports of a step; with steps of some 50 ms that is as often.
INTERVAL_S = 0.2
SYSTEMS = ("round robin", "INFaaS++", "Llumnix")


@dataclass(frozen=True, slots=True)
class Point:
    """A workload at a rate, the artifact's threshold for it, and what the paper has.

    `paper` are seconds by figure, for round robin where it is known, INFaaS++ and Llumnix.
    """

    workload: str
    rate_per_s: float
    threshold: float
    paper: Mapping[str, tuple[float | None, float, float]]


# Read from the vector figures of the artifact; the highest rate of each row.
POINTS = (
    Point(
        "S-S",
        36,
        3,
        {
            "prefill_p99_s": (None, 71.7, 74.6),
            "request_mean_s": (None, 13.3, 12.6),
            "decode_p99_s": (None, 0.162, 0.143),
        },
    ),
    Point(
        "M-M",
        7.8,
        10,
        {
            "prefill_p99_s": (None, 240, 18.1),
            "request_mean_s": (None, 21.4, 15.0),
            "decode_p99_s": (None, 0.152, 0.117),
        },
    ),
    Point(
        "L-L",
        3.0,
        3,
        {
            "prefill_p99_s": (None, 41.2, 2.78),
            "request_mean_s": (None, 29.3, 26.6),
            "decode_p99_s": (None, 0.155, 0.121),
        },
    ),
    Point(
        "S-L",
        4.3,
        10,
        {
            "prefill_p99_s": (None, 134, 52.0),
            "request_mean_s": (None, 40.9, 35.7),
            "decode_p99_s": (None, 0.456, 0.297),
        },
    ),
    Point(
        "L-S",
        18,
        3,
        {
            "prefill_p99_s": (None, 206, 74.0),
            "request_mean_s": (None, 23.0, 15.5),
            "decode_p99_s": (None, 0.140, 0.140),
        },
    ),
)


def trace_of(point: Point, num_requests: int, seed: int) -> Trace:
    """Return the requests of a point."""
    prompt, output = point.workload.split("-")
    whole = generate(
        seed,
        models={"m": 1},
        rate_per_s=point.rate_per_s,
        seconds=1.2 * num_requests / point.rate_per_s,
        prompt_tokens=power_law_lengths(MEANS[prompt]),
        output_tokens=power_law_lengths(MEANS[output]),
        name=point.workload,
    )
    return whole.first(num_requests)


def policies(system: str, point: Point) -> tuple[Router, Scheduler]:
    """Return the router and the scheduler of one of `SYSTEMS`."""
    if system == "round robin":
        return RoundRobinRouter(), RestoreFloors()
    if system == "INFaaS++":
        return infaas_router(), RestoreFloors()
    freeness = Freeness("artifact")
    moves = VirtualUsageRescheduler(freeness, low=point.threshold, high=point.threshold)
    return FreenessRouter(freeness), InOrder(RestoreFloors(), moves)


def figures(outcome: Outcome) -> dict[str, float]:
    """Return those of the paper, in seconds, without the cold start that its fleets had behind them."""
    ready_s = max(swap.started_s + swap.seconds for swap in outcome.swaps)
    warm = [request for request in outcome.requests if request.arrived_s >= ready_s]
    assert all(not request.error for request in warm), "a request failed"
    prefill = [request.ttft_s for request in warm]
    whole = [request.seconds for request in warm]
    decode = [request.tpot_s for request in warm if request.output_tokens > 1]
    return {
        "prefill_p99_s": percentile(prefill, 99),
        "prefill_mean_s": fmean(prefill),
        "request_p99_s": percentile(whole, 99),
        "request_mean_s": fmean(whole),
        "decode_p99_s": percentile(decode, 99),
        "decode_mean_s": fmean(decode),
        "num_moves": sum(move.outcome == "done" for move in outcome.migrations),
    }


def measure(
    points: Sequence[Point], seeds: Sequence[int], num_requests: int, directory: Path
) -> dict[str, Any]:
    """Simulate every point and return the report."""
    series: dict[str, dict[str, list[dict[str, float]]]] = {}
    for point in points:
        for system in SYSTEMS:
            for seed in seeds:
                router, scheduler = policies(system, point)
                outcome = simulate(
                    trace_of(point, num_requests, seed),
                    CLUSTER,
                    router=router,
                    scheduler=scheduler,
                    interval_s=INTERVAL_S,
                    driver="events",
                )
                name = f"{point.workload} {point.rate_per_s:g}"
                series.setdefault(name, {}).setdefault(system, []).append(figures(outcome))
                print(f"{name}, {system}, seed {seed}: done", file=sys.stderr)
    return {
        "machine": machine(directory),
        "seeds": list(seeds),
        "num_requests": num_requests,
        "points": series,
        "paper": {f"{point.workload} {point.rate_per_s:g}": dict(point.paper) for point in points},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print a table, write the report."""
    summary = __doc__.partition("\n")[0] if __doc__ else ""
    parser = argparse.ArgumentParser(prog="python -m benchmarks llumnix", description=summary)
    parser.add_argument("--full", action="store_true", help="all workloads, five seeds")
    parser.add_argument("--seeds", type=int, help="how many seeds, if not 1 or 5")
    parser.add_argument("--json", type=Path, help="where the whole report goes")
    options = parser.parse_args(arguments)
    points = POINTS if options.full else [point for point in POINTS if point.workload in ("M-M", "L-L")]
    seeds = range(1, 1 + (options.seeds or (5 if options.full else 1)))
    report = measure(points, list(seeds), 10_000 if options.full else 2000, Path.cwd())
    rows: list[list[str]] = []
    for point in points:
        name = f"{point.workload} {point.rate_per_s:g}"
        for place, system in enumerate(SYSTEMS):
            row = [name, system]
            for figure, known in point.paper.items():
                ours = Summary.of([run[figure] for run in report["points"][name][system]]).format(2)
                row.append(f"{ours} / {known[place] if known[place] is not None else '-'}")
            rows.append(row)
    show("ours / the paper's, seconds", ["", "", "prefill P99", "request mean", "decode P99"], rows)
    if options.json:
        write_json(options.json, report)
        print(f"The whole report is in {options.json}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
