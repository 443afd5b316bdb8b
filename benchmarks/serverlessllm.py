"""ServerlessLLM's schedulers: startup latency on nodes that hold a few of the models in memory.

    python -m benchmarks serverlessllm                      GSM8K at 0.8 requests a second, one seed
    python -m benchmarks serverlessllm --full --json FILE   three rates, and 1.4 with joint bursts; five seeds
    python -m benchmarks serverlessllm --full --data ShareGPT --json FILE

Four nodes of four A40s, 32 models of 7B parameters, each a function of its own, with Zipf popularity. A GPU
serves one request at a time. Weights lie on the disk of every node; its host memory keeps those that were
loaded last. Engines that load at once share what the disk gives, and one read of a model serves all that
want it meanwhile. Each model's arrivals are a process of their own, Gamma-distributed with a coefficient of
variation of 8 (after AlpaServe, whose recipe the paper names), and the whole is scaled to a rate. With joint
bursts one such process is for all models, and the model of each request is drawn.

A request's startup latency is all the time that it does not compute: until its first token, and when it is
moved or evicted; tokens that Shepherd* makes it compute again count as well. Longer latencies count as 300 s:
the paper's clients leave then.

For comparison, latencies without loads: the waits of the same requests in one queue before as many GPUs that
have every model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Literal, TypeAlias, TypeVar, cast

from benchmarks.command import parser_of, save
from benchmarks.measure import Summary, columns, machine
from benchmarks.table import show
from hotswap import FleetView, InstanceId, ModelId, ModelView, PhaseRecord, Request, SwapRecord
from hotswap.abc import Action, MoveChoice, Mover, MoveView, Scheduler, Swap
from hotswap.backends.sim import SimEngine
from hotswap.offline.workloads import Lengths, gamma_gaps, log_normal_lengths, zipf_mix
from hotswap.policies import LeastLoadedRouter, StartupCosts, StartupTimePlacement, accepted
from hotswap.profiling import PROFILES, Profile
from hotswap.simulation import Cluster, Outcome, Served, Trace, TraceRequest, generate, simulate
from hotswap.simulation.events.engine import Counted, EventEngine, SequenceListener
from hotswap.simulation.outcome import percentile

__all__ = [
    "CLUSTER",
    "DATA",
    "RESTARTING",
    "SYSTEMS",
    "ideal_waits_s",
    "main",
    "measure",
    "play",
    "startup_s",
    "trace_of",
]

_E = TypeVar("_E", bound=SimEngine)
Bursts: TypeAlias = Literal["each", "together"]

MODELS = [f"m{number:02}" for number in range(32)]
RATES_PER_S = (0.2, 0.8, 1.4)
CV = 8.0
TIMEOUT_S = 300.0
# The beginning, in which nothing is in host memory, is simulated and not counted.
WARM_UP_S, SECONDS = 300.0, 1800.0

_A40 = PROFILES["a40-llama-2-7b"]
# A disk of 6.7 GB/s, then the 20 GB/s of a device's own link: 5 GB/s together, and 18 GB/s from host memory.
CLUSTER = Cluster(
    num_engines=16,
    num_nodes=4,
    profile=_A40,
    host_bytes=128 * 10**9,
    host_bytes_per_s=200e9,
    disk_bytes_per_s=6.7e9,
    max_requests=1,
    max_context_tokens=2048,
)
TPOT_S = 0.0263
# Figures of the table; the first two are known without loads, too.
COLUMNS = {
    "startup_p99_s": "P99",
    "startup_mean_s": "mean",
    "host_share": "loads from host",
    "num_moves": "moves",
    "num_evicted": "evictions",
}


class Restarting(EventEngine):
    """Begins requests from other instances with their prompts: the tokens generated there are lost."""

    def admit(self, request: Request, listener: SequenceListener) -> Counted:
        return super().admit(replace(request, generated=()), listener)


class RestartingCluster(Cluster):
    """A cluster of such engines, whatever drives them; for schedulers without moves."""

    def engines(self, kind: type[_E]) -> list[_E]:
        assert issubclass(Restarting, kind), "only where tokens are counted can a request get them again"
        return super().engines(cast("type[_E]", Restarting))


RESTARTING = RestartingCluster(**{name: getattr(CLUSTER, name) for name in CLUSTER.__dataclass_fields__})


@dataclass(frozen=True, slots=True)
class Dataset:
    """Lengths of prompts and answers."""

    prompts: Lengths
    outputs: Lengths


DATA = {
    "GSM8K": Dataset(
        log_normal_lengths(60, sigma=0.4, most=256), log_normal_lengths(128, sigma=0.4, most=512)
    ),
    # 3.7 times as long an answer, as the paper says.
    "ShareGPT": Dataset(
        log_normal_lengths(74, sigma=1.68, most=1024), log_normal_lengths(474, sigma=0.4, most=1000)
    ),
}


class Tokens(Mover):
    """Moves requests as tokens, which is the method of the paper."""

    def choose(self, move: MoveView) -> MoveChoice:
        return MoveChoice("tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyFree(Scheduler):
    """Starts a model on any instance without requests, as serverless systems do, and waits if all are busy.

    Random choices are a function of the view.
    """

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        return accepted(fleet, tuple(self._swaps(fleet)))

    def _swaps(self, fleet: FleetView) -> Iterator[Swap]:
        free = [i.id for i in fleet.instances if i.free and not i.num_requests]
        chance = Random(f"{fleet.now_s} {len(fleet.waiting)}")
        chance.shuffle(free)
        waiting = list(dict.fromkeys(request.model for request in fleet.waiting))
        for model in map(fleet.model, waiting):
            for _ in range(_num_unplaced(fleet, model)):
                usable = next((i for i in free if fleet.instance(i).model != model.id), None)
                if usable is None:
                    break
                free.remove(usable)
                yield Swap(instance=usable, model=model.id, reason=f"{model.id} waits; {usable} is free")


def _num_unplaced(fleet: FleetView, model: ModelView) -> int:
    """Number of waiting requests of a model beyond the free places of its replicas, loading ones included."""
    replicas = fleet.replicas(model.id)
    coming = sum(i.max_requests for i in replicas if i.swapping)
    ready = sum(i.max_requests - i.num_requests for i in replicas if i.open and not i.swapping)
    return max(0, model.num_waiting - coming - ready)


def known_costs() -> StartupCosts:
    """The costs of loads and moves after a load from each tier was recorded."""
    costs = StartupCosts(token_s=_A40.device.token_s, start_s=0.1, tpot_s=TPOT_S)
    for tier, bytes_per_s in (("host", CLUSTER.host_bytes_per_s), ("disk", CLUSTER.disk_bytes_per_s)):
        seconds = _A40.weight_bytes / bytes_per_s + _A40.device.load_s(_A40.weight_bytes)
        costs.learn_swap(
            SwapRecord(
                instance=InstanceId("e0"),
                model_before=None,
                model=ModelId("m"),
                model_after=ModelId("m"),
                outcome="done",
                reason="to know it",
                started_s=0.0,
                seconds=seconds,
                downtime_s=seconds,
                phases=(PhaseRecord(name="load", started_s=0.0, seconds=seconds),),
                loaded_bytes=_A40.weight_bytes,
                tier=tier,
            )
        )
    return costs


SYSTEMS: Mapping[str, Callable[[], Scheduler]] = {
    "ServerlessLLM": lambda: StartupTimePlacement(costs=known_costs(), deadline_s=TIMEOUT_S, measured=False),
    "waiting": lambda: StartupTimePlacement(costs=known_costs(), victims="stay", measured=False),
    "Shepherd*": lambda: StartupTimePlacement(costs=known_costs(), victims="evict", measured=False),
    "Serverless": AnyFree,
}


def trace_of(data: str, rate_per_s: float, seed: int, seconds: float, bursts: Bursts = "each") -> Trace:
    """Return the requests of a point.

    Where each model has bursts of its own, times are scaled so that the trace has its rate to the last
    request, as the paper scales its trace; so its length differs from `seconds`.
    """
    dataset, popularity = DATA[data], zipf_mix(MODELS)
    name = f"{data}-{rate_per_s:g}"
    if bursts == "together":
        return generate(
            seed,
            models=popularity,
            rate_per_s=rate_per_s,
            seconds=seconds,
            cv=CV,
            prompt_tokens=dataset.prompts,
            output_tokens=dataset.outputs,
            name=name,
        )
    requests: list[TraceRequest] = []
    for model, weight in popularity.items():
        random = Random(f"{seed} {model}")
        for at_s in _arrivals(random, rate_per_s * weight / sum(popularity.values()), seconds):
            prompt, output = dataset.prompts(random), dataset.outputs(random)
            requests.append(
                TraceRequest(arrive_s=at_s, model=model, prompt_tokens=prompt, output_tokens=output)
            )
    return Trace.of(requests, name).at_rate(rate_per_s)


def _arrivals(random: Random, rate_per_s: float, seconds: float) -> Iterator[float]:
    """Yield the arrivals of a stationary Gamma process, which begins within a gap, more likely a long one.

    A process that began with a request would begin with a burst, and so would all models at once.
    """
    shape, scale_s = 1 / CV**2, CV**2 / rate_per_s
    at_s = random.random() * random.gammavariate(shape + 1, scale_s)
    for gap_s in gamma_gaps(random, rate_per_s=rate_per_s, cv=CV):
        if at_s > seconds:
            return
        yield at_s
        at_s += gap_s


def compute_s(profile: Profile, prompt_tokens: int, output_tokens: int) -> float:
    """Seconds that a request takes alone on a device, from its prefill to its last token."""
    step_s, decodes = profile.device.step_s, output_tokens - 1
    prefill_s = step_s(
        tokens=prompt_tokens,
        batch=1,
        context=0,
        prefill=prompt_tokens if prompt_tokens > 1 else 0,
        prefill_squares=prompt_tokens**2 if prompt_tokens > 1 else 0,
    )
    # A decode is linear in its context, which grows by one from step to step.
    ends = (prompt_tokens, prompt_tokens + decodes - 1)
    return prefill_s + decodes * fmean(step_s(tokens=1, batch=1, context=context) for context in ends)


def startup_s(request: Served) -> float:
    """All the time that a request did not compute."""
    return max(0.0, request.seconds - compute_s(_A40, request.prompt_tokens, request.output_tokens))


def ideal_waits_s(trace: Trace) -> list[float]:
    """How long requests wait in one queue before as many GPUs that have every model, after the warm-up."""
    free_s = [0.0] * CLUSTER.num_engines  # a heap
    waits_s: list[float] = []
    for request in trace.requests:
        begins_s = max(request.arrive_s, free_s[0])
        heapreplace(free_s, begins_s + compute_s(_A40, request.prompt_tokens, request.output_tokens))
        if request.arrive_s >= WARM_UP_S:
            waits_s.append(min(begins_s - request.arrive_s, TIMEOUT_S))
    return waits_s


def figures(outcome: Outcome) -> dict[str, float]:
    """Return the compared figures, in seconds and counts, after the warm-up."""
    served = [request for request in outcome.requests if request.arrived_s >= WARM_UP_S]
    assert all(not request.error for request in served), "a request failed"
    waits = [startup_s(request) for request in served]
    loads = [s for s in outcome.swaps if s.outcome == "done" and s.model and s.started_s >= WARM_UP_S]
    return {
        "num_requests": len(served),
        "startup_p99_s": percentile([min(wait_s, TIMEOUT_S) for wait_s in waits], 99),
        "startup_p50_s": percentile([min(wait_s, TIMEOUT_S) for wait_s in waits], 50),
        "startup_mean_s": fmean(min(wait_s, TIMEOUT_S) for wait_s in waits),
        "late_share": fmean(wait_s > TIMEOUT_S for wait_s in waits),
        "num_loads": len(loads),
        "host_share": fmean(swap.tier == "host" for swap in loads) if loads else 0.0,
        "num_moves": sum(move.outcome == "done" for move in outcome.migrations),
        "num_evicted": sum(swap.num_evicted for swap in outcome.swaps),
    }


def play(system: str, trace: Trace) -> Outcome:
    """Simulate a scheduler; requests that Shepherd* evicts begin again, as in the paper."""
    return simulate(
        trace,
        RESTARTING if system == "Shepherd*" else CLUSTER,
        router=LeastLoadedRouter(),
        scheduler=SYSTEMS[system](),
        mover=Tokens(),
        interval_s=0.5,
        name=system,
        driver="events",
    )


def measure(data: str, rates: Sequence[float], seeds: Sequence[int], bursts: Bursts) -> dict[str, Any]:
    """Simulate every point and return its figures, a value for each seed."""
    points: dict[str, dict[str, dict[str, list[float]]]] = {}
    without_loads: dict[str, dict[str, list[float]]] = {}
    for rate_per_s in rates:
        traces = [trace_of(data, rate_per_s, seed, WARM_UP_S + SECONDS, bursts) for seed in seeds]
        name = traces[0].name
        waits = [ideal_waits_s(trace) for trace in traces]
        without_loads[name] = columns(
            [{"startup_p99_s": percentile(each, 99), "startup_mean_s": fmean(each)} for each in waits]
        )
        for system in SYSTEMS:
            runs: list[dict[str, float]] = []
            for seed, trace in zip(seeds, traces, strict=True):
                runs.append(figures(play(system, trace)))
                print(f"{name}, {system}, seed {seed}: {runs[-1]}", file=sys.stderr)
            points.setdefault(name, {})[system] = columns(runs)
    return {"points": points, "without_loads": without_loads}


def over(systems: Mapping[str, Mapping[str, Sequence[float]]], system: str, figure: str) -> list[float]:
    """How many times the first system's figure another has, seed by seed."""
    pairs = zip(systems["ServerlessLLM"][figure], systems[system][figure], strict=True)
    return [theirs / ours for ours, theirs in pairs if ours > 0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print a table, write the report."""
    parser = parser_of("serverlessllm", __doc__, full="all rates, and 1.4 with joint bursts; five seeds")
    parser.add_argument("--data", choices=tuple(DATA), default="GSM8K", help="lengths (default: %(default)s)")
    parser.add_argument("--rates", type=float, nargs="+", help="requests a second, if not 0.8 or all three")
    parser.add_argument("--seeds", type=int, help="how many seeds, if not 1 or 5")
    options = parser.parse_args(arguments)
    seeds = list(range(1, 1 + (options.seeds or (5 if options.full else 1))))
    rates: dict[Bursts, Sequence[float]] = {
        "each": options.rates or (RATES_PER_S if options.full else (0.8,))
    }
    if options.full:
        rates["together"] = (RATES_PER_S[-1],)
    found = {bursts: measure(options.data, of, seeds, bursts) for bursts, of in rates.items()}
    for bursts, report in found.items():
        _show(f"startup latency, seconds; bursts: {bursts}", report)
    save({"machine": machine(Path.cwd()), "seeds": seeds, "bursts": found}, options.json)
    return 0


def _show(title: str, report: Mapping[str, Any]) -> None:
    rows: list[list[str]] = []
    for point, systems in report["points"].items():
        for system, series in systems.items():
            cells = [Summary.of(series[figure]).format(2) for figure in COLUMNS]
            ratio = Summary.of(over(systems, system, "startup_p99_s") or [0.0]).format(2)
            rows.append([point, system, *cells, ratio])
        ideal = [Summary.of(series).format(2) for series in report["without_loads"][point].values()]
        rows.append([point, "without loads", *ideal, *[""] * (len(COLUMNS) - len(ideal) + 1)])
    show(title, ["", "", *COLUMNS.values(), "P99 over the first"], rows)


if __name__ == "__main__":
    sys.exit(main())
