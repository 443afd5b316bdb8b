"""How fast simulations are: requests for each second of a processor, from 16 engines to 10,000.

    python -m benchmarks simulate                     16 engines and 10,000 requests, by both drivers
    python -m benchmarks simulate --full --json FILE  10,000 engines and a million requests too; 13 minutes

Every engine gets two requests a second of 128 tokens and 64 more in the median, for a model of its own and
three others. Routes are by least load, of the most engines also by affinity; swaps by weighted loads, with at
least three replicas.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import parser_of, save
from benchmarks.measure import Summary, columns, machine
from benchmarks.table import show
from hotswap.abc import Router
from hotswap.policies import AffinityRouter, LeastLoadedRouter, WeightedLoadSwap
from hotswap.simulation import Cluster, Trace, generate, simulate
from hotswap.simulation.run import Driver

__all__ = ["main", "measure"]

ENGINES_A_MODEL, RATE_EACH = 4, 2.0
# Engines, requests, how often.
SMALL, LARGE, HUGE = (16, 10_000, 3), (1000, 100_000, 3), (10_000, 1_000_000, 1)


def trace_of(num_engines: int, num_requests: int, seed: int) -> Trace:
    """Return requests for as many models as a quarter of the engines, some asked for ten times as often."""
    rate_per_s = num_engines * RATE_EACH
    shares = {f"m{number}": 1 / (1 + number % 10) for number in range(num_engines // ENGINES_A_MODEL)}
    whole = generate(seed, models=shares, rate_per_s=rate_per_s, seconds=1.02 * num_requests / rate_per_s + 5)
    return whole.first(num_requests)


def run(trace: Trace, num_engines: int, driver: Driver, router: Router | None = None) -> dict[str, float]:
    """Simulate once, by least load or another router; return processor seconds and counts."""
    began_s = time.process_time()
    outcome = simulate(
        trace,
        Cluster(num_engines=num_engines, min_replicas=3),
        router=router or LeastLoadedRouter(),
        scheduler=WeightedLoadSwap(t1=8, t2=50, b=2, sigmas=3),
        driver=driver,
    )
    seconds = time.process_time() - began_s
    tokens = sum(request.output_tokens for request in outcome.requests)
    assert all(not request.error for request in outcome.requests), "a request failed"
    return {
        "seconds": seconds,
        "requests_per_s": len(outcome.requests) / seconds,
        "simulated_seconds": outcome.seconds,
        "num_tokens": tokens,
        "num_swaps": len(outcome.swaps),
    }


def measure(full: bool, directory: Path) -> dict[str, Any]:
    """Simulate every size and return the report."""
    runs: dict[str, list[dict[str, float]]] = {}
    cases: list[tuple[str, tuple[int, int, int], Driver]] = [("16 by clients", SMALL, "clients")]
    cases += [(str(case[0]), case, "events") for case in ((SMALL, LARGE, HUGE) if full else (SMALL,))]
    for name, (num_engines, num_requests, repeats), driver in cases:
        for seed in range(repeats):
            figures = run(trace_of(num_engines, num_requests, seed), num_engines, driver)
            runs.setdefault(name, []).append(figures)
            print(f"{name}: {figures['seconds']:.1f} s", file=sys.stderr)
    if full:
        num_engines, num_requests, _ = HUGE
        figures = run(trace_of(num_engines, num_requests, 0), num_engines, "events", AffinityRouter())
        runs[f"{num_engines} by affinity"] = [figures]
    found = {name: columns(series) for name, series in runs.items()}
    return {
        "machine": machine(directory),
        "runs": found,
        "requests_per_s": {name: Summary.of(of["requests_per_s"]).median for name, of in found.items()},
        "most_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the report."""
    parser = parser_of("simulate", __doc__, full="also 1,000 and 10,000 engines")
    options = parser.parse_args(arguments)
    report = measure(options.full, Path.cwd())
    rows = [
        [
            name,
            *(
                Summary.of(series[column]).format(1)
                for column in ("seconds", "requests_per_s", "simulated_seconds", "num_swaps")
            ),
        ]
        for name, series in report["runs"].items()
    ]
    head = ["engines", "processor s", "requests/s", "simulated s", "swaps"]
    show("simulations", head, rows)
    save(report, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
