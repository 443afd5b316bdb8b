"""`min_replicas` are restored as far as the fleet allows, with as few evictions as possible."""

from math import nan

import pytest
from hypothesis import given

from hotswap import FleetView, InstanceState, InstanceView
from hotswap.abc import Swap
from hotswap.errors import ConfigError
from hotswap.policies import RestoreMinReplicas, accepted, assume
from tests.policies.views import (
    began,
    empty,
    fleet,
    fleet_views,
    model,
    served,
    serving,
    steady_fleets,
    swapping_to,
    swaps,
)

RESTORE = RestoreMinReplicas()


def test_met_min_replicas_need_nothing() -> None:
    view = fleet(
        [serving("e0", "a"), swapping_to("e1", "a"), empty("e2")],
        [model("a", 99, min_replicas=2), model("b", 9)],
    )
    assert swaps(RESTORE.plan(view)) == []


def test_a_replica_that_swaps_away_does_not_count() -> None:
    view = fleet(
        [swapping_to("e0", "b", of="a"), serving("e1", "b")], [model("a", min_replicas=1), model("b")]
    )
    assert swaps(RESTORE.plan(view)) == [("e1", "a")]


def test_a_lost_replica_does_not_count_and_is_not_used() -> None:
    lost = InstanceView(id=serving("e0", "a").id, state=InstanceState.LOST)
    view = fleet([lost, serving("e1", "b")], [model("a", min_replicas=1), model("b", 50)])
    assert swaps(RESTORE.plan(view)) == [("e1", "a")]


def test_an_empty_instance_is_filled_before_a_request_is_evicted() -> None:
    rule = RestoreMinReplicas(deadline_s=2.0)
    view = fleet([serving("e0", "b"), empty("e1")], [model("a", min_replicas=2), model("b")])
    plan = rule.plan(view)
    assert swaps(plan) == [("e1", "a"), ("e0", "a")]
    assert [swap.deadline_s for swap in plan if isinstance(swap, Swap)] == [0.0, 2.0]
    assert [swap.reason for swap in plan if isinstance(swap, Swap)] == [
        "a has 0 of at least 2 replicas",
        "a has 1 of at least 2 replicas; b can spare one",
    ]


def test_the_least_loaded_model_above_its_min_replicas_gives() -> None:
    instances = [
        serving("e0", "b"),
        serving("e1", "c"),
        serving("e2", "c"),
        serving("e3", "d"),
        serving("e4", "d"),
    ]
    models = [model("a", min_replicas=1), model("b", min_replicas=1), model("c", 6), model("d", 4)]
    assert swaps(RESTORE.plan(fleet(instances, models))) == [("e3", "a")]


def test_a_model_keeps_a_replica_for_its_work_if_another_can_give() -> None:
    instances = [serving("e0", "b"), serving("e1", "c"), serving("e2", "c")]
    models = [model("a", min_replicas=1), model("b", 1), model("c", 90)]
    assert swaps(RESTORE.plan(fleet(instances, models))) == [("e1", "a")]
    assert swaps(RESTORE.plan(fleet(instances[:2], models))) == [("e0", "a")]


def test_models_are_served_in_turn_and_failing_ones_last() -> None:
    models = [model("a", min_replicas=2, failed=1), model("b", min_replicas=2), model("c", 1, min_replicas=1)]
    assert swaps(RESTORE.plan(fleet([empty(f"e{n}") for n in range(4)], models))) == [
        ("e0", "c"),
        ("e1", "b"),
        ("e2", "b"),
        ("e3", "a"),
    ]


def test_the_lowest_share_of_min_replicas_goes_first() -> None:
    models = [model("a", 50, min_replicas=2), model("b", min_replicas=2)]
    assert swaps(RESTORE.plan(fleet([empty("e0"), empty("e1")], models))) == [("e0", "a"), ("e1", "b")]


@given(fleet_views())
def test_every_action_would_be_begun_and_violates_no_other_min_replicas(view: FleetView) -> None:
    plan = RESTORE.plan(view)
    after = assume(view, plan)
    assert accepted(view, plan) == tuple(plan)
    for m in view.models:
        assert len(after.replicas(m.id)) >= min(len(view.replicas(m.id)), m.min_replicas)


@given(fleet_views())
def test_nothing_is_done_beyond_min_replicas(view: FleetView) -> None:
    assert all(
        len(assume(view, RESTORE.plan(view)).replicas(m.id)) <= max(len(view.replicas(m.id)), m.min_replicas)
        for m in view.models
    )


@given(steady_fleets())
def test_one_plan_restores_all_that_can_be_restored_and_the_next_does_nothing(view: FleetView) -> None:
    after = served(began(view, RESTORE.plan(view)))
    if sum(m.min_replicas for m in view.models) <= len(view.instances):
        assert all(len(after.replicas(m.id)) >= m.min_replicas for m in view.models)
    assert RESTORE.plan(after) == ()


def test_a_senseless_deadline_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^deadline_s is nan"):
        RestoreMinReplicas(deadline_s=nan)
