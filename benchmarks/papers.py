"""Claims of papers and posts, beside the shipped policies in simulation.

    python -m benchmarks papers                    one seed, ten minutes of the trace
    python -m benchmarks papers --full --json papers.json
                                                   five seeds, an hour after the burst

`papers.md` beside this file tells claim by claim what it means.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import exp
from typing import Any

from benchmarks.command import parser_of, save
from benchmarks.measure import Summary
from benchmarks.table import show
from hotswap.abc import Scheduler
from hotswap.offline.workloads import log_normal_lengths
from hotswap.policies import (
    AffinityRouter,
    Chain,
    HorizontalAutoscaler,
    KeepAliveSwap,
    RestoreMinReplicas,
    StaticPinning,
    WeightedLoadSwap,
)
from hotswap.simulation import Cluster, Outcome, Trace, generate, simulate
from hotswap.simulation.outcome import percentile

__all__ = ["Settings", "active_models", "autoscaled", "burst", "main", "measure"]

BURST_S = 120.0
ENGINES = 8
# Two requests at once on an A10 that decodes 40 tokens each: an instance ends about 1.5 in a second.
CLUSTER = Cluster(num_engines=ENGINES, profile="a10-llama-7b", min_replicas=1, max_requests=2)
POLICIES: dict[str, Scheduler] = {
    "weighted loads": WeightedLoadSwap(t1=2, t2=50, b=1.5, sigmas=0),
    "weighted loads, 3 sigmas": WeightedLoadSwap(t1=2, t2=50, b=1.5, sigmas=3),
    "static pinning": StaticPinning({f"e{n}": "ab"[n % 2] for n in range(ENGINES)}),
    "keep-alive": KeepAliveSwap(),
}
# Horizontal autoscaling may start as many instances again, each of which takes two minutes to be there.
COLD_START_S = 120.0
AUTOSCALED = "horizontal autoscaling"
AUTOSCALER = Chain(RestoreMinReplicas(), HorizontalAutoscaler(target=2))
# `min_replicas` needs a cold start too, so the requests of this policy come later.
MIN_REPLICAS_S = COLD_START_S + 30.0
# The policy for which the hour after the burst is simulated completely.
LONG = "weighted loads, 3 sigmas"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How often, and how long: `seconds` after the burst for all policies, `steady_s` for `LONG`."""

    seeds: tuple[int, ...] = (1,)
    seconds: float = 480.0
    steady_s: float = 480.0


FULL = Settings(seeds=(1, 2, 3, 4, 5), seconds=780.0, steady_s=3600.0)


def burst(seed: int, seconds: float, *, rate_per_s: float = 0.8) -> Trace:
    """Two models with the same steady load; after two minutes one of them gets ten times as much."""
    prompts, outputs = log_normal_lengths(128, sigma=0.5), log_normal_lengths(40, sigma=0.3)

    def load(number: int, shares: dict[str, float], rate_per_s: float, seconds: float) -> Trace:
        return generate(
            number,
            models=shares,
            rate_per_s=rate_per_s,
            seconds=seconds,
            prompt_tokens=prompts,
            output_tokens=outputs,
        )

    calm = load(seed, {"a": 1, "b": 1}, 2 * rate_per_s, BURST_S + seconds)
    more = load(seed + 1000, {"a": 1}, 9 * rate_per_s, seconds)
    later = (replace(request, arrive_s=request.arrive_s + BURST_S) for request in more.requests)
    return Trace.of([*calm.requests, *later], "tenfold-burst")


def active_models(seed: int, *, models: int, rate_per_s: float, request_s: float, seconds: float) -> float:
    """How many of the models have a request under way, on average, if each request takes `request_s`."""
    shares = {f"m{number}": 1.0 for number in range(models)}
    trace = generate(seed, models=shares, rate_per_s=models * rate_per_s, seconds=seconds)
    until: dict[str, float] = {}
    active_s = 0.0
    for request in trace.requests:
        start_s = max(request.arrive_s, until.get(request.model, 0.0))
        until[request.model] = request.arrive_s + request_s
        active_s += max(0.0, min(until[request.model], seconds) - start_s)
    return active_s / seconds


