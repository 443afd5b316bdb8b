"""First tokens of a turn are finished: no shipped scheduler evicts a request twice before it has a token."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap import FleetView
from hotswap.abc import Scheduler, Swap, Unload
from hotswap.policies import (
    Chain,
    CostSwap,
    ElasticQuota,
    FreenessAutoscaler,
    HorizontalAutoscaler,
    KeepAliveSwap,
    LeastLoadedRouter,
    RestoreMinReplicas,
    ShepherdSwap,
    StartupTimePlacement,
    StaticPinning,
    WeightedLoadSwap,
)
from hotswap.simulation import Cluster, Outcome, Trace, TraceRequest, simulate
from tests.policies.views import fleet_views

SHIPPED: dict[str, Scheduler] = {
    "weighted loads": WeightedLoadSwap(t1=8, t2=6, b=2, patience_s=4, sigmas=0),
    "weighted loads, no guard": WeightedLoadSwap(t1=0, t2=50, b=1, patience_s=1, guard=False, sigmas=0),
    "quotas": ElasticQuota(max_quota_s=1.0),
    "Shepherd": ShepherdSwap(lambda_=1),
    "startup time": StartupTimePlacement(victims="evict"),
    "cost": CostSwap(),
    "pinning": StaticPinning({"e0": "a", "e1": "b"}),
    "min replicas": RestoreMinReplicas(),
    "keep-alive": KeepAliveSwap(keep_alive_s=0.0),
    "freeness": FreenessAutoscaler(interval_s=0, min_instances=0, drain_s=0.0),
    "horizontal": HorizontalAutoscaler(target=2, stabilization_s=0),
}
TURNS = ("weighted loads", "weighted loads, no guard", "quotas", "Shepherd", "startup time", "cost")


@st.composite
def turns_that_begin(draw: st.DrawFn) -> FleetView:
    """Fleets in which some requests came with the turn of their instance and have no token yet."""
    view = draw(fleet_views())
    instances = (
        replace(i, num_opening=draw(st.integers(0, i.num_requests))) if i.hosted else i
        for i in view.instances
    )
    return replace(view, instances=tuple(instances))


@pytest.mark.parametrize("name", SHIPPED)
@settings(max_examples=100)
@given(view=turns_that_begin())
def test_no_scheduler_takes_an_instance_before_the_first_tokens_of_its_turn(
    name: str, view: FleetView
) -> None:
    taken = {action.instance for action in SHIPPED[name].plan(view) if isinstance(action, Swap | Unload)}
    assert not taken & {instance.id for instance in view.instances if instance.num_opening}


def one_long_prompt(scheduler: Scheduler, num_tokens: int) -> Outcome:
    """One engine, one long prompt for b, and a short request for a every two seconds."""
    long = TraceRequest(arrive_s=0.0, model="b", prompt_tokens=num_tokens, output_tokens=5)
    short = [
        TraceRequest(arrive_s=0.5 + 2 * n, model="a", prompt_tokens=100, output_tokens=5) for n in range(60)
    ]
    cluster = Cluster(num_engines=1, profile="l40s-llama-3.1-8b", token_budget=512)
    trace = Trace.of([long, *short])
    router = LeastLoadedRouter()
    return simulate(trace, cluster, router=router, scheduler=scheduler, interval_s=0.5, driver="events")


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("num_tokens", [48_000, 120_000])
def test_a_prompt_longer_than_a_turn_waits_no_longer_than_with_a_keep_alive(
    name: str, num_tokens: int
) -> None:
    outcome = one_long_prompt(Chain(SHIPPED[name]), num_tokens)
    patient = one_long_prompt(KeepAliveSwap(), num_tokens)
    assert outcome.requests[0].ttft_s <= 3 * patient.requests[0].ttft_s
    assert max(r.ttft_s for r in outcome.requests) <= 1.1 * max(r.ttft_s for r in patient.requests)
    assert not any(request.error for request in outcome.requests)


@pytest.mark.parametrize("name", TURNS)
def test_every_turn_gives_each_request_of_it_a_token(name: str) -> None:
    """Requests of four models whose prompts take seconds: hops are bounded by tokens, so none stalls."""
    requests = [
        TraceRequest(arrive_s=0.7 * n, model="abcd"[n % 4], prompt_tokens=12_000, output_tokens=6)
        for n in range(40)
    ]
    cluster = Cluster(num_engines=1, profile="l40s-llama-3.1-8b", token_budget=512)
    outcome = simulate(
        Trace.of(requests),
        cluster,
        router=LeastLoadedRouter(),
        scheduler=SHIPPED[name],
        interval_s=0.25,
        driver="events",
    )
    assert not any(request.error for request in outcome.requests)
    # A stay ends with a token, but for at most one stall before each of six tokens.
    assert max(request.num_hops for request in outcome.requests) <= 2 * 6
