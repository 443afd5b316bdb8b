"""Which requests move where, and what no plan of moves ever does."""

from collections import Counter
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hotswap import FleetView, InstanceId, InstanceState, InstanceView, RequestId
from hotswap.abc import Migrate
from hotswap.errors import ConfigError
from hotswap.policies import Freeness, VirtualUsageRescheduler
from hotswap.policies.schedulers.rescheduler import arrived, left
from tests.policies.loads import Cluster, blocks_of, clusters, fleet_of, loaded, moves, running, terminating

RULE = VirtualUsageRescheduler()
ARTIFACT = VirtualUsageRescheduler(Freeness("artifact"), guard=False)

rules = st.builds(
    VirtualUsageRescheduler,
    st.builds(
        Freeness, st.sampled_from(["paper", "artifact"]), target_tokens=st.sampled_from([None, 0, 160, 1600])
    ),
    low=st.sampled_from([-1.0, 1.0, 3.0]),
    high=st.sampled_from([3.0, 8.0]),
    guard=st.booleans(),
)


def crowded(name: str, **facts: Any) -> InstanceView:
    """Freeness 1 where nothing else is said."""
    return loaded(name, 10, **({"free": 10} | facts))


def roomy(name: str, **facts: Any) -> InstanceView:
    """Freeness 8 where nothing else is said."""
    return loaded(name, 10, **({"free": 80} | facts))


# ------------------------------------------------------------------ sources and destinations


def test_a_request_moves_from_below_the_threshold_to_above_it() -> None:
    view = fleet_of([crowded("e0"), roomy("e1")], [running("r0", "e0"), running("r1", "e1")])
    (move,) = RULE.plan(view)
    assert moves([move]) == [("r0", "e1")]
    assert move.reason == "F(e0)=1, F(e1)=8"


@pytest.mark.parametrize(
    ("free", "source", "destination"), [(29, True, False), (30, False, False), (31, False, True)]
)
def test_at_the_threshold_an_instance_is_neither(free: int, source: bool, destination: bool) -> None:
    at = loaded("e0", 10, free=free)
    assert bool(RULE.plan(fleet_of([at, roomy("e1")], [running("r", "e0")]))) is source
    assert bool(RULE.plan(fleet_of([crowded("e1"), at], [running("r", "e1")]))) is destination


def test_between_two_thresholds_an_instance_is_neither() -> None:
    rule = VirtualUsageRescheduler(low=2, high=6)
    between = loaded("e2", 10, free=40)
    requests = [running("r0", "e0"), running("r2", "e2")]
    assert moves(rule.plan(fleet_of([crowded("e0"), between], requests))) == []
    assert moves(rule.plan(fleet_of([between, roomy("e1")], requests))) == []
    assert moves(rule.plan(fleet_of([crowded("e0"), between, roomy("e1")], requests))) == [("r0", "e1")]


def test_the_least_free_is_paired_with_the_freest_and_so_on() -> None:
    instances = [
        crowded("e0", free=20),
        crowded("e1", free=5),
        crowded("e2", free=10),
        roomy("e3", free=60),
        roomy("e4", free=90),
    ]
    requests = [running(f"r{n}", f"e{n}") for n in range(5)]
    assert moves(RULE.plan(fleet_of(instances, requests))) == [("r1", "e4"), ("r2", "e3")]


def test_ties_go_to_the_smaller_id_in_whatever_order_the_view_lists_them() -> None:
    instances = [crowded("e0"), crowded("e1"), roomy("e2"), roomy("e3")]
    requests = [running("r0", "e0"), running("r1", "e1")]
    expected = [("r0", "e2"), ("r1", "e3")]
    assert moves(RULE.plan(fleet_of(instances, requests))) == expected
    assert moves(RULE.plan(fleet_of(instances[::-1], requests[::-1]))) == expected


