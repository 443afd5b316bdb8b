"""A forecast beside the default scheduler, on loads of some days: requests in time, first tokens, swaps.

    python -m benchmarks forecast --traces FOLDER                    one seed
    python -m benchmarks forecast --traces FOLDER --full --json FILE three seeds

The folder has the rates of ServeGen's clients (arXiv:2505.09999), columns `model`, `client`, `rate_rps` and

    servegen_client_rates_2days.csv.gz   `window_start_s` and `cv`: two days by windows of ten minutes
    servegen_client_rates_hourly.csv.gz  `hour`: fourteen days by the hour

A seed draws sixteen clients, each a model of its own; which days; and arrivals and lengths. A model keeps the
ups and downs of its client, and gets its share of all requests by Zipf's law, by the rank of its client.
The first day is learned from and not counted. Loads without days are those of `benchmarks/unseen.py`, and
one whose second day has the hours of each model in an order of its own. Results are kept in a file beside
FILE, and the same command goes on after an interruption. Seeds begin with 11: those before were seen while
the forecast was made.
"""

from __future__ import annotations

import csv
import gzip
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

from benchmarks import unseen
from benchmarks.command import parser_of, save
from benchmarks.partial import PartialResults
from benchmarks.search import Estimate
from benchmarks.table import show
from hotswap.abc import Scheduler
from hotswap.offline.workloads import log_normal_lengths
from hotswap.policies import CostSwap, Forecast
from hotswap.simulation import Arrivals, Cluster, Slo, Trace, generate_each, simulate
from hotswap.simulation.outcome import percentile

__all__ = ["LOADS", "POLICIES", "main", "measure"]

