"""Loads that no policy was tuned to: how many engines each needs for 99 % of its targets, in simulation.

    python -m benchmarks unseen                                    two seeds of the loads that are made
    python -m benchmarks unseen --full --traces FOLDER --json FILE five seeds of all loads
    python -m benchmarks unseen --seeds 14 15 --ttft 2             other seeds, another target

Results are kept in a file beside FILE, and the same command goes on after an interruption. A seed draws
arrivals, lengths and models of a load that is made, and the window, the requests that stay and the model of
each in a trace (`benchmarks/trace_loads.py` names the files). Seeds begin with 46: those before were seen
while the default was made, or measured with earlier versions.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.command import parser_of, save
from benchmarks.partial import PartialResults
from benchmarks.search import Estimate
from benchmarks.table import show
from benchmarks.trace_loads import AZURE, AZURE_CODE, SERVEGEN
from hotswap.abc import Scheduler
from hotswap.offline.workloads import log_normal_lengths, zipf_mix
from hotswap.policies import (
    CostSwap,
    ElasticQuota,
    KeepAliveSwap,
    ShepherdSwap,
    StartupTimePlacement,
    WeightedLoadSwap,
)
from hotswap.simulation import Cluster, Slo, Trace, fewest_engines, generate

__all__ = ["LOADS", "POLICIES", "main", "measure"]

SHARE, WARM_S, SECONDS, MOST = 0.99, 40.0, 240.0, 40
FIRST_SEED = 46
DEFAULT, PATIENT = "CostSwap (default)", "KeepAliveSwap"
EARLY_WEIGHTED, QUOTA, STARTUP, SHEPHERD = (
    "WeightedLoadSwap(8, 6, 2)",
    "ElasticQuota",
    "StartupTimePlacement",
    "ShepherdSwap",
)
POLICIES: Mapping[str, Scheduler] = {
    DEFAULT: CostSwap(),
    "WeightedLoadSwap, tuned": WeightedLoadSwap(),
    EARLY_WEIGHTED: WeightedLoadSwap(t1=8, t2=6, b=2, patience_s=10, sigmas=0),
    QUOTA: ElasticQuota(),
    STARTUP: StartupTimePlacement(),
    SHEPHERD: ShepherdSwap(),
    PATIENT: KeepAliveSwap(),
}
TWELVE, THIRTY_TWO = (zipf_mix([f"m{number}" for number in range(n)], exponent=1.0) for n in (12, 32))
H100 = Cluster(profile="h100-llama-3.1-8b", disk_bytes_per_s=50e9, max_requests=64)
L40S = replace(H100, profile="l40s-llama-3.1-8b", token_budget=512)
_PROMPTS, _ANSWERS = log_normal_lengths(400, sigma=1.0), log_normal_lengths(150, sigma=0.8)


def _made(seed: int, models: Mapping[str, float], rate_per_s: float, **more: float) -> Trace:
    seconds = more.pop("seconds", SECONDS)
    return generate(
        seed,
        models=models,
        rate_per_s=rate_per_s,
        seconds=seconds,
        cv=more.pop("cv", 1.0),
        prompt_tokens=_PROMPTS,
        output_tokens=_ANSWERS,
    )


def _bursts(folder: Path | None, seed: int) -> Trace:
    return _made(seed, TWELVE, 4.0, cv=8.0)


def _cold_burst(folder: Path | None, seed: int) -> Trace:
    burst = _made(seed + 1000, {"m11": 1.0}, 8.0, seconds=40.0)
    return _made(seed, TWELVE, 3.0).merge(burst.after(110.0))


def _reversed(folder: Path | None, seed: int) -> Trace:
    half_s = SECONDS / 2
    other = dict(zip(TWELVE, reversed(list(TWELVE.values())), strict=True))
    later = _made(seed + 1000, other, 4.0, seconds=half_s).after(half_s)
    return _made(seed, TWELVE, 4.0, seconds=half_s).merge(later)


def _long_answers(folder: Path | None, seed: int) -> Trace:
    return generate(
        seed,
        models=zipf_mix([f"m{number}" for number in range(24)], exponent=0.8),
        rate_per_s=2.0,
        seconds=SECONDS,
        prompt_tokens=log_normal_lengths(300, sigma=1.0),
        output_tokens=log_normal_lengths(600, sigma=0.8),
    )


def _azure(file: str, models: Mapping[str, float], factor: float) -> Callable[[Path | None, int], Trace]:
    """Windows of one of Azure's traces, so many times as fast, each request for one of the models."""

    def make(folder: Path | None, seed: int) -> Trace:
        assert folder is not None
        whole = Trace.read(folder / file)
        start_s = Random(seed).uniform(0.0, whole.seconds - factor * SECONDS)
        return whole.window(start_s, factor * SECONDS).faster(factor).spread(seed, models)

    return make