def test_an_instance_takes_part_in_one_move_at_a_time() -> None:
    requests = [running("r0", "e0", 200), running("r1", "e0")]
    fleets = [
        fleet_of([crowded("e0", moves=1), roomy("e1")], requests),
        fleet_of([crowded("e0"), roomy("e1", moves=1)], requests),
        fleet_of([crowded("e0"), roomy("e1")], [replace(requests[0], moving=True), requests[1]]),
    ]
    assert [moves(RULE.plan(view)) for view in fleets] == [[], [], []]
    spare = fleet_of([crowded("e0"), roomy("e1", moves=1), roomy("e2", free=60)], requests)
    assert moves(RULE.plan(spare)) == [("r1", "e2")]  # no pair without a request to move


def test_a_queue_without_room_makes_a_source() -> None:
    blocked = loaded("e0", 6, free=40, waiting=1, next_blocks=45)
    view = fleet_of([blocked, roomy("e1")], [running("q", "e0", 700, begun=False), running("r", "e0")])
    assert moves(RULE.plan(view)) == [("r", "e1")]
    assert (
        moves(RULE.plan(fleet_of([replace(blocked, num_next_kv_blocks=20), roomy("e1")], view.running))) == []
    )


def test_headroom_is_made_for_a_request_of_high_priority() -> None:
    held = loaded("e0", 10, free=300, total=500, high=1)
    requests = [running("high", "e0", 100, priority=1), running("low", "e0", 300), running("next", "e0", 200)]
    view = fleet_of([held, loaded("e1", 10, free=300, total=500)], requests)
    assert moves(RULE.plan(view)) == [("next", "e1")]
    assert moves(VirtualUsageRescheduler(Freeness(target_tokens=None)).plan(view)) == []


# ------------------------------------------------------------------ which request


def test_the_paper_moves_the_lowest_priority_and_then_the_shortest() -> None:
    requests = [
        running("a", "e0", 20, priority=1, arrived_s=1),
        running("b", "e0", 90, arrived_s=2),
        running("c", "e0", 80, arrived_s=3),
        running("d", "e0", 10, arrived_s=4, begun=False),
    ]
    view = fleet_of([crowded("e0"), roomy("e1")], requests)
    assert moves(RULE.plan(view)) == [("c", "e1")]
    assert moves(RULE.plan(replace(view, running=tuple(requests[:1])))) == [("a", "e1")]


def test_the_artifact_moves_the_latest_request_of_normal_priority() -> None:
    requests = [
        running("a", "e0", 20, arrived_s=1),
        running("b", "e0", 90, arrived_s=2),
        running("c", "e0", 80, priority=1, arrived_s=3),
        running("d", "e0", 10, arrived_s=4, begun=False),
    ]
    view = fleet_of([crowded("e0"), roomy("e1")], requests)
    assert moves(ARTIFACT.plan(view)) == [("b", "e1")]
    assert moves(ARTIFACT.plan(replace(view, running=tuple(requests[2:])))) == []


def test_the_artifact_takes_an_instance_that_preempts_for_a_source_and_never_for_a_destination() -> None:
    preempting = loaded("e0", 3, free=60, waiting=1, next_blocks=4, prefill=64, preempted=("r2",))
    requests = [running(f"r{n}", "e0", arrived_s=n) for n in range(3)]
    view = fleet_of([preempting, roomy("e1")], requests)
    assert moves(ARTIFACT.plan(view)) == [("r1", "e1")]  # r2 came last, and has nothing to move
    assert moves(RULE.plan(view)) == []
    other = fleet_of([crowded("e2"), preempting], [*requests, running("r", "e2")])
    assert moves(ARTIFACT.plan(other)) == []
    assert moves(RULE.plan(other)) == [("r", "e0")]


def test_a_request_that_does_not_fit_gives_way_to_one_that_does() -> None:
    tight = loaded("e1", 5, total=30, free=25)
    requests = [running("a", "e0", 16 * 25, arrived_s=2), running("b", "e0", 16 * 20 - 1, arrived_s=1)]
    view = fleet_of([crowded("e0"), tight], requests)
    assert moves(ARTIFACT.plan(view)) == [("b", "e1")]
    beyond = [replace(requests[1], num_remaining=400)]  # 719 tokens will not fit in 30 blocks
    assert moves(ARTIFACT.plan(replace(view, running=tuple(beyond)))) == []


