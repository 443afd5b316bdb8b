"""Random simulations of every shipped scheduler: stalls are bounded, errors typed, and both drivers agree.

    python -m benchmarks turns                       ten for each scheduler
    python -m benchmarks turns --full --json FILE    five hundred for each; hours

A simulation draws models, engines, their size, the rate of requests, and prompts of up to 128,000 tokens. In
every second one engines have room for a model more, and load it beside the one that serves (`preload`); in
three of ten most requests have one of three adapters. It is played twice, with a client for every request and
by events, and all records of both are compared: requests, swaps, moves and samples. No request may leave
instances more than `MOST_STALLS` times in a row without a token, since the shipped schedulers finish the
first tokens of turns (`docs/policies.md`).
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from math import exp, isclose, log
from random import Random
from typing import Any, cast

from benchmarks.command import parser_of, save
from benchmarks.table import show
from hotswap.abc import Router, Scheduler
from hotswap.policies import (
    Chain,
    CostSwap,
    ElasticQuota,
    Forecast,
    FreenessAutoscaler,
    HorizontalAutoscaler,
    KeepAliveSwap,
    LeastLoadedRouter,
    LeastTimeRouter,
    RestoreMinReplicas,
    ShepherdSwap,
    StartupTimePlacement,
    StaticPinning,
    VirtualUsageRescheduler,
    WeightedLoadSwap,
)
from hotswap.profiling import PROFILES
from hotswap.simulation import Cluster, Outcome, Trace, TraceRequest, simulate

__all__ = ["MOST_STALLS", "SCHEDULERS", "differences", "drawn", "main", "played"]

MOST_STALLS = 1
LONGEST_TOKENS, CONTEXT_TOKENS = 128_000, 131_072
# Of seconds: sums of steps and the formula of a decode run round differently.
TOLERANCE = 1e-6
_NUMBER = re.compile(r"\b\d[\d.e+-]*")
_REQUEST = re.compile(r"request '[^']*'")
SCHEDULERS: Mapping[str, Callable[[Random], Scheduler]] = {
    "CostSwap": lambda random: CostSwap(),
    "WeightedLoadSwap": lambda random: WeightedLoadSwap(
        t1=random.choice((0, 2, 8, 16)),
        t2=random.choice((6, 50)),
        b=random.choice((1, 1.5, 2)),
        guard=random.random() < 0.7,
        patience_s=random.choice((0.5, 2, 4, 10)),
        sigmas=random.choice((0, 3)),
    ),
    "ElasticQuota": lambda random: ElasticQuota(max_quota_s=random.choice((0.5, 1, 4))),
    "ShepherdSwap": lambda random: ShepherdSwap(lambda_=random.choice((1, 3))),
    "KeepAliveSwap": lambda random: KeepAliveSwap(keep_alive_s=random.choice((0, 5, 300))),
    "StartupTimePlacement": lambda random: Chain(
        StartupTimePlacement(victims=random.choice(("move", "evict"))),
        WeightedLoadSwap(t1=8, t2=6, b=2, sigmas=0),
    ),
    "StaticPinning": lambda random: Chain(
        StaticPinning({"e0": "m0"}), WeightedLoadSwap(t1=8, t2=6, b=2, sigmas=0)
    ),
    "Forecast": lambda random: Forecast(
        horizon_s=random.choice((1, 5)), period_s=random.choice((2, 8)), num_slots=4, least_gain=0.05
    ),
    "Autoscalers": lambda random: Chain(
        RestoreMinReplicas(),
        # Of an interval that is no multiple of a tick: rounding would decide at which tick it has passed.
        random.choice((HorizontalAutoscaler(target=2), FreenessAutoscaler(min_instances=0, interval_s=9.7))),
        VirtualUsageRescheduler(),
        CostSwap(),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One simulation: what is asked, of which engines, by which policies."""

    trace: Trace
    cluster: Cluster
    router: Router
    scheduler: Scheduler
    interval_s: float


