"""Llumnix's figures 10, 11, 13, 14 and 15 in simulation, beside the paper's, judged by tolerances.

    python -m benchmarks llumnix                        figure 11 at one point, one seed
    python -m benchmarks llumnix --full --json FILE     all of them, five seeds; two hours
    python -m benchmarks llumnix --figures 13 --seeds 5 --json FILE
    python -m benchmarks llumnix --show FILE            the tables of a report, without a simulation

Results are kept in a file beside FILE, and the same command goes on after an interruption. FILE has medians
over the seeds, the least and the most, and the values of seed 0, which has the arrivals of the artifact.

Sixteen A10s with LLaMA-7B as vLLM 0.1.7 batched: whole prompts first, 12,800 tokens of them in a step, one KV
block in a hundred kept free, 785 blocks (for figures 13 to 15 12,000 tokens and 792 blocks). Requests,
thresholds and rates are those of the artifact (`llumnix_trace`). A decode's time is the mean of a request's
tokens after the first, as there, and requests come once the instances serve.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.command import parser_of, save
from benchmarks.llumnix_moves import CONTEXTS, move, show_moves
from benchmarks.llumnix_paper import PAPER, TOLERANCES, Key
from benchmarks.llumnix_report import SCALING, from_json, series_of, show_series, to_json
from benchmarks.llumnix_trace import NUM_REQUESTS, START_S, with_priorities, workload
from benchmarks.measure import machine
from benchmarks.partial import PartialResults
from hotswap import FleetView, MigrationLimits
from hotswap.abc import Action, Router, Scheduler, Swap
from hotswap.policies import (
    Chain,
    Freeness,
    FreenessAutoscaler,
    FreenessRouter,
    RestoreMinReplicas,
    RoundRobinRouter,
    VirtualUsageRescheduler,
    infaas_router,
)
from hotswap.profiling import PROFILES
from hotswap.simulation import Cluster, Outcome, Served, Trace, simulate

__all__ = ["Run", "chosen", "cluster_of", "figures", "main", "measure", "play"]

ENGINES = 16
# The artifact looks for pairs after every 64 reports of a step; with steps of some 50 ms that is as often.
MOVES_EVERY_S = 0.2
# It begins with eight instances, and scales for the first time after a hundred seconds.
FIRST_ENGINES, FIRST_SCALING_S = 8, START_S + 100.0
THRESHOLDS = {"M-M": 10.0, "S-L": 10.0}
SYSTEMS: Mapping[str, tuple[str, ...]] = {
    "10": (),
    "11": ("Round-Robin", "INFaaS++", "Llumnix"),
    "13": ("Llumnix-base", "Llumnix"),
    "14": ("INFaaS++", "Llumnix"),
    "15": ("INFaaS++", "Llumnix"),
}
HIGH_SHARE = 0.1
# A stage of a move is one copy, as it was there.
ONE_COPY = MigrationLimits(chunk_bytes=1 << 40)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One simulation of a system.

    `at` is its place on the axis of the figure. `row` is the workload in 11, the arrivals in 14 and 15.
    """

    figure: str
    row: str
    at: float
    system: str
    seed: int

    @property
    def name(self) -> str:
        """Its key among the results."""
        return f"{self.figure}/{self.row}/{self.at:g}/{self.system}/{self.seed}"

    def trace(self) -> Trace:
        """Return its requests."""
        match self.figure, self.row:
            case "11", _:
                return workload(self.row, self.at, self.seed)
            case "13", _:
                return with_priorities(workload("S-S", 26.0, self.seed, cv=self.at), HIGH_SHARE, self.seed)
            case "14", "Poisson":
                return workload("L-L", self.at, self.seed)
            case "14", _:
                return workload("L-L", 2.0, self.seed, cv=self.at)
            case _:
                return workload("L-L", 2.0, self.seed, cv=2.0)

    def policies(self) -> tuple[Router, Scheduler]:
        """Return its router and scheduler."""
        if self.system == "Round-Robin":
            return RoundRobinRouter(), RestoreMinReplicas()
        freeness = Freeness("artifact", target_tokens=1600 if self.figure == "13" else None)
        if self.system == "Llumnix-base":
            freeness = replace(freeness, target_tokens=None)
        scales = self.figure in SCALING
        scaling = _autoscaler(self.at if self.figure == "15" else 10.0)
        if self.system == "INFaaS++":
            return infaas_router(), scaling if scales else RestoreMinReplicas()
        low = THRESHOLDS.get(self.row, 3.0)
        moves = VirtualUsageRescheduler(freeness, low=low, high=low, guard=False, method="kv")
        both = Chain(scaling, moves) if scales else _Later(moves, ENGINES, START_S)
        return FreenessRouter(freeness), both

    @property
    def interval_s(self) -> float:
        """How often its scheduler is asked."""
        return MOVES_EVERY_S if self.system in ("Llumnix", "Llumnix-base") else 1.0


@dataclass(frozen=True, slots=True)
class _Later(Scheduler):
    """Keeps a number of instances until a time, and then follows another scheduler."""

    then: Scheduler
    num_instances: int
    until_s: float

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        if fleet.now_s >= self.until_s:
            return self.then.plan(fleet)
        model = fleet.models[0].id
        empty = [i for i in fleet.instances if i.model is None and not i.swapping]
        num_missing = self.num_instances - len(fleet.replicas(model))
        return [Swap(instance=i.id, model=model, reason="at first") for i in empty[:num_missing]]


