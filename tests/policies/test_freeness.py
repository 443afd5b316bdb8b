"""Virtual usage and freeness by hand, and where the routers that follow them send requests."""

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import FleetView, InstanceId, InstanceState, InstanceView
from hotswap.abc import Router
from hotswap.errors import ConfigError
from hotswap.policies import Freeness, FreenessRouter, RoundRobinRouter, VirtualUsage, infaas_router
from tests.policies.loads import fleet_of, loaded, terminating
from tests.policies.views import MODELS, fleet_views, request

PAPER, ARTIFACT = Freeness(target_tokens=800), Freeness("artifact", target_tokens=800)
ROUTERS = (FreenessRouter(), infaas_router(), RoundRobinRouter())


@st.composite
def instances(draw: st.DrawFn) -> InstanceView:
    total = draw(st.integers(1, 900))
    running, waiting = draw(st.integers(0, 20)), draw(st.integers(0, 5))
    return loaded(
        "e0",
        running + waiting,
        total=total,
        free=draw(st.integers(0, total)),
        waiting=waiting,
        next_blocks=draw(st.integers(1, 50)) if waiting else 0,
        prefill=draw(st.integers(16, 4000)) if waiting else 0,
        high=draw(st.integers(0, running)),
    )


# ------------------------------------------------------------------ virtual usage


def test_what_runs_counts_as_what_it_holds() -> None:
    instance = loaded("e0", 10, free=60)
    assert PAPER.usage(instance) == VirtualUsage(physical=40)
    assert PAPER.of(instance) == 6.0


def test_the_head_of_the_line_counts_with_its_demand_and_those_behind_with_nothing() -> None:
    head = loaded("e0", 13, free=60, waiting=3, next_blocks=25, prefill=1600)
    assert PAPER.usage(head) == VirtualUsage(physical=40, queuing=25)
    assert PAPER.of(head) == 3.5  # (100 - 40 - 25) / 10 that run
    assert PAPER.of(replace(head, num_next_kv_blocks=80)) == -2.0


def test_a_queue_before_an_idle_instance_is_a_batch_of_one() -> None:
    assert PAPER.of(loaded("e0", 2, waiting=2, next_blocks=30)) == 70.0


def test_the_artifact_counts_all_waiting_requests_and_keeps_one_percent() -> None:
    instance = loaded("e0", 13, free=60, waiting=3, next_blocks=5, prefill=320)
    assert ARTIFACT.usage(instance) == VirtualUsage(physical=41, queuing=20)
    assert ARTIFACT.of(instance, dispatch=True) == pytest.approx(39 / 13)  # running and waiting
    assert ARTIFACT.of(instance) == pytest.approx(39 / 11)  # running, and one for the queue
    assert PAPER.of(instance) == PAPER.of(instance, dispatch=True) == 5.5


def test_the_artifact_dispatches_requests_of_high_priority_to_where_such_are() -> None:
    """Its headroom of 50 blocks is for the first request of high priority there."""
    joined, alone = loaded("e0", 10, free=60, high=1), loaded("e1", 10, free=60)
    seen = [ARTIFACT.of(i, dispatch=True, high=high) for i in (joined, alone) for high in (True, False)]
    assert seen == pytest.approx([5.9, 0.9, 0.9, 5.9])
    assert PAPER.of(joined, dispatch=True, high=True) == PAPER.of(joined)
    view, router = fleet_of([joined, alone]), FreenessRouter(ARTIFACT)
    assert router.route(replace(request("a"), priority=1), view) == "e0"
    assert router.route(request("a"), view) == "e1"
    assert FreenessRouter(PAPER).route(replace(request("a"), priority=1), view) == "e1"


def test_headroom_is_what_lies_beyond_the_target() -> None:
    instance = loaded("e0", 10, free=60, high=2)
    assert PAPER.usage(instance) == VirtualUsage(physical=40, headroom=50)  # 800 tokens are 50 blocks
    assert PAPER.of(instance) == 1.0
    assert Freeness(target_tokens=None).of(instance) == 6.0
    assert Freeness(target_tokens=1600).of(instance) == 6.0  # it has no more than that


def test_a_terminating_instance_is_never_free() -> None:
    idle = loaded("e0", 0)
    assert PAPER.of(idle) == inf
    swapped = replace(idle, swapping=True, target=MODELS[1])
    for leaving in (terminating(idle), replace(idle, draining=True), swapped):
        assert PAPER.of(leaving) == ARTIFACT.of(leaving) == -inf
        assert PAPER.usage(leaving).fake == inf
    assert PAPER.of(replace(idle, swapping=True, target=idle.model)) == inf  # as a cooldown shows it


def test_requests_that_the_engine_has_not_seen_count_in_the_batch() -> None:
    assert PAPER.of(replace(loaded("e0", 5, free=60), num_requests=6)) == 10.0


@given(instances(), st.sampled_from([PAPER, ARTIFACT]), st.booleans())
def test_headroom_lowers_freeness_by_exactly_its_share(
    instance: InstanceView, freeness: Freeness, dispatch: bool
) -> None:
    high = replace(instance, num_high_priority=max(1, instance.num_high_priority))
    normal = replace(instance, num_high_priority=0)
    if batch := freeness.batch(normal, dispatch=dispatch):
        share = max(0, instance.num_kv_blocks - 50) / batch
        assert freeness.of(normal, dispatch=dispatch) - freeness.of(high, dispatch=dispatch) == pytest.approx(
            share
        )


