"""Two engines that share the memory of a device while load moves between them, beside a fixed half each.

    python -m benchmarks elastic                      one seed
    python -m benchmarks elastic --full --json FILE   five seeds

Two simulated engines (H100, a model of 8B parameters and 20 GB of KV blocks each), prompts of 4,000 tokens
in the median and answers of 400. Load is on one of them for 30 seconds, then on the other, six times. A
request is on time with its first token within 2 s, and each other within 0.1 s in the mean. Fixed: each
engine has its half. Lent: under one `DeviceBudget`, each keeping a quarter of its half, they lend each
other free KV blocks. Planned: `ElasticMemory` moves more where queues lack blocks. The engines compute as
if each had a device of its own.

The status is 1 if a request was refused after it was admitted, or if at 2.5 requests a second of each model
the planned has fewer than 1.5 times the requests on time of the fixed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.command import parser_of, save
from benchmarks.measure import Summary, columns, machine
from benchmarks.table import show
from hotswap.abc import Scheduler
from hotswap.offline.workloads import log_normal_lengths
from hotswap.policies import ElasticMemory, LeastLoadedRouter, RestoreMinReplicas
from hotswap.profiling import PROFILES
from hotswap.simulation import Cluster, Slo, Trace, simulate
from hotswap.simulation.arrivals import Arrivals, generate_each

__all__ = ["RATES_PER_S", "SYSTEMS", "main", "play", "trace_of"]

H100 = PROFILES["h100-llama-3.1-8b"]
KV_BYTES = 20_000_000_000
PROFILE = replace(H100, kv_blocks=KV_BYTES // (16 * H100.kv_bytes_per_token))
SLO = Slo(ttft_s=2.0, tpot_s=0.1)
# Of each model in the mean; the first is that of the target.
RATES_PER_S = (2.5, 1.5, 2.0, 3.0)
BUSY, PARTS, SECONDS = 1.85, 6, 180.0
TARGET = 1.5
SYSTEMS: dict[str, tuple[int, Scheduler]] = {
    "fixed": (1, RestoreMinReplicas()),
    "lent": (2, RestoreMinReplicas()),
    "planned": (2, ElasticMemory(RestoreMinReplicas())),
}
FIGURES = ("on_time", "ttft_p90_s", "tpot_p90_s", "num_preempted")


def trace_of(seed: int, rate_per_s: float, seconds: float = SECONDS) -> Trace:
    """Return the requests for two models, whose load takes turns."""
    idle = 2 - BUSY
    rounds = PARTS // 2
    return generate_each(
        seed,
        {
            "a": Arrivals(rate_per_s=rate_per_s, parts=(BUSY, idle) * rounds),
            "b": Arrivals(rate_per_s=rate_per_s, parts=(idle, BUSY) * rounds),
        },
        seconds=seconds,
        prompt_tokens=log_normal_lengths(4000, sigma=0.6, most=16_000),
        output_tokens=log_normal_lengths(400, sigma=0.6, most=1500),
    )


def play(trace: Trace, system: str) -> dict[str, float]:
    """Simulate, and return the figures; requests that were refused count as late."""
    sharing, scheduler = SYSTEMS[system]
    cluster = Cluster(num_engines=2, profile=PROFILE, min_replicas=1, engines_per_device=sharing)
    played = simulate(
        trace, cluster, router=LeastLoadedRouter(), scheduler=scheduler, interval_s=0.5, driver="events"
    )
    summary = played.summary(SLO)
    return {
        "on_time": summary["attainment"],
        "ttft_p90_s": summary["ttft_s_p90"],
        "tpot_p90_s": summary["tpot_s_p90"],
        "num_preempted": summary["num_preempted"],
        "num_refused_late": sum(bool(r.error) and r.ended_s > r.arrived_s + 1e-6 for r in played.requests),
        "num_failed": summary["num_failed"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print a table, write the report."""
    options = parser_of("elastic", __doc__, full="five seeds").parse_args(arguments)
    seeds = (1, 2, 3, 4, 5) if options.full else (1,)
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    ratios: dict[str, list[float]] = {}
    rows: list[list[str]] = []
    for rate_per_s in RATES_PER_S:
        traces = [trace_of(seed, rate_per_s) for seed in seeds]
        of = {system: columns([play(trace, system) for trace in traces]) for system in SYSTEMS}
        found[f"{rate_per_s:g}"] = of
        pairs = zip(of["planned"]["on_time"], of["fixed"]["on_time"], strict=True)
        ratios[f"{rate_per_s:g}"] = [planned / max(fixed, 1e-9) for planned, fixed in pairs]
        rows += [
            [f"{rate_per_s:g}", system, *(Summary.of(figures[figure]).format(3) for figure in FIGURES)]
            for system, figures in of.items()
        ]
    show(
        "requests on time",
        ["rate, 1/s", "memory", "on time", "P90 TTFT, s", "P90 TPOT, s", "preempted"],
        rows,
    )
    for rate, ratio in ratios.items():
        print(f"{rate} requests a second of each model: planned over fixed {Summary.of(ratio).format(2)}")
    refused = sum(sum(of["num_refused_late"]) for systems in found.values() for of in systems.values())
    report = {
        "machine": machine(Path.cwd()),
        "seeds": list(seeds),
        "kv_bytes": KV_BYTES,
        "busy": BUSY,
        "seconds": SECONDS,
        "ttft_s": SLO.ttft_s,
        "tpot_s": SLO.tpot_s,
        "by_rate": found,
        "planned_over_fixed": ratios,
    }
    save(report, options.json)
    return int(refused > 0 or Summary.of(ratios[f"{RATES_PER_S[0]:g}"]).median < TARGET)


if __name__ == "__main__":
    sys.exit(main())
