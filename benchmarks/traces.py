"""Real traces: how many engines each policy needs for 99 % of requests to meet their targets.

    python -m benchmarks traces --traces FOLDER                    two seeds of two loads
    python -m benchmarks traces --traces FOLDER --full --json FILE five seeds of all of them; hours
    python -m benchmarks traces --traces FOLDER --full --only mooncake --json FILE
                                                                   one of them; the report keeps the others

Results are kept in a file beside FILE, and the same command goes on after an interruption.

`benchmarks/trace_loads.py` says what is taken of which trace, `trace_policies.py` which policies compete.
A seed draws the start of the window, and which requests stay where they are thinned, and for which model they
are where they are spread over models. For each seed and policy the search finds the smallest number of
engines at which 99 % of the requests after the warm-up meet their targets. Horizontal autoscaling counts with
its mean number of engines.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.command import parser_of, save
from benchmarks.partial import PartialResults
from benchmarks.search import Estimate, smallest
from benchmarks.table import show
from benchmarks.trace_loads import LOADS, Load
from benchmarks.trace_policies import AUTOSCALED, TARGETS, Policy, autoscaler, policies
from hotswap.abc import Router, Scheduler
from hotswap.policies import LeastLoadedRouter
from hotswap.simulation import Outcome, Trace, simulate
from hotswap.simulation.outcome import percentile

__all__ = ["SHARE", "main", "measure"]

SHARE = 0.99
# Figures of every trial that the report has.
KEPT = ("attainment", "num_evicted", "num_reused_tokens")
QUICK = ("azure-models", "azure")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A load as one seed has it."""

    load: Load
    trace: Trace

    def play(self, num_engines: int, router: Router, scheduler: Scheduler) -> Outcome:
        """Simulate it on so many engines."""
        return simulate(
            self.trace,
            replace(self.load.cluster, num_engines=num_engines),
            router=router,
            scheduler=scheduler,
            interval_s=self.load.interval_s,
            driver="events",
        )

    def figures(self, outcome: Outcome) -> dict[str, float]:
        """Return the share of requests that met their target, and other figures of a run."""
        counted = [request for request in outcome.requests if request.arrived_s >= self.load.warm_s]
        met = [self.load.target.met(request, self.load.cluster) for request in counted]
        holding = [
            sample.model != ""
            for sample in outcome.samples
            if self.load.warm_s <= sample.at_s <= self.trace.seconds
        ]
        return {
            "attainment": fmean(met),
            "ttft_p99_s": percentile([request.ttft_s for request in counted], 99),
            "tpot_p99_s": percentile([request.tpot_s for request in counted], 99),
            "num_swaps": len(outcome.swaps),
            "num_evicted": sum(swap.num_evicted for swap in outcome.swaps),
            "num_moved": sum(move.outcome == "done" for move in outcome.migrations),
            "num_reused_tokens": outcome.num_reused_tokens,
            "mean_engines": float(outcome.settings["num_engines"]) * fmean(holding),  # type: ignore[arg-type]
        }


def search(case: Case, policy: Policy, guess: int) -> dict[str, Any]:
    """Return the smallest number of engines that is enough, `None` if the most is not, and every trial."""
    trials: dict[str, dict[str, float]] = {}

    def enough(num_engines: int) -> bool:
        scheduler = policy.scheduler(case.trace, num_engines)
        figures = case.figures(case.play(num_engines, policy.router, scheduler))
        trials[str(num_engines)] = figures
        return figures["attainment"] >= SHARE

    low = len(case.trace.models) if policy.dedicated else 1
    high = max(2 * low, case.load.most) if policy.dedicated else case.load.most
    found = smallest(enough, low, high, guess=guess)
    return {"engines": found, "trials": {n: trials[n] for n in sorted(trials, key=int)}}


def autoscaled(case: Case, guess: int) -> dict[str, Any]:
    """Return the smallest mean number of engines of the autoscalers that meet the targets."""
    trials: dict[str, dict[str, float]] = {}
    most = case.load.most + len(case.trace.models)

    def enough(number: int) -> bool:
        target = TARGETS[-number]  # engines become more with it
        figures = case.figures(case.play(most, LeastLoadedRouter(), autoscaler(target)))
        trials[str(target)] = figures
        return figures["attainment"] >= SHARE

    number = smallest(enough, 1, len(TARGETS), guess=guess)
    engines = None if number is None else trials[str(TARGETS[-number])]["mean_engines"]
    return {"engines": engines, "number": number, "trials": trials}