@given(instances(), st.sampled_from([PAPER, ARTIFACT]), st.integers(1, 20))
def test_freeness_rises_with_free_blocks_and_falls_with_demand(
    instance: InstanceView, freeness: Freeness, more: int
) -> None:
    before = freeness.of(instance)
    fuller = replace(instance, num_free_kv_blocks=instance.num_free_kv_blocks - more)
    assert freeness.of(fuller) < before or before == inf
    if instance.num_waiting:
        waiting = replace(
            instance,
            num_next_kv_blocks=instance.num_next_kv_blocks + more,
            num_prefill_tokens=instance.num_prefill_tokens + 16 * more,
        )
        assert freeness.of(waiting) < before


@given(instances())
def test_without_a_queue_the_readings_differ_by_the_watermark_alone(instance: InstanceView) -> None:
    calm = replace(
        instance, num_waiting=0, num_next_kv_blocks=0, num_requests=instance.num_running, num_prefill_tokens=0
    )
    none = Freeness("artifact", watermark=0.0, target_tokens=800)
    assert none.of(calm) == none.of(calm, dispatch=True) == PAPER.of(calm)


@pytest.mark.parametrize(
    "values",
    [{"reading": "rumour"}, {"target_tokens": -1}, {"watermark": 1.0}, {"watermark": nan}],
)
def test_a_senseless_setting_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{next(iter(values))} is "):
        Freeness(**values)


# ------------------------------------------------------------------ routers


@pytest.mark.parametrize("router", ROUTERS, ids=repr)
@given(view=fleet_views(), of=st.sampled_from(MODELS))
def test_an_answer_is_an_open_replica_and_given_whenever_there_is_one(
    router: Router, view: FleetView, of: str
) -> None:
    answer = router.route(request(of), view)
    fitting = {i.id for i in view.instances if i.open and i.model == of}
    assert answer in fitting if fitting else answer is None
    assert router.route(request(of), replace(view, instances=view.instances[::-1])) == answer


@given(st.lists(instances(), min_size=1, max_size=6), st.sampled_from(["paper", "artifact"]))
def test_the_freest_instance_is_chosen(drawn: list[InstanceView], reading: Any) -> None:
    freeness = Freeness(reading)
    replicas = [replace(instance, id=InstanceId(f"e{n}")) for n, instance in enumerate(drawn)]
    chosen = FreenessRouter(freeness).route(request("a"), fleet_of(replicas))
    best = max(freeness.of(instance, dispatch=True) for instance in replicas)
    assert chosen in {i.id for i in replicas if freeness.of(i, dispatch=True) == best}


def test_the_readings_send_a_request_to_different_instances() -> None:
    queue = loaded("e0", 24, free=60, waiting=4, next_blocks=10, prefill=1280)
    busy = loaded("e1", 20, free=45)
    assert FreenessRouter(Freeness()).route(request("a"), fleet_of([queue, busy])) == "e0"  # 2.5 and 2.25
    assert infaas_router().route(request("a"), fleet_of([queue, busy])) == "e1"  # -21/24 and 44/20


def test_a_request_of_high_priority_keeps_others_away() -> None:
    held = loaded("e0", 2, free=700, total=800, high=1)
    fuller = loaded("e1", 20, free=200, total=800)
    assert FreenessRouter().route(request("a"), fleet_of([held, fuller])) == "e1"
    assert FreenessRouter(Freeness(target_tokens=None)).route(request("a"), fleet_of([held, fuller])) == "e0"


def test_idle_instances_go_by_their_blocks_and_then_by_name() -> None:
    small, large, same = loaded("e0"), loaded("e2", free=200, total=200), loaded("e1", free=200, total=200)
    assert FreenessRouter().route(request("a"), fleet_of([small, large, same])) == "e1"


def test_engines_without_kv_blocks_are_balanced_by_requests() -> None:
    blind = [loaded("e0", 3, free=0, total=0), loaded("e1", 2, free=0, total=0)]
    assert FreenessRouter().route(request("a"), fleet_of(blind)) == "e1"


# ------------------------------------------------------------------ in turn


def in_turn(replicas: list[InstanceView], times: int, begin: int = 1) -> tuple[list[str], list[InstanceView]]:
    """Assign requests as a fleet does, and return the instances that got them."""
    given_to: list[str] = []
    for turn in range(begin, begin + times):
        answer = RoundRobinRouter().route(request("a"), fleet_of(replicas))
        assert answer is not None
        given_to.append(answer)
        replicas = [replace(i, last_assigned=turn) if i.id == answer else i for i in replicas]
    return given_to, replicas


@given(st.integers(1, 6), st.integers(0, 30))
def test_replicas_take_turns(count: int, times: int) -> None:
    names = [f"e{n}" for n in range(count)]
    given_to, _ = in_turn([loaded(name) for name in names], times)
    assert given_to == [names[turn % count] for turn in range(times)]


@given(st.integers(1, 5), st.integers(0, 20))
def test_a_replica_that_joins_has_the_next_turn_and_then_its_share(count: int, times: int) -> None:
    _, replicas = in_turn([loaded(f"e{n}") for n in range(count)], times)
    given_to, _ = in_turn([*replicas, loaded("f")], 2 * (count + 1), begin=times + 1)
    assert given_to.count("f") == 2
    if times >= count:
        assert given_to[0] == "f"


def test_a_closed_replica_loses_its_turn() -> None:
    full = replace(loaded("e0", 4), max_requests=4)
    lost = replace(loaded("e1"), state=InstanceState.LOST)
    assert RoundRobinRouter().route(request("a"), fleet_of([full, lost, loaded("e2")])) == "e2"
    assert RoundRobinRouter().route(request("a"), fleet_of([full, lost])) is None