def _tenants(folder: Path | None, seed: int) -> Trace:
    assert folder is not None
    whole = Trace.read(folder / SERVEGEN, columns={"model": "tenant"})
    start_s = Random(seed).uniform(0.0, whole.seconds - SECONDS)
    taken = whole.window(start_s, SECONDS).thin(seed, 1 / 8)
    held = (r for r in taken.requests if r.prompt_tokens < 32_000)
    return Trace(tuple(replace(r, model=r.model.replace("/", "-")) for r in held), "tenants")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of which engines; `make` draws it from a seed, and from the folder of traces.

    `traced` loads need the folder; `guess` is the number of engines that is tried first. Policies that are
    left out (`without`) take long there, or have no figure to compare with.
    """

    what: str
    make: Callable[[Path | None, int], Trace]
    cluster: Cluster = H100
    traced: bool = False
    guess: int = 5
    without: tuple[str, ...] = ()


LOADS: Mapping[str, Load] = {
    "bursts": Load(what="12 models by Zipf, 4 requests/s, Gamma with a CV of 8", make=_bursts),
    "cold burst": Load(what="12 models, 3/s; 40 s of 8/s for the coldest", make=_cold_burst),
    "reversed": Load(what="12 models, 4/s; popularity reversed half way", make=_reversed),
    "long answers": Load(what="24 models, 2/s, answers of 600 tokens in the median", make=_long_answers),
    "azure": Load(
        what="Azure's conversations, twice as fast, spread over 12 models",
        make=_azure(AZURE, TWELVE, 2.0),
        traced=True,
    ),
    "azure code": Load(
        what="Azure's code, four times as fast, spread over 12 models",
        make=_azure(AZURE_CODE, TWELVE, 4.0),
        traced=True,
    ),
    "azure code, L40S": Load(
        what="Azure's code as fast as it is, spread over 32 models, on L40S",
        make=_azure(AZURE_CODE, THIRTY_TWO, 1.0),
        cluster=L40S,
        traced=True,
        guess=8,
        without=(QUOTA, SHEPHERD),
    ),
    "tenants": Load(
        what="ServeGen's tenants, an eighth, on L40S",
        make=_tenants,
        cluster=L40S,
        traced=True,
        guess=14,
        without=(EARLY_WEIGHTED, STARTUP, SHEPHERD),
    ),
}


def measure(
    names: Sequence[str],
    policies: Sequence[str],
    folder: Path | None,
    seeds: Sequence[int],
    slo: Slo,
    partial_: PartialResults,
) -> dict[str, Any]:
    """Search for every load, policy and seed; return what each needs, and by how much more than the best."""
    found: dict[str, dict[str, list[Any]]] = {
        name: {policy: [] for policy in policies if policy not in LOADS[name].without} for name in names
    }
    for seed in seeds:  # outermost, so that a few seeds of all loads are there soon
        for name in names:
            trace, guess = LOADS[name].make(folder, seed), LOADS[name].guess
            for policy in sorted(found[name], key=DEFAULT.__eq__):  # last: no guess hangs on the default
                key = f"{name}, {policy}, seed {seed}, {slo.ttft_s:g} s"
                one = partial_.get(key, partial(_search, LOADS[name], trace, policy, guess, slo))
                found[name][policy].append(one)
                guess = one["engines"] or guess
                print(f"{key}: {one['engines']} {one['attainment']}", file=sys.stderr, flush=True)
    report: dict[str, Any] = {}
    for name, of_load in found.items():
        engines = {policy: [one["engines"] for one in series] for policy, series in of_load.items()}
        trials = {policy: [one["attainment"] for one in series] for policy, series in of_load.items()}
        report[name] = {
            "what": LOADS[name].what,
            "engines": engines,
            "attainment": trials,
            **compared(engines),
        }
    return report


def _search(load: Load, trace: Trace, policy: str, guess: int, slo: Slo) -> dict[str, Any]:
    found = fewest_engines(
        trace,
        load.cluster,
        scheduler=POLICIES[policy],
        slo=slo,
        share=SHARE,
        warm_s=WARM_S,
        most=MOST,
        guess=guess,
    )
    return {"engines": found.engines, "attainment": {str(n): met for n, met in found.attainment.items()}}


def compared(engines: Mapping[str, Sequence[int | None]]) -> dict[str, Any]:
    """Return the estimate of each policy, and by how much the default needs more than each, seed by seed.

    Also than the best of the others with each seed. Where the most engines were not enough, one more counts.
    """
    whole = {p: [n if n is not None else MOST + 1 for n in series] for p, series in engines.items()}
    default = whole[DEFAULT]
    others = {policy: series for policy, series in whole.items() if policy != DEFAULT}
    more = {
        policy: asdict(Estimate.of([d - n for d, n in zip(default, series, strict=True)]))
        for policy, series in others.items()
    }
    return {
        "estimates": {p: asdict(Estimate.of(series)) for p, series in whole.items()},
        "default_needs_more": more,
        "default_over_best": [d - min(ns) for d, *ns in zip(default, *others.values(), strict=True) if ns],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print tables, write the report."""
    parser = parser_of("unseen", __doc__, full="five seeds")
    parser.add_argument("--traces", type=Path, help="the folder of the traces; without it only made loads")
    parser.add_argument("--only", nargs="+", choices=list(LOADS), help="these loads alone")
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), help="these, beside the default")
    parser.add_argument("--seeds", type=int, nargs="+", help=f"these, not 2 or 5 from {FIRST_SEED} on")
    parser.add_argument("--ttft", type=float, default=10.0, help="the target of first tokens in seconds")
    options = parser.parse_args(arguments)
    logging.getLogger("hotswap.unserved").setLevel(logging.ERROR)  # too few engines are tried on purpose
    seeds = options.seeds or range(FIRST_SEED, FIRST_SEED + (5 if options.full else 2))
    policies = [DEFAULT, *(p for p in options.policies or POLICIES if p != DEFAULT)]
    names = options.only or [n for n, load in LOADS.items() if options.traces or not load.traced]
    partial_, slo = PartialResults.of(options.json), Slo(ttft_s=options.ttft)
    report = measure(names, policies, options.traces, list(seeds), slo, partial_)
    for name, found in report.items():
        show(
            f"{name}: engines for {SHARE:.0%} within {slo.ttft_s:g} s, median (mean [95 %])",
            ["", "engines", "by seed"],
            [
                [policy, Estimate(**found["estimates"][policy]).format(), ", ".join(map(str, series))]
                for policy, series in found["engines"].items()
            ],
        )
    settings = {"share": SHARE, "warm_s": WARM_S, "slo": asdict(slo), "seeds": list(seeds)}
    save({**settings, "loads": report}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