DAY_S, FIRST_SEED, NUM_MODELS, RATE_PER_S = 86_400.0, 11, 16, 0.06
TWO_DAYS, HOURLY = "servegen_client_rates_2days.csv.gz", "servegen_client_rates_hourly.csv.gz"
DEFAULT, FORECAST = "CostSwap (default)", "Forecast"
POLICIES: Mapping[str, Callable[[], Scheduler]] = {
    DEFAULT: CostSwap,
    FORECAST: Forecast,
    "Forecast without hours": lambda: Forecast(num_slots=1),
}
# A load from disk takes 3.6 s and is late; one from memory takes 0.7 s.
SLO = Slo(ttft_s=2.0)
# Memory has room for half the models.
_WHOLE = Cluster(num_engines=4, profile="h100-llama-3.1-8b", max_requests=64)
CLUSTER = replace(_WHOLE, host_bytes=NUM_MODELS // 2 * (_WHOLE.measured.weight_bytes + (1 << 20)))


@dataclass(frozen=True, slots=True)
class Client:
    """The rates of one client in equal parts of some days, and how bursty it is (the median of the `cv`)."""

    rates: tuple[float, ...]
    cv: float


@lru_cache(maxsize=2)
def clients(path: Path) -> Mapping[str, Client]:
    """Return the clients of a table that has their rates in equal parts; of the models with all days."""
    rates: defaultdict[str, dict[int, float]] = defaultdict(dict)
    cvs: defaultdict[str, list[float]] = defaultdict(list)
    with gzip.open(path, "rt", encoding="utf-8", newline="") as text:
        for row in csv.DictReader(text):
            if row["model"] != "deepseek-r1":  # one day alone
                part = int(row["hour"]) if "hour" in row else int(float(row["window_start_s"])) // 600
                name = f"{row['model']}-c{row['client']}"
                rates[name][part] = float(row["rate_rps"])
                cvs[name].append(float(row.get("cv") or 1.0))
    num_parts = 336 if path.name == HOURLY else 288
    return {
        name: Client(tuple(of.get(part, 0.0) for part in range(num_parts)), median(cvs[name]))
        for name, of in sorted(rates.items())
    }


def _days(file: str, num_days: int, folder: Path | None, seed: int, *, shuffled: bool = False) -> Trace:
    """So many days in a row of sixteen clients that ask in the first and in the others."""
    assert folder is not None
    random, everyone = Random(seed), clients(folder / file)
    per_day = 24 if file == HOURLY else 144
    first = random.randrange(len(next(iter(everyone.values())).rates) // per_day - num_days + 1)
    taken = slice(first * per_day, (first + num_days) * per_day)
    shown = {name: client.rates[taken] for name, client in everyone.items()}
    active = [name for name, rates in shown.items() if any(rates[:per_day]) and any(rates[per_day:])]
    names = sorted(random.sample(active, NUM_MODELS), key=lambda name: -sum(shown[name]))
    weights = [1 / (rank + 1) ** 0.8 for rank in range(NUM_MODELS)]
    arrivals: dict[str, Arrivals] = {}
    for name, weight in zip(names, weights, strict=True):
        rates = shown[name]
        if shuffled:
            rates = (*rates[:per_day], *random.sample(rates[per_day:], per_day))
        arrivals[name] = Arrivals(
            rate_per_s=RATE_PER_S * weight / sum(weights),
            cv=min(max(everyone[name].cv, 1.0), 8.0),
            parts=tuple(rate / fmean(rates) for rate in rates),
        )
    return generate_each(
        seed,
        arrivals,
        seconds=num_days * DAY_S,
        prompt_tokens=log_normal_lengths(400, sigma=1.0),
        output_tokens=log_normal_lengths(150, sigma=0.8),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of which engines; requests that arrive before `warm_s` are served, and not counted."""

    what: str
    make: Callable[[Path | None, int], Trace]
    cluster: Cluster = CLUSTER
    warm_s: float = DAY_S
    interval_s: float = 5.0


def _without_days(name: str) -> Load:
    load = unseen.LOADS[name]
    cluster = replace(load.cluster, num_engines=4)
    return Load(what=load.what, make=load.make, cluster=cluster, warm_s=unseen.WARM_S, interval_s=0.5)


LOADS: Mapping[str, Load] = {
    "two days": Load(what="ServeGen's clients, two days", make=partial(_days, TWO_DAYS, 2)),
    "hourly": Load(what="ServeGen's clients, three days by the hour", make=partial(_days, HOURLY, 3)),
    "shuffled": Load(
        what="the two days, the parts of the second in any order",
        make=partial(_days, TWO_DAYS, 2, shuffled=True),
    ),
    **{name: _without_days(name) for name in ("bursts", "reversed", "azure")},
}


def measure(
    names: Sequence[str], folder: Path, seeds: Sequence[int], partial_: PartialResults
) -> dict[str, Any]:
    """Play every load, seed and policy; return the figures, and the forecast's less the default's by seed."""
    found: dict[str, dict[str, list[Any]]] = {name: {policy: [] for policy in POLICIES} for name in names}
    for seed in seeds:  # outermost, so that a few seeds of all loads are there soon
        for name in names:
            for policy in POLICIES:
                key = f"{name}, {policy}, seed {seed}"
                one = partial_.get(key, partial(_play, LOADS[name], folder, seed, policy))
                found[name][policy].append(one)
                print(f"{key}: {one}", file=sys.stderr, flush=True)
    return {
        name: {"what": LOADS[name].what, "policies": policies, "more_than_default": compared(policies)}
        for name, policies in found.items()
    }


def _play(load: Load, folder: Path, seed: int, policy: str) -> dict[str, float]:
    outcome = simulate(
        load.make(folder, seed),
        load.cluster,
        scheduler=POLICIES[policy](),
        interval_s=load.interval_s,
        driver="events",
    )
    counted = [request for request in outcome.requests if request.arrived_s >= load.warm_s]
    swaps = [swap for swap in outcome.swaps if swap.started_s >= load.warm_s]
    tiers = Counter(swap.tier for swap in swaps)
    return {
        "num_requests": len(counted),
        "attainment": fmean(SLO.met(request) for request in counted),
        "ttft_s_mean": fmean(request.ttft_s for request in counted),
        "ttft_s_p99": percentile([request.ttft_s for request in counted], 99),
        "num_swaps": len(swaps),
        "num_swaps_ahead": sum("is asked for soon" in swap.reason for swap in swaps),
        "num_from_disk": tiers["disk"],
    }


def compared(policies: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Return by how much each policy's figures are more than the default's, seed by seed."""
    return {
        policy: {
            figure: asdict(
                Estimate.of([a[figure] - b[figure] for a, b in zip(series, policies[DEFAULT], strict=True)])
            )
            for figure in ("attainment", "ttft_s_mean", "num_swaps")
        }
        for policy, series in policies.items()
        if policy != DEFAULT
    }


def _row(policy: str, series: Sequence[Mapping[str, float]]) -> list[str]:
    def each(figure: str, form: str) -> str:
        return ", ".join(format(one[figure], form) for one in series)

    return [
        policy,
        each("attainment", ".4f"),
        each("ttft_s_mean", ".3f"),
        each("ttft_s_p99", ".2f"),
        each("num_swaps", ".0f"),
        each("num_swaps_ahead", ".0f"),
        each("num_from_disk", ".0f"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print tables, write the report."""
    parser = parser_of("forecast", __doc__, full="three seeds")
    parser.add_argument("--traces", type=Path, help="the folder of the traces; without it nothing is played")
    parser.add_argument("--only", nargs="+", choices=list(LOADS), help="these loads alone")
    parser.add_argument("--seeds", type=int, help="how many seeds, if not 1 or 3")
    options = parser.parse_args(arguments)
    if options.traces is None:
        print("Not played: give the folder of the traces, --traces FOLDER.", file=sys.stderr)
        return 0
    seeds = range(FIRST_SEED, FIRST_SEED + (options.seeds or (3 if options.full else 1)))
    report = measure(options.only or list(LOADS), options.traces, seeds, PartialResults.of(options.json))
    for name, found in report.items():
        show(
            f"{name}: {found['what']}; by seed",
            ["", f"within {SLO.ttft_s:g} s", "TTFT, s", "P99, s", "swaps", "ahead", "from disk"],
            [_row(policy, series) for policy, series in found["policies"].items()],
        )
    save({"slo": asdict(SLO), "loads": report}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
