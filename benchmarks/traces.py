"""Real traces: how many engines each policy needs for 99 % of requests to get what they should.

    python -m benchmarks traces --traces FOLDER                    two seeds of two loads
    python -m benchmarks traces --traces FOLDER --full --json FILE five seeds of all of them; hours
    python -m benchmarks traces --traces FOLDER --full --only mooncake --json FILE
                                                                   one of them; the report keeps the others

What was found is noted beside FILE, and whoever was interrupted goes on from there with the same command.

`benchmarks/trace_loads.py` says what is taken of which trace, `trace_policies.py` who is compared. A seed
draws the moment at which the window begins, and where they are thinned or spread over models, which requests
stay and for whom they are. For each seed and policy the least number of engines is searched at which 99 % of
the requests that come after the warm-up meet their targets. Horizontal autoscaling counts with the engines
that it has in the mean.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.measure import write_json
from benchmarks.search import Estimate, smallest
from benchmarks.table import show
from benchmarks.trace_loads import LOADS, Load
from benchmarks.trace_policies import AUTOSCALED, TARGETS, Policy, autoscaler, policies
from hotswap import Router, Scheduler
from hotswap.policies import LeastLoadedRouter
from hotswap.simulation import Outcome, Trace, simulate
from hotswap.simulation.outcome import percentile

__all__ = ["SHARE", "main", "measure"]

SHARE = 0.99
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
        """Return the share that got what it should, and what else tells of a run."""
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
    """Return the least engines that are enough, `None` if the most are not, and every trial."""
    trials: dict[int, dict[str, float]] = {}

    def enough(num_engines: int) -> bool:
        scheduler = policy.scheduler(case.trace, num_engines)
        trials[num_engines] = case.figures(case.play(num_engines, policy.router, scheduler))
        return trials[num_engines]["attainment"] >= SHARE

    low = len(case.trace.models) if policy.dedicated else 1
    high = max(2 * low, case.load.most) if policy.dedicated else case.load.most
    found = smallest(enough, low, high, guess=guess)
    return {"engines": found, "trials": trials}


def autoscaled(case: Case, guess: int) -> dict[str, Any]:
    """Return the fewest engines, in the mean, of the autoscalers whose requests get what they should."""
    trials: dict[int, dict[str, float]] = {}
    most = case.load.most + len(case.trace.models)

    def enough(place: int) -> bool:
        target = TARGETS[-place]  # engines become more with it
        outcome = case.play(most, LeastLoadedRouter(), autoscaler(target))
        trials[target] = case.figures(outcome)
        return trials[target]["attainment"] >= SHARE

    place = smallest(enough, 1, len(TARGETS), guess=guess)
    engines = None if place is None else trials[TARGETS[-place]]["mean_engines"]
    return {"engines": engines, "place": place, "trials": trials}


class Notes:
    """What was found so far, in a file, so that a search of hours may be interrupted.

    It does not tell by which code and of which traces: whoever changes these deletes it.

    Args:
        path: The file, JSON; `None` to note nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._found: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self._found = json.loads(path.read_text())
            print(f"{len(self._found)} searches are in {path}; delete it to begin anew.", file=sys.stderr)

    def find(self, load: str, policy: str, seed: int, search: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what was found, or search and note it."""
        name = f"{load}, {policy}, seed {seed}"
        if name not in self._found:
            self._found[name] = search()
            self._save()
        run = self._found[name]
        trials = ", ".join(
            f"{n}: {run['trials'][n]['attainment']:.3f}" for n in sorted(run["trials"], key=int)
        )
        print(f"{name}: {run['engines']} ({trials})", file=sys.stderr, flush=True)
        return run

    def clear(self) -> None:
        """Forget everything: it is in the report."""
        self._found.clear()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _save(self) -> None:
        if self._path is not None:
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(self._found))
            new.replace(self._path)


def measure(
    name: str, load: Load, folder: Path, seeds: Sequence[int], notes: Notes | None = None
) -> dict[str, Any]:
    """Search for every policy and seed of a load, and return its part of the report."""
    notes = notes or Notes()
    cases = {seed: Case(load=load, trace=load.trace(folder, seed)) for seed in seeds}
    found: dict[str, dict[str, Any]] = {}
    for policy_name, policy in policies(name, load).items():
        runs, guess = [], load.guess
        for seed, case in cases.items():
            runs.append(notes.find(name, policy_name, seed, partial(search, case, policy, guess)))
            guess = runs[-1]["engines"] or load.guess
        found[policy_name] = {"baseline": policy.baseline, "runs": runs}
    runs, guess = [], 2
    for seed, case in cases.items():
        runs.append(notes.find(name, AUTOSCALED, seed, partial(autoscaled, case, guess)))
        guess = runs[-1]["place"] or guess
    found[AUTOSCALED] = {"baseline": True, "runs": runs}
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


def compared(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the estimate of every policy, the best shipped one, and by how much each baseline needs more.

    Differences are taken seed by seed; a policy that fails with the most engines has no estimate.
    """
    engines = {name: [run["engines"] for run in policy["runs"]] for name, policy in found.items()}
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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks traces", description=__doc__.partition("\n")[0] if __doc__ else ""
    )
    parser.add_argument("--traces", type=Path, help="the folder of the traces")
    parser.add_argument("--full", action="store_true", help="all loads, five seeds")
    parser.add_argument("--only", nargs="+", choices=sorted(LOADS), help="these loads alone")
    parser.add_argument("--seeds", type=int, help="how many seeds, if not 2 or 5")
    parser.add_argument("--json", type=Path, help="where the whole report goes; what it has of others stays")
    options = parser.parse_args(arguments)
    if options.traces is None or not options.traces.is_dir():
        print("traces: there are none; give the folder that has them with --traces.", file=sys.stderr)
        return 0 if options.traces is None else 2
    seeds = range(1, 1 + (options.seeds or (5 if options.full else 2)))
    report: dict[str, Any] = {"share": SHARE, "loads": {}}
    if options.json and options.json.exists():
        report = json.loads(options.json.read_text())
    notes = Notes(options.json and options.json.with_suffix(".part"))
    for name in options.only or (LOADS if options.full else QUICK):
        report["loads"][name] = measure(name, LOADS[name], options.traces, list(seeds), notes)
        show(
            f"{name}: engines for {SHARE:.0%}, median (mean [95 %])",
            ["", "", "engines", "more than the best"],
            rows(report["loads"][name]),
        )
        if options.json:
            write_json(options.json, report)
            print(f"The whole report is in {options.json}.")
    notes.clear()
    return 0


if __name__ == "__main__":
    sys.exit(main())