def drawn(kind: str, seed: int) -> Drawn:
    """Return the simulation of a seed for one kind of scheduler."""
    random = Random(f"{kind} {seed}")
    num_models, num_engines = random.randint(1, 7), random.randint(1, 4)
    rate_per_s, longest = random.choice((0.5, 2.0, 8.0)), random.choice((500, 8_000, LONGEST_TOKENS))
    at_s, requests = 0.0, list[TraceRequest]()
    for _ in range(random.randint(5, 40)):
        at_s += random.choice((0.0, random.expovariate(rate_per_s)))
        requests.append(
            TraceRequest(
                arrive_s=at_s,
                model=f"m{random.randrange(num_models)}",
                prompt_tokens=round(exp(random.uniform(log(10), log(longest)))),
                output_tokens=random.randint(1, 60),
                priority=random.choice((0, 0, 0, 1)),
            )
        )
    profile = PROFILES[random.choice(("h100-llama-3.1-8b", "l40s-llama-3.1-8b", "a100-llama-3.1-8b"))]
    if Random(f"{kind} {seed} preload").random() < 0.5:  # apart, so that it changes no other draw
        memory_bytes = profile.device.memory_bytes + profile.weight_bytes
        profile = replace(profile, device=replace(profile.device, memory_bytes=memory_bytes))
    max_adapters, adapters = 8, Random(f"{kind} {seed} adapters")  # likewise
    if adapters.random() < 0.3:
        max_adapters = adapters.choice((1, 2, 8))
        names = ("", "x", "y", "z")
        requests = [replace(request, adapter=adapters.choice(names)) for request in requests]
    cluster = Cluster(
        num_engines=num_engines,
        max_adapters=max_adapters,
        profile=profile,
        host_bytes=random.choice((None, 40_000_000_000)),
        token_budget=random.choice((512, 2048)),
        max_requests=random.choice((2, 8, 64)),
        min_replicas=int(num_models < num_engines and random.random() < 0.3),
        prefix_reuse=random.random() < 0.2,
        max_context_tokens=CONTEXT_TOKENS,
    )
    return Drawn(
        trace=Trace(tuple(requests), f"{kind} {seed}"),
        cluster=cluster,
        router=random.choice((LeastTimeRouter(), LeastLoadedRouter())),
        scheduler=SCHEDULERS[kind](random),
        interval_s=random.choice((0.25, 1.0)),
    )


def played(simulation: Drawn) -> list[str]:
    """Play a simulation by both drivers and return what is wrong with it, in sentences."""
    clients, events = (
        simulate(
            simulation.trace,
            simulation.cluster,
            router=simulation.router,
            scheduler=simulation.scheduler,
            interval_s=simulation.interval_s,
            driver=driver,
        )
        for driver in ("clients", "events")
    )
    stalls = max(request.num_stalls for request in events.requests)
    wrong = [f"a request stalled {stalls} times in a row"] if stalls > MOST_STALLS else []
    failed = {request.error for request in events.requests if request.error} - {"PromptTooLong"}
    return wrong + [f"requests ended by {sorted(failed)}"] * bool(failed) + list(differences(clients, events))


def differences(one: Outcome, other: Outcome) -> Iterator[str]:
    """Yield the first difference in each kind of record, times compared but for rounding."""
    for kind in ("requests", "swaps", "migrations", "samples"):
        records, others = (_facts(outcome, kind) for outcome in (one, other))
        for number, (a, b) in enumerate(zip_longest(records, others)):
            if not _same(a, b):
                keys = sorted(k for k in a if not _same(a[k], b[k])) if a and b else ["number of records"]
                yield f"{kind} {number} differ in {', '.join(keys)}"
                break


def _facts(outcome: Outcome, kind: str) -> list[dict[str, Any]]:
    """The records of one kind; what the end of a trace cancels has no order, and ids no meaning.

    Numbers in reasons are rounded for people, in one driver perhaps down and in the other up. Errors name
    requests.
    """
    facts = [asdict(record) for record in getattr(outcome, kind)]
    kept = [{k: v for k, v in fact.items() if k not in ("trace_id", "request")} for fact in facts]
    for fact in kept:
        if "reason" in fact:
            fact["reason"] = _NUMBER.sub("#", fact["reason"])
        if "error" in fact:
            fact["error"] = _REQUEST.sub("request #", fact["error"])
    return [fact for fact in kept if fact.get("outcome") != "cancelled"]


def _same(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    if isinstance(one, dict) and isinstance(other, dict):
        facts, others = cast("dict[str, object]", one), cast("dict[str, object]", other)
        return facts.keys() == others.keys() and all(_same(facts[key], others[key]) for key in facts)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        items, more = cast("Sequence[object]", one), cast("Sequence[object]", other)
        return len(items) == len(more) and all(map(_same, items, more))
    return one == other


def main(arguments: Sequence[str] | None = None) -> int:
    """Play, print a table, write the report; the exit status is 1 if anything was wrong."""
    parser = parser_of("turns", __doc__, full="five hundred simulations for each scheduler")
    parser.add_argument("--count", type=int, help="how many for each, if not 10 or 500")
    parser.add_argument("--only", nargs="+", choices=list(SCHEDULERS), help="these schedulers alone")
    options = parser.parse_args(arguments)
    logging.getLogger("hotswap").setLevel(logging.ERROR)  # starved models of baselines are no news here
    count = options.count or (500 if options.full else 10)
    report: dict[str, Any] = {"count": count, "most_stalls": MOST_STALLS, "wrong": {}}
    for kind in options.only or SCHEDULERS:
        found = {str(seed): wrong for seed in range(count) if (wrong := played(drawn(kind, seed)))}
        report["wrong"][kind] = found
        print(f"{kind}: {len(found)} of {count} are wrong {found or ''}", file=sys.stderr, flush=True)
    rows = [[kind, str(count), str(len(found))] for kind, found in report["wrong"].items()]
    show("random simulations by both drivers", ["", "played", "wrong"], rows)
    save(report, options.json)
    return int(any(report["wrong"].values()))


if __name__ == "__main__":
    sys.exit(main())
