"""Schedulers made of schedulers: no instance is taken twice, and protected ones are planned round."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import pytest
from hypothesis import given

from hotswap import FleetView, InstanceId, ModelId, Request
from hotswap.abc import Action, Prefetch, Router, Scheduler, Swap, Unload
from hotswap.errors import ConfigError
from hotswap.policies import (
    Chain,
    Cooldown,
    FirstOf,
    FirstOfRouters,
    KeepAsIs,
    LeastLoadedRouter,
    RestoreMinReplicas,
    WeightedLoadSwap,
    accepted,
    assume,
)
from tests.policies.views import empty, fleet, fleet_views, model, request, serving, swapping_to, swaps

RULE = WeightedLoadSwap(t1=8, t2=6, b=2.0, sigmas=0)


@dataclass(frozen=True)
class Says(Scheduler):
    """Always the same plan; keeps the views it was shown."""

    actions: tuple[Action, ...] = ()
    shown: list[FleetView] = field(default_factory=list)

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        self.shown.append(fleet)
        return self.actions


class NeverAsked(Scheduler, Router):
    def plan(self, fleet: FleetView) -> NoReturn:
        raise AssertionError("asked")

    def route(self, request: Request, fleet: FleetView) -> NoReturn:
        raise AssertionError("asked")


def to(instance: str, of: str) -> Swap:
    return Swap(instance=InstanceId(instance), model=ModelId(of))


TWO = fleet([serving("e0", "a"), serving("e1", "a")], [model("a"), model("b"), model("c")])


# ------------------------------------------------------------------ Chain


def test_plans_are_joined_and_the_first_claim_holds() -> None:
    prefetch = Prefetch(model=ModelId("c"))
    combined = Chain(Says((to("e0", "b"), prefetch)), Says((to("e0", "c"), to("e1", "c"))))
    assert combined.plan(TWO) == (to("e0", "b"), prefetch, to("e1", "c"))


def test_the_next_one_sees_what_was_decided() -> None:
    last = Says()
    Chain(Says((to("e0", "b"),)), Says((Unload(instance=InstanceId("e1")),)), last).plan(TWO)
    (seen,) = last.shown
    assert [i.id for i in seen.replicas(ModelId("b"))] == ["e0"]
    assert seen.replicas(ModelId("a")) == ()
    assert not any(i.free for i in seen.instances)


def test_two_schedulers_do_not_both_serve_one_need() -> None:
    view = fleet(
        [serving("e0", "b"), serving("e1", "b"), serving("e2", "b")],
        [model("a", 4, min_replicas=1), model("b")],
    )
    assert swaps(Chain(RestoreMinReplicas(), RULE, RULE).plan(view)) == swaps(RestoreMinReplicas().plan(view))


@given(fleet_views())
def test_every_action_of_a_chain_would_be_begun(view: FleetView) -> None:
    plan = Chain(RestoreMinReplicas(), WeightedLoadSwap(t1=1, t2=9, b=1.0, sigmas=0), RULE).plan(view)
    assert accepted(view, plan) == plan


@given(fleet_views())
def test_a_chain_of_one_is_that_one(view: FleetView) -> None:
    assert Chain(RULE).plan(view) == RULE.plan(view)


def test_a_chain_of_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"KeepAsIs\(\)"):
        Chain()


@given(fleet_views())
def test_keep_as_is_plans_nothing(view: FleetView) -> None:
    assert KeepAsIs().plan(view) == ()


# ------------------------------------------------------------------ FirstOf


def test_the_first_scheduler_that_wants_something_decides() -> None:
    assert FirstOf(Says(), Says((to("e0", "b"),)), NeverAsked()).plan(TWO) == (to("e0", "b"),)
    assert FirstOf(Says(), Says()).plan(TWO) == ()


def test_a_plan_that_would_be_dropped_whole_is_no_plan() -> None:
    assert FirstOf(Says((to("e0", "a"), to("gone", "b"))), Says((to("e1", "c"),))).plan(TWO) == (
        to("e1", "c"),
    )


@dataclass(frozen=True)
class SendsTo(Router):
    answer: str | None

    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        return InstanceId(self.answer) if self.answer else None


def test_the_first_router_with_an_answer_that_holds_decides() -> None:
    view = fleet([serving("e0", "a"), serving("e1", "b"), swapping_to("e2", "a")], [model("a"), model("b")])
    asked = request("a")
    assert FirstOfRouters(SendsTo(None), SendsTo("e0"), NeverAsked()).route(asked, view) == "e0"
    for useless in ("e1", "e2", "gone", None):
        assert FirstOfRouters(SendsTo(useless), LeastLoadedRouter()).route(asked, view) == "e0"
    assert FirstOfRouters(SendsTo("e1")).route(asked, view) is None


# ------------------------------------------------------------------ Cooldown


def test_an_instance_that_has_just_begun_is_left_alone() -> None:
    view = fleet([serving("e0", "a", since_s=95.0), serving("e1", "b")], [model("a"), model("b", 20)])
    assert swaps(Cooldown(RULE, 5.0).plan(view)) == [("e0", "b")]
    assert swaps(Cooldown(RULE, 5.1).plan(view)) == []


def test_the_plan_goes_round_a_cooling_instance() -> None:
    instances = [serving("e0", "a", since_s=99.0), serving("e1", "a", 5), serving("e2", "b")]
    view = fleet(instances, [model("a"), model("b", 20)])
    assert swaps(RULE.plan(view)) == [("e0", "b"), ("e1", "b")]
    assert swaps(Cooldown(RULE, 5.0).plan(view)) == [("e1", "b")]


def test_a_cooling_replica_still_counts() -> None:
    models = [model("a", min_replicas=1), model("b", 20)]
    view = fleet([serving("e0", "a", since_s=99.0), serving("e1", "a"), serving("e2", "b")], models)
    assert swaps(Cooldown(RULE, 5.0).plan(view)) == [("e1", "b")]


def test_an_empty_instance_never_cools_down() -> None:
    assert swaps(Cooldown(RULE, 1e9).plan(fleet([empty("e0")], [model("a", 1)]))) == [("e0", "a")]


def test_min_replicas_outside_do_not_wait() -> None:
    view = fleet([serving("e0", "b", since_s=99.0)], [model("a", min_replicas=1), model("b", 1)])
    assert swaps(Cooldown(RULE, 5.0).plan(view)) == []
    assert swaps(Chain(RestoreMinReplicas(), Cooldown(RULE, 5.0)).plan(view)) == [("e0", "a")]


@given(fleet_views())
def test_no_cooldown_changes_nothing_and_an_endless_one_uses_empty_instances_alone(view: FleetView) -> None:
    assert Cooldown(RULE, 0.0).plan(view) == RULE.plan(view)
    plan = Cooldown(RULE, float("inf")).plan(view)
    assert all(view.instance(a.instance).serving_since_s is None for a in plan if isinstance(a, Swap))


def test_a_senseless_cooldown_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^cooldown_s is -1"):
        Cooldown(RULE, -1)


def test_reprs_read_like_the_calls() -> None:
    combined = Chain(RestoreMinReplicas(), FirstOf(Cooldown(RestoreMinReplicas(deadline_s=1.0), 30)))
    assert repr(combined) == (
        "Chain(RestoreMinReplicas(deadline_s=0.0), "
        "FirstOf(Cooldown(scheduler=RestoreMinReplicas(deadline_s=1.0), cooldown_s=30)))"
    )


# ------------------------------------------------------------------ accepted and assume


def test_what_the_fleet_would_not_begin_is_dropped() -> None:
    cooling = replace(empty("e3"), cooling_down=(ModelId("b"),))
    view = fleet([serving("e0", "a"), empty("e1"), swapping_to("e2", "a"), cooling], [model("a"), model("b")])
    unload, prefetch = Unload(instance=InstanceId("e0")), Prefetch(model=ModelId("b"))
    assert accepted(view, [to("e0", "a"), to("e0", "z"), to("gone", "b"), to("e2", "b"), to("e3", "b")]) == ()
    assert accepted(view, [Unload(instance=InstanceId("e1")), unload, to("e0", "b")]) == (unload,)
    assert accepted(view, [prefetch, to("e1", "a"), to("e1", "b")]) == (prefetch, to("e1", "a"))


@given(fleet_views())
def test_assuming_nothing_changes_nothing(view: FleetView) -> None:
    assert assume(view, []) is view
    assert assume(view, [Prefetch(model=m.id) for m in view.models]) is view


@given(fleet_views())
def test_assumed_actions_move_replicas_and_nothing_else(view: FleetView) -> None:
    if not view.models:
        return
    wanted = [to(i.id, view.models[n % len(view.models)].id) for n, i in enumerate(view.instances)]
    begun = {a.instance: a.model for a in accepted(view, wanted) if isinstance(a, Swap)}
    after = assume(view, wanted)
    for old, new in zip(view.instances, after.instances, strict=True):
        changed = replace(old, swapping=True, target=begun[old.id]) if old.id in begun else old
        assert new == changed
        assert old.id not in begun or old.free
    assert accepted(after, [a for a in wanted if a.instance in begun]) == ()
