"""Fu et al., ServerlessLLM, OSDI 2024: its schedulers on nodes with finite memory, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.serverlessllm import (
    CLUSTER,
    RESTARTING,
    SYSTEMS,
    AnyFree,
    Tokens,
    compute_s,
    ideal_waits_s,
    known_costs,
    startup_s,
    trace_of,
)
from hotswap import FleetView, InstanceId, ModelId
from hotswap.abc import Action, Scheduler, Swap
from hotswap.policies import LeastLoadedRouter, RestoreMinReplicas, StartupTimePlacement, accepted
from hotswap.profiling import PROFILES
from hotswap.simulation import Cluster, Outcome, Trace, TraceRequest, simulate
from hotswap.testing.strategies import fleet_views

A40 = PROFILES["a40-llama-2-7b"]
DISK_S = A40.weight_bytes / CLUSTER.disk_bytes_per_s + A40.device.load_s(A40.weight_bytes)
HOST_S = A40.weight_bytes / CLUSTER.host_bytes_per_s + A40.device.load_s(A40.weight_bytes)


def asked(at_s: float, model: str, tokens: int) -> TraceRequest:
    return TraceRequest(arrive_s=at_s, model=model, prompt_tokens=60, output_tokens=tokens)


def played(trace: Trace, scheduler: Scheduler, cluster: Cluster) -> Outcome:
    return simulate(
        trace,
        cluster,
        router=LeastLoadedRouter(),
        scheduler=scheduler,
        mover=Tokens(),
        interval_s=0.1,
        driver="events",
    )


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 1000), st.integers(1, 300))
def test_a_request_alone_computes_for_as_long_as_the_formula_says(prompt: int, output: int) -> None:
    """So what is more than that, of a request that had company, is startup latency."""
    lone = TraceRequest(arrive_s=30.0, model="m", prompt_tokens=prompt, output_tokens=output)
    cluster = replace(CLUSTER, num_engines=1, num_nodes=1, min_replicas=1)
    (served,) = played(Trace((lone,)), RestoreMinReplicas(), cluster).requests
    assert served.seconds == pytest.approx(compute_s(A40, prompt, output))
    assert startup_s(served) == pytest.approx(0.0, abs=1e-6)


# Two nodes with an engine each, and host memory for two models. e0 serves b, and its node has a in memory; e1
# is idle with c, and its node has b in memory. a is asked for while e0 is at work.
WORLD = replace(CLUSTER, num_engines=2, num_nodes=2, host_bytes=int(2.5 * A40.weight_bytes))
HISTORY = ((0, "e0", "a"), (0, "e1", "b"), (15, "e0", "b"), (15, "e1", "c"))
THEN_S = 60.0


@dataclass(frozen=True)
class AfterThat(Scheduler):
    """Loads by the clock first, and then as another scheduler plans."""

    scheduler: Scheduler

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        if fleet.now_s >= THEN_S:
            return self.scheduler.plan(fleet)
        due = [(name, model) for at_s, name, model in HISTORY if at_s <= fleet.now_s < at_s + 10]
        return [Swap(instance=InstanceId(name), model=ModelId(model)) for name, model in due]


@pytest.mark.parametrize(
    ("system", "of_a", "of_b"),
    [
        ("ServerlessLLM", (2 * HOST_S, DISK_S - 0.4), (0.0, 0.5)),
        ("waiting", (DISK_S, DISK_S + 0.3), (0.0, 0.01)),
        # b had run for 11 s, which it computes again.
        ("Shepherd*", (HOST_S, HOST_S + 0.3), (HOST_S + 10.5, HOST_S + 11.5)),
        ("Serverless", (DISK_S, DISK_S + 0.3), (0.0, 0.01)),
    ],
)
def test_the_example_of_the_paper(system: str, of_a: tuple[float, float], of_b: tuple[float, float]) -> None:
    """A move starts a from memory and costs b a moment, eviction costs b all it had; else a is far."""
    trace = Trace((asked(45, "c", 10), asked(50, "b", 1000), asked(THEN_S + 1, "a", 100)))
    world = replace(
        RESTARTING, **{name: getattr(WORLD, name) for name in ("num_engines", "num_nodes", "host_bytes")}
    )
    outcome = played(trace, AfterThat(SYSTEMS[system]()), world if system == "Shepherd*" else WORLD)
    waits = {request.model: startup_s(request) for request in outcome.requests}
    for model, (least_s, most_s) in (("a", of_a), ("b", of_b)):
        assert least_s <= waits[model] <= most_s, model
    assert sum(move.outcome == "done" for move in outcome.migrations) == (system == "ServerlessLLM")
    assert not any(request.error for request in outcome.requests)


@given(fleet_views())
def test_a_baseline_takes_instances_without_requests_alone(view: FleetView) -> None:
    plan = AnyFree().plan(view)
    assert accepted(view, plan) == tuple(plan)
    assert plan == AnyFree().plan(view)
    taken = [action.instance for action in plan if isinstance(action, Swap)]
    assert all(not view.instance(instance).num_requests for instance in taken)


def test_costs_are_those_of_the_cluster() -> None:
    loads = known_costs().loads
    for tier, seconds in (("host", HOST_S), ("disk", DISK_S)):
        assert A40.weight_bytes / loads.bandwidths[tier] == pytest.approx(seconds)
    assert set(SYSTEMS) == {"ServerlessLLM", "waiting", "Shepherd*", "Serverless"}
    assert isinstance(SYSTEMS["Shepherd*"](), StartupTimePlacement)


@pytest.mark.parametrize("bursts", ["each", "together"])
def test_a_trace_repeats_and_has_every_model_by_its_popularity(bursts: Literal["each", "together"]) -> None:
    trace = trace_of("GSM8K", 1.4, 7, 3000.0, bursts)
    assert trace == trace_of("GSM8K", 1.4, 7, 3000.0, bursts)
    assert trace != trace_of("GSM8K", 1.4, 8, 3000.0, bursts)
    if bursts == "each":
        assert trace.rate_per_s == pytest.approx(1.4)


def test_bursts_of_each_model_are_of_one_model() -> None:
    """By far most neighbours are of one model, where else a tenth is, by Zipf's law for 32 models."""

    def alike(bursts: Literal["each", "together"]) -> float:
        models = [request.model for request in trace_of("GSM8K", 1.4, 7, 3000.0, bursts).requests]
        return fmean(a == b for a, b in pairwise(models))

    assert alike("each") > 0.6
    assert alike("together") < 0.2


def test_no_model_begins_with_a_burst() -> None:
    """Hardly one model has a request in the first second, where nearly all would if gaps began there."""
    begun = {request.model for request in trace_of("GSM8K", 1.4, 7, 3000.0).requests if request.arrive_s < 1}
    assert len(begun) <= 4


def test_in_one_queue_a_request_without_a_gpu_waits_for_the_first_free_one() -> None:
    """Of 18 requests at once sixteen find a GPU; the next two wait for the two that end first."""
    tokens = [100, 40, 70, *[100] * 15]
    trace = Trace(tuple(asked(400, f"m{number}", count) for number, count in enumerate(tokens)))
    waits_s = ideal_waits_s(trace)
    assert waits_s[:16] == [0.0] * 16
    assert waits_s[16:] == pytest.approx([compute_s(A40, 60, 40), compute_s(A40, 60, 70)])