def test_requests_with_blocks_move_by_the_given_method() -> None:
    view = fleet_of([crowded("e0"), roomy("e1")], [running("r", "e0")])
    assert [move.method for move in RULE.plan(view) if isinstance(move, Migrate)] == [None]
    by_blocks = replace(RULE, method="kv")
    assert [move.method for move in by_blocks.plan(view) if isinstance(move, Migrate)] == ["kv"]
    leaving = fleet_of([terminating(crowded("e0")), roomy("e1")], [running("r", "e0", begun=False)])
    assert [move.method for move in by_blocks.plan(leaving) if isinstance(move, Migrate)] == ["tokens"]


def test_what_waits_at_a_destination_and_what_is_kept_free_there_is_not_given_away() -> None:
    rule = VirtualUsageRescheduler(guard=False)
    queue = loaded("e1", 2, free=50, waiting=1, next_blocks=45, prefill=720)
    for tokens, fits in ((16 * 5 - 1, True), (16 * 5, False)):
        view = fleet_of([crowded("e0"), queue], [running("r", "e0", tokens)])
        assert bool(rule.plan(view)) is fits
    short = loaded("e1", 2, free=80, waiting=1, next_blocks=5, prefill=80)
    view = fleet_of([crowded("e0"), short], [running("r", "e0")])
    assert moves(RULE.plan(view)) == [("r", "e1")]
    assert moves(ARTIFACT.plan(view)) == []  # an instance with a waiting request is no destination
    calm = loaded("e1", 2, free=40)
    for tokens, fits in ((16 * 39 - 1, True), (16 * 39, False)):
        view = fleet_of([crowded("e0"), calm], [running("r", "e0", tokens)])
        assert bool(ARTIFACT.plan(view)) is fits
        assert bool(rule.plan(view))


def test_the_guard_leaves_pain_where_it_is() -> None:
    requests = [running("long", "e0", 16 * 60)]
    view = fleet_of([crowded("e0", total=200), loaded("e1", 10, free=62)], requests)
    assert moves(RULE.plan(view)) == []  # one block would be left for eleven
    assert moves(replace(RULE, guard=False).plan(view)) == [("long", "e1")]


# ------------------------------------------------------------------ terminating


def test_a_terminating_instance_drains_by_moves_of_any_request() -> None:
    leaving = terminating(loaded("e0", 2))
    requests = [running("a", "e0", 40, priority=2), running("b", "e0", 20, priority=1, begun=False)]
    for rule, first in ((RULE, "b"), (ARTIFACT, "a")):
        view = fleet_of([leaving, roomy("e1")], requests)
        assert moves(rule.plan(view)) == [(first, "e1")]
    assert moves(RULE.plan(fleet_of([leaving, loaded("e1", 10, free=20)], requests))) == []


def test_what_waits_on_a_terminating_instance_leaves_as_tokens() -> None:
    leaving = terminating(loaded("e0", 3, free=60, waiting=2, next_blocks=4, preempted=("set back",)))
    for request, method in (
        (running("runs", "e0"), None),
        (running("queued", "e0", begun=False), "tokens"),
        (running("set back", "e0"), "tokens"),
    ):
        (move,) = RULE.plan(fleet_of([leaving, roomy("e1")], [request]))
        assert isinstance(move, Migrate)
        assert (move.request, move.method) == (request.id, method)


def test_no_request_moves_to_an_instance_that_is_not_open() -> None:
    requests = [running("r", "e0")]
    full = replace(roomy("e1"), max_requests=10)
    lost = replace(roomy("e1"), state=InstanceState.LOST)
    for closed in (full, lost, terminating(roomy("e1")), replace(roomy("e1"), draining=True)):
        assert moves(RULE.plan(fleet_of([crowded("e0"), closed], requests))) == []


# ------------------------------------------------------------------ every fleet