def measure(settings: Settings) -> dict[str, Any]:
    """Simulate everything and return the report."""
    snowflake: dict[str, dict[str, list[float]]] = {}
    for seed in settings.seeds:
        for name, scheduler in POLICIES.items():
            seconds = settings.steady_s if name == LONG else settings.seconds
            figures = _after_the_burst(_played(burst(seed, seconds), scheduler), settings.seconds)
            _note(snowflake, seed, name, figures)
        figures = _after_the_burst(
            autoscaled(seed, settings.seconds), settings.seconds, MIN_REPLICAS_S + BURST_S
        )
        _note(snowflake, seed, AUTOSCALED, figures)
    aegaeon = [
        active_models(seed, models=100, rate_per_s=0.037, request_s=16.79, seconds=20_000)
        for seed in settings.seeds
    ]
    return {
        "settings": asdict(settings),
        "snowflake": snowflake,
        "aegaeon_active_models": {
            "simulated": aegaeon,
            "formula": 100 * (1 - exp(-0.037 * 16.79)),
            "paper": 46.55,
        },
    }


def autoscaled(seed: int, seconds: float) -> Outcome:
    """Horizontal autoscaling on the same trace: up to twice as many engines, each after a cold start."""
    trace = burst(seed, seconds)
    later = (replace(request, arrive_s=request.arrive_s + MIN_REPLICAS_S) for request in trace.requests)
    profile = CLUSTER.measured
    slow = replace(profile.device, load_bytes_per_s=profile.weight_bytes / COLD_START_S)
    cluster = replace(
        CLUSTER,
        num_engines=2 * ENGINES,
        min_replicas=ENGINES // 2,
        profile=replace(profile, device=slow),
    )
    return simulate(
        Trace.of(later, trace.name), cluster, router=AffinityRouter(), scheduler=AUTOSCALER, name=AUTOSCALED
    )


def _note(series: dict[str, dict[str, list[float]]], seed: int, name: str, figures: dict[str, float]) -> None:
    for what, value in figures.items():
        series.setdefault(name, {}).setdefault(what, []).append(value)
    print(f"seed {seed}: {name}: {figures}", file=sys.stderr)


def _played(trace: Trace, scheduler: Scheduler) -> Outcome:
    return simulate(trace, CLUSTER, router=AffinityRouter(), scheduler=scheduler)


def _after_the_burst(outcome: Outcome, seconds: float, burst_s: float = BURST_S) -> dict[str, float]:
    """Figures of the bursting model's requests in a span of the same length, and of swaps to the end."""
    swaps = sorted(swap.started_s for swap in outcome.swaps if swap.started_s >= burst_s)
    first = [at_s for at_s in swaps if at_s < burst_s + 30]
    asked = [
        r.ttft_s for r in outcome.requests if r.model == "a" and burst_s <= r.arrived_s < burst_s + seconds
    ]
    return {
        "ttft_p50_s": percentile(asked, 50),
        "ttft_p99_s": percentile(asked, 99),
        "settled_after_s": first[-1] - burst_s if first else 0.0,
        "later_swaps": float(len(swaps) - len(first)),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the report."""
    parser = parser_of("papers", __doc__, full="five seeds, and an hour after the burst")
    options = parser.parse_args(arguments)
    report = measure(FULL if options.full else Settings())
    rows = [
        [name, *(Summary.of(figures[what]).format(2) for what in figures)]
        for name, figures in report["snowflake"].items()
    ]
    head = ["", "TTFT P50, s", "TTFT P99, s", "last swap for the burst, s after", "swaps later"]
    show("a tenfold burst on one of two models, eight engines", head, rows)
    active = report["aegaeon_active_models"]
    print(
        f"active models: {Summary.of(active['simulated']).format(2)}, by the formula {active['formula']:.2f}"
    )
    save(report, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