def measure(
    name: str, load: Load, folder: Path, seeds: Sequence[int], partial: PartialResults | None = None
) -> dict[str, Any]:
    """Search for every policy and seed of a load, and return its part of the report."""
    results = partial or PartialResults()

    def find(policy: str, seed: int, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        key = f"{name}, {policy}, seed {seed}"
        found: dict[str, Any] = results.get(key, run)
        trials = ", ".join(f"{n}: {trial['attainment']:.3f}" for n, trial in found["trials"].items())
        print(f"{key}: {found['engines']} ({trials})", file=sys.stderr, flush=True)
        return found

    cases = {seed: Case(load=load, trace=load.trace(folder, seed)) for seed in seeds}
    found: dict[str, dict[str, Any]] = {}
    for policy_name, policy in policies(name, load).items():
        runs, guess = [], load.guess
        for seed, case in cases.items():
            runs.append(find(policy_name, seed, functools.partial(search, case, policy, guess)))
            guess = runs[-1]["engines"] or load.guess
        found[policy_name] = {"baseline": policy.baseline, **by_seed(runs)}
    runs, guess = [], 2
    for seed, case in cases.items():
        runs.append(find(AUTOSCALED, seed, functools.partial(autoscaled, case, guess)))
        guess = runs[-1]["number"] or guess
    found[AUTOSCALED] = {"baseline": True, **by_seed(runs)}
    return {
        "what": load.what,
        "device": load.cluster.profile,
        "file": load.file,
        "target": asdict(load.target),
        "warm_s": load.warm_s,
        "most": load.most,
        "most_tokens": load.most_tokens,
        "interval_s": load.interval_s,
        "seeds": {
            seed: {
                "num_requests": len(case.trace.requests),
                "num_models": len(case.trace.models),
                "num_adapters": len({r.adapter for r in case.trace.requests if r.adapter}),
                "seconds": case.trace.seconds,
            }
            for seed, case in cases.items()
        },
        "policies": found,
        **compared(found),
    }


def by_seed(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return what the report keeps of runs, a value for each seed: what was enough, and figures by trial.

    A trial has a number of engines, or for autoscaling a target. Figures that are zero in all are left out.
    """
    report: dict[str, list[Any]] = {"engines": [run["engines"] for run in runs]}
    for figure in KEPT:
        values = [{n: trial[figure] for n, trial in run["trials"].items()} for run in runs]
        if any(any(trials.values()) for trials in values):
            report[figure] = values
    return report


def compared(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the estimate of every policy, the best shipped one, and by how much each baseline needs more.

    Differences are taken seed by seed; a policy that fails with the most engines has no estimate.
    """
    engines = {name: policy["engines"] for name, policy in found.items()}
    whole = {name: series for name, series in engines.items() if None not in series}
    estimates = {name: Estimate.of(series) for name, series in whole.items()}
    shipped = [name for name in whole if not found[name]["baseline"]]
    if not shipped:
        return {"estimates": {name: asdict(e) for name, e in estimates.items()}, "best": None, "more": {}}
    best = min(shipped, key=lambda name: (estimates[name].mean, name))
    more = {
        name: asdict(Estimate.of([a - b for a, b in zip(series, whole[best], strict=True)]))
        for name, series in whole.items()
        if found[name]["baseline"]
    }
    return {"estimates": {name: asdict(e) for name, e in estimates.items()}, "best": best, "more": more}


def rows(report: Mapping[str, Any]) -> list[list[str]]:
    """Return a row for every policy of a load: what it needs, and how many more than the best one."""
    table: list[list[str]] = []
    for name, policy in report["policies"].items():
        kind = "baseline" if policy["baseline"] else "best" if name == report["best"] else ""
        estimate, more = report["estimates"].get(name), report["more"].get(name)
        needs = f"over {report['most']}" if estimate is None else Estimate(**estimate).format()
        table.append([name, kind, needs, "" if more is None else Estimate(**more).format()])
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print tables, write the report."""
    parser = parser_of("traces", __doc__, full="all loads, five seeds")
    parser.add_argument("--traces", type=Path, help="the folder of the traces")
    parser.add_argument("--only", nargs="+", choices=sorted(LOADS), help="these loads alone")
    parser.add_argument("--seeds", type=int, help="how many seeds, if not 2 or 5")
    options = parser.parse_args(arguments)
    if options.traces is None or not options.traces.is_dir():
        print("traces: there are none; give the folder that has them with --traces.", file=sys.stderr)
        return 0 if options.traces is None else 2
    seeds = range(1, 1 + (options.seeds or (5 if options.full else 2)))
    report: dict[str, Any] = {"share": SHARE, "loads": {}}
    if options.json and options.json.exists():
        report = json.loads(options.json.read_text())
    partial = PartialResults.of(options.json)
    for name in options.only or (LOADS if options.full else QUICK):
        report["loads"][name] = measure(name, LOADS[name], options.traces, list(seeds), partial)
        show(
            f"{name}: engines for {SHARE:.0%}, median (mean [95 %])",
            ["", "", "engines", "more than the best"],
            rows(report["loads"][name]),
        )
        save(report, options.json)
    partial.clear()
    return 0


if __name__ == "__main__":
    sys.exit(main())