def _autoscaler(threshold: float) -> _Later:
    rule = FreenessAutoscaler(
        Freeness("artifact", target_tokens=None), low=threshold, high=threshold + 50, drain_s=7200.0
    )
    return _Later(rule, FIRST_ENGINES, FIRST_SCALING_S)


def cluster_of(figure: str) -> Cluster:
    """Return the testbed of a figure."""
    profile = PROFILES["a10-llama-7b"]
    if figure != "11":
        profile = replace(profile, kv_blocks=792)
    return Cluster(
        num_engines=ENGINES,
        profile=profile,
        min_replicas=ENGINES if figure in ("11", "13") else 1,
        token_budget=12_800 if figure == "11" else 12_000,
        batching="prefill_first",
        watermark=0.01,
        reporting="by_step",
        max_requests=NUM_REQUESTS,  # memory ends a batch long before the 256 that the testbed had
    )


def play(run: Run, num_requests: int | None = None) -> dict[str, dict[str, float]]:
    """Simulate a run, or the first of its requests, and return its figures by row."""
    router, scheduler = run.policies()
    trace = run.trace() if num_requests is None else run.trace().first(num_requests)
    if run.system == "Llumnix-base":  # which sees no priorities
        played = Trace(tuple(replace(request, priority=0) for request in trace.requests), trace.name)
    else:
        played = trace
    outcome = simulate(
        played,
        cluster_of(run.figure),
        router=router,
        scheduler=scheduler,
        interval_s=run.interval_s,
        migration_limits=ONE_COPY,
        driver="events",
    )
    assert all(not request.error for request in outcome.requests), "a request failed"
    if run.figure != "13":
        return {run.row: {**figures(outcome.requests), **_of_all(outcome)}}
    high = {n for n, request in enumerate(trace.requests) if request.priority}
    return {
        "high": figures([r for r in outcome.requests if r.number in high]),
        "normal": figures([r for r in outcome.requests if r.number not in high]),
    }


def figures(requests: Sequence[Served]) -> dict[str, float]:
    """Return the latencies of requests as the paper has them, in seconds."""
    series = {
        "request": [request.seconds for request in requests],
        "prefill": [request.ttft_s for request in requests],
        "decode": [request.tpot_s for request in requests],
    }
    found = {f"{what}_mean_s": fmean(values) for what, values in series.items()}
    found |= {f"{what}_p99_s": float(np.percentile(values, 99)) for what, values in series.items()}
    return {**found, "preemption_loss_s": fmean(request.preempted_s for request in requests)}


def _of_all(outcome: Outcome) -> dict[str, float]:
    moved = [move.outcome for move in outcome.migrations]
    return {
        "num_preempted": float(sum(request.preempted_s > 0 for request in outcome.requests)),
        "num_moves": float(moved.count("done")),
        "num_moves_given_up": float(len(moved) - moved.count("done")),
        "avg_instances": _average_instances(outcome),
    }


def _average_instances(outcome: Outcome) -> float:
    """Instances on average from the first request to the end; one that drains counts."""
    total_s = 0.0
    for swap in outcome.swaps:
        ended_s = max(START_S, swap.started_s + swap.seconds)
        total_s += (outcome.seconds - ended_s) * (1 if swap.model_after is not None else -1)
    return total_s / (outcome.seconds - START_S)


def chosen(wanted: Sequence[str], num_seeds: int) -> Iterator[Run]:
    """Yield the runs of figures, all points of a seed before the next seed."""
    points = list(dict.fromkeys((key.figure, _played(key), key.at) for key in PAPER if key.figure in wanted))
    for seed in range(num_seeds):
        for figure, row, at in points:
            for system in SYSTEMS[figure]:
                yield Run(figure=figure, row=row, at=at, system=system, seed=seed)


def _played(key: Key) -> str:
    """The row of the run that has a row of a figure: classes of priority are of one run."""
    return "S-S" if key.figure == "13" else key.row


def measure(runs: Sequence[Run], with_moves: bool, partial: PartialResults) -> dict[str, Any]:
    """Simulate runs, and moves for figure 10, and return the report."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for run in runs:
        found[run.name] = partial.get(run.name, functools.partial(play, run))
        print(f"{run.name}: {found[run.name]}", file=sys.stderr, flush=True)
    return {
        "machine": machine(Path.cwd()),
        "num_seeds": 1 + max((run.seed for run in runs), default=0),
        "metrics": list(TOLERANCES),
        "points": to_json(series_of(found)),
        **({"moves": {str(context): move(context) for context in CONTEXTS}} if with_moves else {}),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, or read a report, print tables, write the report."""
    parser = parser_of("llumnix", __doc__, full="all figures")
    parser.add_argument("--figures", nargs="+", choices=sorted(SYSTEMS), help="these figures")
    parser.add_argument("--seeds", type=int, default=5, help="how many of each")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print a report, and simulate nothing")
    options = parser.parse_args(arguments)
    if options.show:
        return _show(json.loads(options.show.read_text()))
    runs = [Run(figure="11", row="M-M", at=7.8, system=system, seed=0) for system in SYSTEMS["11"]]
    if options.full or options.figures:
        runs = list(chosen(options.figures or sorted(SYSTEMS), options.seeds))
    partial = PartialResults.of(options.json)
    report = measure(runs, options.full or "10" in (options.figures or ()), partial)
    _show(report)
    save(report, options.json)
    partial.clear()
    return 0


def _show(report: Mapping[str, Any]) -> int:
    if "moves" in report:
        show_moves(report["moves"])
    show_series(from_json(report["points"]), PAPER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
