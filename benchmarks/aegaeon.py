"""Aegaeon's question: how many models one engine holds at their targets, by turns and by whole requests.

    python -m benchmarks aegaeon                      two, four and seven models an engine, one seed
    python -m benchmarks aegaeon --full --json FILE   more of them, longer answers as well, five seeds

Two engines (H100, models of 8B parameters) and as many models an engine as are tried, each asked for by a
Poisson process with lengths like ShareGPT's. The paper says why whole requests hold few: a model is active
for as long as a request of it runs, 16.79 s, and with 0.037 requests a second for each that is 46 % of the
time. Here an answer as long as ShareGPT's takes 1.6 s, so that one setting has answers 10.34 times as long,
which take the paper's time, at the paper's rate; the others have 0.1 requests a second.

A token is on time if it comes no later than 10 s after its request for the first one, and 0.1 s more for each
after it. A number of models is held if 90 % of tokens are on time, or, more strictly, if 90 % of first tokens
are as well.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import anyio

from benchmarks.command import parser_of, save
from benchmarks.measure import Summary, columns, machine
from benchmarks.serverlessllm import compute_s
from benchmarks.table import show
from hotswap import Fleet, Model, Sampling
from hotswap.abc import Scheduler
from hotswap.backends.sim import SimEngine, SimKVStore
from hotswap.offline.virtual_time import run
from hotswap.offline.workloads import log_normal_lengths
from hotswap.policies import ElasticQuota, KeepAliveSwap, LeastLoadedRouter, Quotas, quotas
from hotswap.simulation import Cluster, Slo, Trace, TraceRequest, generate

__all__ = [
    "CLUSTER",
    "FULL",
    "SLO",
    "SYSTEMS",
    "Setting",
    "Tally",
    "alone_s",
    "held",
    "main",
    "measure",
    "play",
    "promised",
    "trace_of",
]

ENGINES = 2
RATE_PER_S = 0.1
SLO = Slo(ttft_s=10.0, tpot_s=0.1)
GOAL = 0.9
WARM_UP_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How long answers are, how often each model is asked for, and the numbers of models an engine.

    Answers are `longer` times as long as ShareGPT's.
    """

    longer: float = 1.0
    rate_per_s: float = RATE_PER_S
    counts: tuple[int, ...] = (2, 4, 7)


FULL = (
    Setting(counts=(2, 4, 7, 8, 9)),
    Setting(longer=2, counts=(2, 3, 5, 7, 8)),
    # The paper's: a request takes 16.79 s alone.
    Setting(longer=10.34, rate_per_s=0.037, counts=(2, 3, 5, 7)),
)
# From host memory at 50 GB/s, then across the device's link at as much: 0.66 s a switch, unload included.
CLUSTER = Cluster(num_engines=ENGINES, profile="h100-llama-3.1-8b")
STEP_S, SWITCH_S, PREFILL_TOKEN_S = 0.0075, 0.34, 2.1e-5
KV_STORE = "400 GiB"
# Qmax of the paper is 4 s. Here engines prefill in the same turns, so a round has to fit into the TTFT.
QMAX_S = 1.0

TURNS = ElasticQuota(
    tbt_s=SLO.tpot_s,
    step_s=STEP_S,
    max_quota_s=QMAX_S,
    switch_s=SWITCH_S,
    prefill_token_s=PREFILL_TOKEN_S,
)
WHOLE = KeepAliveSwap(keep_alive_s=float("inf"))
SYSTEMS: Mapping[str, Scheduler] = {"turns": TURNS, "whole requests": WHOLE}


@dataclass(slots=True)
class Tally:
    """Counts of tokens, and of tokens on time, of the requests after the warm-up."""

    warm_up_s: float = WARM_UP_S
    num_tokens: int = 0
    num_on_time: int = 0
    num_requests: int = 0
    num_first_on_time: int = 0
    num_swaps: int = 0

    def figures(self) -> dict[str, float]:
        """Return the shares on time, and the number of swaps."""
        return {
            "tokens_on_time": self.num_on_time / max(1, self.num_tokens),
            "first_tokens_on_time": self.num_first_on_time / max(1, self.num_requests),
            "num_swaps": self.num_swaps,
        }


def trace_of(
    models_per_engine: int,
    seed: int,
    seconds: float,
    *,
    longer: float = 1.0,
    rate_per_s: float = RATE_PER_S,
) -> Trace:
    """Return the requests for so many models an engine, each asked for at a rate.

    Lengths have the quantiles of the artifact's; answers are `longer` times as long.
    """
    models = {f"m{number:02}": 1.0 for number in range(models_per_engine * ENGINES)}
    return generate(
        seed,
        models=models,
        rate_per_s=rate_per_s * len(models),
        seconds=seconds,
        prompt_tokens=log_normal_lengths(130, sigma=1.16, most=1024),
        output_tokens=log_normal_lengths(141 * longer, sigma=1.01, most=round(1024 * longer)),
    )


def alone_s(trace: Trace) -> float:
    """Seconds that a request takes alone on an engine that has its model, in the mean."""
    profile = CLUSTER.measured
    return fmean(compute_s(profile, r.prompt_tokens, r.output_tokens) for r in trace.requests)


def promised(models_per_engine: int) -> Quotas:
    """The quotas and the attainment of the formula if all models always have requests."""
    n = [SLO.tpot_s / STEP_S] * models_per_engine
    weight_bytes = CLUSTER.measured.weight_bytes
    switch_s = SWITCH_S + weight_bytes / CLUSTER.host_bytes_per_s
    return quotas(n, models_per_engine * switch_s, max_quota_s=QMAX_S)