@given(clusters(priorities=1), rules)
def test_a_move_goes_to_another_open_instance_of_the_model_that_has_the_blocks(
    cluster: Cluster, rule: VirtualUsageRescheduler
) -> None:
    view = cluster.view()
    plan = rule.plan(view)
    requests = {request.id: request for request in view.running}
    part: Counter[str] = Counter()
    for request, to in moves(plan):
        moved, destination = requests[request], view.instance(to)
        source = view.instance(moved.instance)
        assert source.id != destination.id
        assert source.model == destination.model == moved.model
        assert destination.open
        assert blocks_of(moved) <= destination.num_free_kv_blocks - destination.num_next_kv_blocks
        part.update((source.id, destination.id))
    assert max(part.values(), default=1) == 1


@given(clusters(priorities=1), rules)
def test_a_plan_does_not_depend_on_the_order_of_the_view(
    cluster: Cluster, rule: VirtualUsageRescheduler
) -> None:
    view = cluster.view()
    reversed_view = replace(view, instances=view.instances[::-1], running=view.running[::-1])
    assert rule.plan(reversed_view) == rule.plan(view)


@given(clusters(models="a"), st.integers(2, 5), rules)
def test_nothing_moves_between_equals(cluster: Cluster, count: int, rule: VirtualUsageRescheduler) -> None:
    first = cluster.view().instances[0]
    here = [request for request in cluster.requests if request.instance == first.id]
    assume(first.state is InstanceState.SERVING)
    twins = [replace(first, id=InstanceId(f"e{n}")) for n in range(count)]
    requests = [
        replace(r, id=RequestId(f"{r.id}/{n}"), instance=InstanceId(f"e{n}"))
        for n in range(count)
        for r in here
    ]
    assert rule.plan(FleetView(now_s=0.0, instances=tuple(twins), running=tuple(requests))) == ()


@given(clusters(models="a", priorities=1), rules)
def test_a_terminating_instance_is_a_source_while_another_is_idle(
    cluster: Cluster, rule: VirtualUsageRescheduler
) -> None:
    view = replace(cluster, pools={**cluster.pools, "idle": (60, "a")}).view()
    occupied = {request.instance for request in view.running} & cluster.leaving
    moved = {request for request, _ in moves(rule.plan(view))}
    assert occupied <= {request.instance for request in view.running if request.id in moved}


@given(clusters(models="a"))
def test_a_move_brings_the_pair_together(cluster: Cluster) -> None:
    """Where the source is not in debt, and does not become the freer of the two."""
    view = cluster.view()
    requests = {request.id: request for request in view.running}
    free = RULE.freeness.of
    for moved, to in moves(RULE.plan(view)):
        request = requests[moved]
        source, destination = view.instance(request.instance), view.instance(to)
        after, then = left(source, request), arrived(destination, request)
        if free(source) == -inf:
            continue
        assert free(then) > free(source) or free(then) < 0
        if free(source) >= 0 and free(after) <= free(then):
            assert abs(free(then) - free(after)) < abs(free(destination) - free(source))


@given(clusters(priorities=1))
def test_what_a_plan_predicts_is_what_the_next_view_shows(cluster: Cluster) -> None:
    view = cluster.view()
    plan = RULE.plan(view)
    after = cluster.after(plan).view()
    requests = {request.id: request for request in view.running}
    for moved, to in moves(plan):
        request = requests[moved]
        assert arrived(view.instance(to), request) == after.instance(to)
        assert left(view.instance(request.instance), request) == after.instance(request.instance)


@given(clusters(priorities=1), rules)
@settings(max_examples=200)
def test_under_a_steady_load_moving_ends(cluster: Cluster, rule: VirtualUsageRescheduler) -> None:
    rule = replace(rule, guard=True)
    for _ in range(100):
        plan = rule.plan(cluster.view())
        if not plan:
            return
        cluster = cluster.after(plan)
    pytest.fail(f"still moving: {moves(plan)}")


@pytest.mark.parametrize("values", [{"low": nan}, {"low": 4.0}, {"high": 2.0}, {"high": inf}, {"low": -inf}])
def test_senseless_thresholds_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^low is "):
        VirtualUsageRescheduler(**values)