def play(
    trace: Trace, scheduler: Scheduler, *, warm_up_s: float = WARM_UP_S, kv_bytes_per_s: float = 0.0
) -> Tally:
    """Serve a trace in virtual time and count tokens.

    Args:
        trace: The requests.
        scheduler: Plans the swaps.
        warm_up_s: Requests that arrive earlier are served and not counted.
        kv_bytes_per_s: KV blocks are kept in host memory across turns, and copied so fast each way; with 0
            they are computed again.
    """
    tally = Tally(warm_up_s=warm_up_s)
    run(_serve, trace, scheduler, tally, kv_bytes_per_s)
    return tally


async def _serve(trace: Trace, scheduler: Scheduler, tally: Tally, kv_bytes_per_s: float) -> None:
    models, cluster, kv_store = sorted(trace.models), CLUSTER, None
    if kv_bytes_per_s:
        profile = CLUSTER.measured
        device = replace(profile.device, kv_bytes_per_s=kv_bytes_per_s)
        cluster = replace(CLUSTER, profile=replace(profile, device=device))
        kv_store = SimKVStore(KV_STORE, bytes_per_s=kv_bytes_per_s)
    async with (
        Fleet(
            engines=cluster.engines(SimEngine),
            store=cluster.store(models),
            kv_store=kv_store,
            models=[Model(model) for model in models],
            router=LeastLoadedRouter(),
            scheduler=scheduler,
            interval_s=0.1,
            max_waiting=len(trace.requests),
        ) as fleet,
    ):
        async with anyio.create_task_group() as clients:
            for number, request in enumerate(trace.requests):
                await anyio.sleep_until(request.arrive_s)
                clients.start_soon(_ask, fleet, number, request, tally)
        tally.num_swaps = len(fleet.swaps)


async def _ask(fleet: Fleet, number: int, request: TraceRequest, tally: Tally) -> None:
    sampling = Sampling(max_tokens=request.output_tokens, ignore_eos=True)
    counts = request.arrive_s >= tally.warm_up_s
    due_s = request.arrive_s + SLO.ttft_s
    async with fleet.stream(request.model, request.prompt(number), sampling) as stream:
        async for token in stream:
            if counts:
                on_time = anyio.current_time() <= due_s
                tally.num_tokens += 1
                tally.num_on_time += on_time
                tally.num_requests += token.index == 0
                tally.num_first_on_time += on_time and token.index == 0
                due_s += SLO.tpot_s


def measure(setting: Setting, seeds: Sequence[int], seconds: float) -> dict[str, Any]:
    """Simulate every number of models and return the figures."""
    points: dict[str, dict[str, Any]] = {}
    for count in setting.counts:
        systems: dict[str, list[dict[str, float]]] = {name: [] for name in SYSTEMS}
        for seed in seeds:
            trace = trace_of(
                count, seed, WARM_UP_S + seconds, longer=setting.longer, rate_per_s=setting.rate_per_s
            )
            for name, scheduler in SYSTEMS.items():
                tally = play(trace, scheduler)
                systems[name].append(tally.figures())
                print(f"{count} models an engine, {name}, seed {seed}: {tally}", file=sys.stderr)
        turns = promised(count)
        points[str(count)] = {
            "alpha": turns.alpha,
            "promised": turns.attainment,
            "systems": {name: columns(found) for name, found in systems.items()},
        }
    most = {name: {figure: held(points, name, figure) for figure in HELD} for name in SYSTEMS}
    return {
        "answers": setting.longer,
        "rate_per_s": setting.rate_per_s,
        "alone_s": alone_s(trace_of(100, 0, 1000.0, longer=setting.longer)),
        "points": points,
        "held": most,
    }


HELD = ("tokens_on_time", "first_tokens_on_time")


def held(points: Mapping[str, Mapping[str, Any]], system: str, figure: str) -> int:
    """The largest number of models an engine up to which the median of a share reaches `GOAL`."""
    most = 0
    for count, point in sorted(points.items(), key=lambda item: int(item[0])):
        if Summary.of(point["systems"][system][figure]).median < GOAL:
            break
        most = int(count)
    return most


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print a table, write the report."""
    parser = parser_of("aegaeon", __doc__, full="more models, longer answers, five seeds")
    options = parser.parse_args(arguments)
    seeds = (1, 2, 3, 4, 5) if options.full else (1,)
    if options.full:
        runs = [measure(setting, seeds, 180.0) for setting in FULL]
    else:
        runs = [measure(Setting(), seeds, 120.0)]
    for found in runs:
        rows: list[list[str]] = []
        for count, point in found["points"].items():
            row = [count, f"{point['alpha']:.2f}", f"{point['promised']:.3f}"]
            for name, figure in product(SYSTEMS, HELD):
                row.append(Summary.of(point["systems"][name][figure]).format(3))
            rows.append(row)
        head = ["models an engine", "alpha", "min(1, 1/alpha)"]
        columns = [f"{name}, {what}" for name, what in product(SYSTEMS, ("tokens", "first tokens"))]
        answers = f"answers times {found['answers']:g}, {found['alone_s']:.2f} s alone"
        show(f"shares on time, {answers}, {found['rate_per_s']:g}/s for each model", [*head, *columns], rows)
        print(f"held: {found['held']}")
    report = {
        "machine": machine(Path.cwd()),
        "seeds": list(seeds),
        "engines": ENGINES,
        "qmax_s": QMAX_S,
        "lengths": runs,
    }
    save(report, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
