"""The decision table of `WeightedLoadSwap`, and what holds for every fleet."""

import gc
import random
import weakref
from dataclasses import replace
from itertools import count
from math import inf, nan
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hotswap import FleetView, InstanceId, InstanceState, ModelId, ModelView
from hotswap.abc import Swap
from hotswap.errors import ConfigError
from hotswap.policies import WeightedLoadSwap, accepted, assume
from hotswap.policies.schedulers.allocation import Allocation
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
    waiting,
)

RULE = WeightedLoadSwap(t1=8, t2=6, b=2.0, sigmas=0)

schedulers = st.builds(
    WeightedLoadSwap,
    t1=st.sampled_from([0, 1, 4, 8]),
    t2=st.sampled_from([1, 6, inf]),
    b=st.sampled_from([1.0, 1.5, 2.0, 8.0]),
    reading=st.sampled_from(["ratio", "margin"]),
    guard=st.booleans(),
    patience_s=st.sampled_from([None, 0.0, 10.0]),
    max_swaps=st.sampled_from([None, 1, 2]),
    sigmas=st.sampled_from([0.0, 1.0, 3.0]),
    min_residency_s=st.sampled_from([0.0, 20.0]),
)


def loads(view: FleetView) -> dict[str, float]:
    allocation = Allocation(view)
    return {m.id: allocation.load(m) for m in view.models}


# ------------------------------------------------------------------ f


def test_load_is_weighted_work_per_replica() -> None:
    view = fleet(
        [serving("e0", "a"), serving("e1", "a"), serving("e2", "b")],
        [model("a", 6), model("b", 6, w=3.0), model("c", 1), model("d", 0)],
    )
    assert loads(view) == {"a": 3.0, "b": 18.0, "c": inf, "d": 0.0}


@given(fleet_views())
def test_replicas_are_those_of_the_view(view: FleetView) -> None:
    allocation = Allocation(view)
    assert [allocation.num_replicas(m) for m in view.models] == [
        len(view.replicas(m.id)) for m in view.models
    ]


def test_nothing_is_left_of_a_plan_that_was_made() -> None:
    replicas = [serving("e0", "a"), serving("e1", "a"), serving("e2", "b")]
    view = fleet(replicas, [model("a", 6), model("b", 60)])
    gc.disable()
    try:
        allocation = Allocation(view)
        assert allocation.overloaded(8)
        assert allocation.best_donor(view.model(ModelId("b")))
        assert not allocation.below_min_replicas()
        allocation.swap(Swap(instance=InstanceId("e0"), model=ModelId("b")))
        left = weakref.ref(allocation)
        del allocation
        assert left() is None  # at once: of thousands of instances it holds all
    finally:
        gc.enable()


# ------------------------------------------------------------------ t1, b, t2: one instance each, two models


@pytest.mark.parametrize(
    ("p1", "p2", "replicas2", "fires"),
    [
        (8, 0, 2, False),  # f(m1) = t1: not over it
        (9, 0, 2, True),
        (9, 9, 2, False),  # ratio: 9 = 2 * 4.5
        (10, 9, 2, True),  # ratio: 10 > 2 * 4.5, and afterwards 5 against 9 but for the guard
        (100, 12, 2, False),  # f(m2) = 6 = t2
        (100, 11, 2, True),  # f(m2) = 5.5 < t2
        (100, 6, 1, False),  # f(m2) = t2, with the last replica
    ],
)
def test_thresholds_as_a_ratio(p1: int, p2: int, replicas2: int, fires: bool) -> None:
    view = fleet(
        [serving("e0", "a"), *(serving(f"e{n + 1}", "b") for n in range(replicas2))],
        [model("a", p1), model("b", p2)],
    )
    plan = replace(RULE, guard=False, max_swaps=1).plan(view)
    assert swaps(plan) == ([("e1", "a")] if fires else [])


@pytest.mark.parametrize(("p1", "b", "fires"), [(14, 10, False), (15, 10, True), (9, 5, False), (9, 4, True)])
def test_thresholds_as_a_margin(p1: int, b: float, fires: bool) -> None:
    view = fleet(
        [serving("e0", "a"), serving("e1", "b"), serving("e2", "b")], [model("a", p1), model("b", 8)]
    )
    rule = WeightedLoadSwap(t1=8, t2=6, b=b, reading="margin", guard=False, max_swaps=1, sigmas=0)
    assert bool(rule.plan(view)) is fires


def test_the_readings_differ() -> None:
    # f = 12 and 5: the factor is 2.4, the difference 7.
    view = fleet(
        [serving("e0", "a"), *(serving(f"e{n}", "b") for n in range(1, 5))], [model("a", 12), model("b", 20)]
    )
    assert swaps(WeightedLoadSwap(t1=8, t2=6, b=2.4, sigmas=0).plan(view)) == []
    assert swaps(WeightedLoadSwap(t1=8, t2=6, b=2.3, guard=False, max_swaps=1, sigmas=0).plan(view)) == [
        ("e1", "a")
    ]
    assert swaps(WeightedLoadSwap(t1=8, t2=6, b=7, reading="margin", sigmas=0).plan(view)) == []
    margin = WeightedLoadSwap(t1=8, t2=6, b=6.9, reading="margin", guard=False, max_swaps=1, sigmas=0)
    assert swaps(margin.plan(view)) == [("e1", "a")]


# ------------------------------------------------------------------ m1


def test_m1_is_the_most_loaded_model() -> None:
    view = fleet(
        [serving("e0", "a"), serving("e1", "b"), serving("e2", "c")],
        [model("a", 20), model("b", 30), model("c")],
    )
    assert swaps(RULE.plan(view)) == [("e2", "b")]


def test_the_weight_decides_between_equal_workloads() -> None:
    view = fleet(
        [serving("e0", "a"), serving("e1", "b"), serving("e2", "c")],
        [model("a", 20), model("b", 20, w=3.0), model("c")],
    )
    assert swaps(RULE.plan(view)) == [("e2", "b")]


def test_a_model_without_replica_and_with_work_comes_first() -> None:
    view = fleet([serving("e0", "a"), serving("e1", "c")], [model("a", 900), model("b", 1), model("c")])
    assert swaps(RULE.plan(view)) == [("e1", "b")]


def test_a_model_without_replica_and_without_work_gets_none() -> None:
    view = fleet([serving("e0", "a"), empty("e1")], [model("a", 1), model("b")])
    assert swaps(RULE.plan(view)) == []


def test_ties_of_m1_go_to_the_longer_wait_then_more_work_then_the_smaller_id() -> None:
    instances = [serving("e0", "d")]
    rest = [model("d")]
    tied = [model("c", 3), model("b", 3), model("a", 2)]
    assert swaps(RULE.plan(fleet(instances, tied + rest))) == [("e0", "b")]
    waits = [waiting("c", 99.5), waiting("c", 98.0), waiting("a", 97.0), waiting("b", 99.0)]
    assert swaps(RULE.plan(fleet(instances, tied + rest, waiting=waits))) == [("e0", "a")]


def test_a_failing_model_falls_behind_in_a_tie_but_is_not_forgotten() -> None:
    models = [model("a", 1, failed=3), model("b", 1), model("c")]
    both = fleet([serving("e0", "c")], models, waiting=[waiting("a", 92.0), waiting("b", 98.0)])
    assert swaps(RULE.plan(both)) == [("e0", "b")]  # 8 s halved three times against 2 s
    longer = replace(both, waiting=(waiting("a", 80.0), waiting("b", 98.0)))
    assert swaps(RULE.plan(longer)) == [("e0", "a")]


def test_an_m1_that_finds_no_m2_gives_way() -> None:
    models = [model("a", 5, weight=100), model("b", 40), model("c")]
    view = fleet([serving("e0", "b", memory=10), serving("e1", "c", memory=10)], models)
    assert swaps(RULE.plan(view)) == [("e1", "b")]


# ------------------------------------------------------------------ m2


def test_m2_is_the_least_loaded_model() -> None:
    view = fleet(
        [serving("e0", "a"), serving("e1", "b"), serving("e2", "b"), serving("e3", "c"), serving("e4", "c")],
        [model("a", 40), model("b", 4), model("c", 2)],
    )
    assert swaps(replace(RULE, max_swaps=1).plan(view)) == [("e3", "a")]


def test_m2_keeps_its_min_replicas() -> None:
    instances = [serving("e0", "a"), serving("e1", "b"), serving("e2", "c")]
    assert (
        swaps(
            RULE.plan(
                fleet(instances, [model("a", 40), model("b", min_replicas=1), model("c", 1, min_replicas=1)])
            )
        )
        == []
    )
    assert swaps(RULE.plan(fleet(instances, [model("a", 40), model("b", min_replicas=1), model("c")]))) == [
        ("e2", "a")
    ]


def test_the_only_model_takes_nothing_from_itself() -> None:
    assert swaps(RULE.plan(fleet([serving("e0", "a"), serving("e1", "a")], [model("a", 900)]))) == []


def test_nothing_moves_when_all_are_above_t2() -> None:
    view = fleet([serving(f"e{n}", "ab"[n % 2]) for n in range(8)], [model("a", 4000), model("b", 24)])
    assert swaps(RULE.plan(view)) == []


def test_an_idle_model_gives_up_its_last_replica() -> None:
    view = fleet([serving("e0", "a")], [model("a"), model("b", 1)])
    assert swaps(RULE.plan(view)) == [("e0", "b")]


def test_ties_of_m2_go_to_the_one_whose_load_rises_less_then_the_smaller_id() -> None:
    instances = [serving("e0", "a"), serving("e1", "b"), serving("e2", "b")]
    more = [serving(f"e{n}", "c") for n in range(3, 7)]
    view = fleet(instances + more, [model("a", 90), model("b", 2), model("c", 4)])
    assert swaps(replace(RULE, max_swaps=1).plan(view)) == [("e3", "a")]
    idle = fleet(
        [serving("e0", "a"), serving("e2", "b"), serving("e1", "c")], [model("a", 90), model("b"), model("c")]
    )
    assert swaps(replace(RULE, max_swaps=1).plan(idle)) == [("e2", "a")]


def test_a_model_whose_replicas_are_all_turning_cannot_be_m2() -> None:
    view = fleet(
        [serving("e0", "a"), swapping_to("e1", "b"), serving("e2", "c"), serving("e3", "c")],
        [model("a", 40), model("b"), model("c", 2)],
    )
    assert swaps(RULE.plan(view)) == [("e2", "a")]


# ------------------------------------------------------------------ which instance


def test_an_empty_instance_is_used_before_a_request_is_evicted() -> None:
    view = fleet([serving("e0", "a"), serving("e1", "b"), empty("e2")], [model("a", 10), model("b")])
    assert swaps(RULE.plan(view)) == [("e2", "a")]


def test_an_empty_instance_asks_neither_b_nor_t2_nor_the_guard() -> None:
    view = fleet([serving("e0", "a"), serving("e1", "b"), empty("e2")], [model("a", 50), model("b", 50)])
    assert swaps(RULE.plan(view)) == [("e2", "a")]


def test_an_empty_instance_stays_empty_below_t1() -> None:
    assert swaps(RULE.plan(fleet([serving("e0", "a"), empty("e1")], [model("a", 8)]))) == []


def test_the_smallest_empty_instance_that_holds_the_model_is_taken() -> None:
    view = fleet(
        [empty("e0", memory=80), empty("e1", memory=40), empty("e2", memory=10)], [model("a", 1, weight=20)]
    )
    assert swaps(RULE.plan(view)) == [("e1", "a")]


def test_of_m2s_replicas_the_preloaded_then_the_idlest_goes() -> None:
    models = [model("a", 1), model("b", 6)]
    idlest = fleet([serving("e0", "b", 3), serving("e1", "b", 1), serving("e2", "b", 2)], models)
    assert swaps(RULE.plan(idlest)) == [("e1", "a")]
    preloaded = fleet(
        [serving("e0", "b", 3, preloaded="a"), serving("e1", "b", 1), serving("e2", "b", 2, preloaded="b")],
        models,
    )
    assert swaps(RULE.plan(preloaded)) == [("e0", "a")]


def test_a_model_that_is_loading_is_not_loaded_twice() -> None:
    models = [model("a", 5, waiting=5), model("b"), model("c")]
    assert swaps(RULE.plan(fleet([swapping_to("e0", "a"), serving("e1", "b"), empty("e2")], models))) == []
    assert swaps(RULE.plan(fleet([swapping_to("e0", "a", of="c"), serving("e1", "b")], models))) == []


def test_the_deadline_is_for_evicted_requests() -> None:
    rule = replace(RULE, deadline_s=3.0)
    view = fleet([serving("e0", "b"), empty("e1")], [model("a", 1), model("b"), model("c", 1)])
    assert [(a.instance, a.deadline_s) for a in rule.plan(view) if isinstance(a, Swap)] == [
        ("e1", 0.0),
        ("e0", 3.0),
    ]


def test_a_plan_says_why() -> None:
    view = fleet([serving("e0", "a"), serving("e1", "b")], [model("a", 12), model("b")])
    (swap,) = RULE.plan(view)
    assert swap.reason == "f(a)=12 > t1=8; f(b)=0 is least"


# ------------------------------------------------------------------ loads that fail


def test_a_model_goes_elsewhere_than_where_it_has_just_failed() -> None:
    models = [model("a", 5, failed=1), model("b"), model("c")]
    cooling = replace(empty("e0"), cooling_down=(models[0].id,))
    assert swaps(RULE.plan(fleet([cooling, serving("e1", "b"), serving("e2", "c")], models))) == [("e1", "a")]
    assert swaps(RULE.plan(fleet([cooling, serving("e1", "b"), empty("e2")], models))) == [("e2", "a")]


def test_a_model_that_fails_again_takes_no_replica_while_it_cools_down() -> None:
    models = [model("a", 5, failed=2, min_replicas=1), model("b"), model("c")]
    cooling = replace(serving("e0", "b"), cooling_down=(models[0].id,))
    assert swaps(RULE.plan(fleet([cooling, serving("e1", "b"), serving("e2", "c")], models))) == []
    assert swaps(RULE.plan(fleet([cooling, serving("e1", "b"), empty("e2")], models))) == [("e2", "a")]
    rested = fleet([serving("e0", "b"), serving("e1", "b"), serving("e2", "c")], models)
    assert swaps(RULE.plan(rested)) == [("e0", "a")]


# ------------------------------------------------------------------ min_replicas


def test_min_replicas_are_restored_before_any_load_is_moved() -> None:
    view = fleet(
        [serving("e0", "a"), serving("e1", "c")], [model("a", 40), model("b", min_replicas=1), model("c", 1)]
    )
    assert swaps(RULE.plan(view))[0] == ("e1", "b")


# ------------------------------------------------------------------ guard


def test_the_guard_stops_a_swap_that_would_be_taken_back() -> None:
    view = fleet(
        [serving("e0", "a"), serving("e1", "b"), serving("e2", "b")], [model("a", 10), model("b", 8)]
    )
    unguarded = replace(RULE, guard=False, max_swaps=1)
    there = served(began(view, unguarded.plan(view)))
    assert loads(there) == {"a": 5.0, "b": 8.0}
    assert swaps(RULE.plan(view)) == []


def test_equal_loads_afterwards_pass_the_guard() -> None:
    view = fleet(
        [serving("e0", "a"), serving("e1", "b"), serving("e2", "b")], [model("a", 10), model("b", 5)]
    )
    assert swaps(RULE.plan(view)) == [("e1", "a")]


def test_the_guard_keeps_the_last_replica_of_a_model_with_work() -> None:
    view = fleet([serving("e0", "a"), serving("e1", "b")], [model("a", 90), model("b", 1)])
    assert swaps(RULE.plan(view)) == []
    assert swaps(replace(RULE, guard=False, max_swaps=1).plan(view)) == [("e1", "a")]


def test_a_guarded_model_is_passed_over_for_the_next_least_loaded() -> None:
    instances = [serving("e0", "a"), serving("e1", "b"), *(serving(f"e{n}", "c") for n in range(2, 6))]
    view = fleet(instances, [model("a", 40), model("b", 1), model("c", 8)])
    assert swaps(replace(RULE, max_swaps=1).plan(view)) == [("e2", "a")]


def test_a_model_without_replica_may_take_one_of_several() -> None:
    # Two requests against ten: afterwards f(b) = 10 exceeds f(a) = 2, but a had nothing.
    view = fleet([serving("e0", "b"), serving("e1", "b")], [model("a", 2), model("b", 10)])
    assert swaps(RULE.plan(view)) == [("e0", "a")]


# ------------------------------------------------------------------ patience


def oversubscribed(since_s: float, served_since_s: float = 0.0, **min_replicas: int) -> FleetView:
    return fleet(
        [serving("e0", "b", since_s=served_since_s), serving("e1", "c", since_s=served_since_s)],
        [model("a", 1, waiting=1), model("b", 70), model("c", 80, min_replicas=min_replicas.get("c", 0))],
        waiting=[waiting("a", since_s)],
    )


def test_patience_overrides_t2_and_the_guard() -> None:
    assert swaps(RULE.plan(oversubscribed(since_s=96.1))) == []
    assert swaps(RULE.plan(oversubscribed(since_s=96.0))) == [("e0", "a")]


def test_no_patience_waits() -> None:
    assert swaps(replace(RULE, patience_s=None).plan(oversubscribed(since_s=0.0))) == []


def test_patience_takes_only_a_replica_that_had_its_turn() -> None:
    assert swaps(RULE.plan(oversubscribed(since_s=0.0, served_since_s=96.1))) == []


def test_patience_keeps_min_replicas() -> None:
    view = oversubscribed(since_s=0.0, c=1)
    kept = replace(
        view,
        models=(model("a", 1, waiting=1), model("b", 70, min_replicas=1), model("c", 80, min_replicas=1)),
    )
    assert swaps(RULE.plan(view)) == [("e0", "a")]
    assert swaps(RULE.plan(kept)) == []


def test_patience_leaves_every_model_a_replica_if_it_can() -> None:
    view = fleet(
        [serving("e0", "b"), serving("e1", "c"), serving("e2", "c")],
        [model("a", 1, waiting=1), model("b", 70), model("c", 1000)],
        waiting=[waiting("a", 0.0)],
    )
    assert swaps(RULE.plan(view)) == [("e1", "a")]


@settings(max_examples=10)
@given(st.integers(1, 3), st.floats(0.0, 40.0))
def test_more_active_models_than_instances_are_served_in_turns(num_instances: int, load_s: float) -> None:
    """Every model with waiting requests gets a replica for at least `patience_s`, again and again."""
    names, rule, step_s = "abcde", replace(RULE, patience_s=10.0), 1.0
    view = fleet([empty(f"e{n}") for n in range(num_instances)], [model(m, 50) for m in names], now_s=0.0)
    last_evicted_s = dict.fromkeys(names, 0.0)
    done_s: dict[InstanceId, float] = {}
    served_s = {m: [0.0] for m in names}
    for now_s in (step_s * n for n in range(600)):
        ready = {i.id for i in view.instances if i.swapping and done_s[i.id] <= now_s}
        settled = served(replace(view, now_s=now_s))
        view = replace(
            view,
            now_s=now_s,
            instances=tuple(
                new if new.id in ready else old
                for old, new in zip(view.instances, settled.instances, strict=True)
            ),
        )
        running = {
            str(i.model) for i in view.instances if i.state is InstanceState.SERVING and not i.swapping
        }
        for m in names:
            if m in running:
                served_s[m][-1] += step_s
            elif served_s[m][-1]:
                served_s[m].append(0.0)
                last_evicted_s[m] = now_s
        waits = [waiting(m, last_evicted_s[m]) for m in names if m not in running]
        plan = rule.plan(replace(view, waiting=tuple(waits)))
        done_s |= {swap.instance: now_s + load_s for swap in plan if isinstance(swap, Swap)}
        view = began(view, plan)
    for turns in served_s.values():
        whole = turns[:-1]
        assert sum(turns) >= 10.0
        assert min(whole, default=10.0) >= 10.0


# ------------------------------------------------------------------ chance and residency


@pytest.mark.parametrize(("p1", "fires"), [(13, False), (14, True)])
def test_a_difference_that_chance_makes_is_no_reason(p1: int, fires: bool) -> None:
    """f(a) - f(b) = p1 - 6/2 deviates by sqrt(p1 + 6/4): 10 is 2.63 times 3.81, and 11 is 2.79 times 3.94."""
    view = fleet(
        [serving("e0", "a"), serving("e1", "b"), serving("e2", "b")], [model("a", p1), model("b", 6)]
    )
    rule = WeightedLoadSwap(t1=1, t2=50, b=1.5, sigmas=2.7)
    assert bool(rule.plan(view)) is fires
    assert replace(rule, sigmas=0).plan(view)


def test_sigmas_say_nothing_of_models_without_replica_or_of_empty_instances() -> None:
    rule = WeightedLoadSwap(t1=0, t2=50, b=1, sigmas=100)
    assert swaps(
        rule.plan(fleet([serving("e0", "a"), serving("e1", "a")], [model("a", 1), model("b", 1, waiting=1)]))
    )
    assert swaps(rule.plan(fleet([serving("e0", "a"), empty("e1")], [model("a", 9), model("b")])))


@pytest.mark.parametrize(("since_s", "fires"), [(-30.0, True), (-29.0, False)])
def test_a_replica_stays_for_its_least_residency(since_s: float, fires: bool) -> None:
    view = fleet(
        [serving("e0", "a"), serving("e1", "b", since_s=since_s), serving("e2", "b", since_s=since_s)],
        [model("a", 40), model("b", 2)],
    )
    view = replace(view, now_s=0.0)
    assert bool(WeightedLoadSwap(t1=1, t2=50, b=1.5, min_residency_s=30, sigmas=0).plan(view)) is fires


def test_min_replicas_do_not_wait_for_residency() -> None:
    view = fleet([serving("e0", "a"), serving("e1", "a")], [model("a", 2), model("b", 0, min_replicas=1)])
    assert swaps(WeightedLoadSwap(t1=1, t2=50, b=1.5, min_residency_s=1e9, sigmas=9).plan(view))


# ------------------------------------------------------------------ every fleet


@given(fleet_views())
def test_sigmas_only_ever_leave_swaps_out(view: FleetView) -> None:
    """The first swap of a plan with them is one that the plan without them would make too."""
    bare = WeightedLoadSwap(t1=1, t2=50, b=1.2, max_swaps=1, sigmas=0)
    if swaps(replace(bare, sigmas=3.0).plan(view)):
        assert swaps(bare.plan(view))


@given(schedulers, fleet_views())
def test_same_view_same_plan(rule: WeightedLoadSwap, view: FleetView) -> None:
    assert rule.plan(view) == replace(rule).plan(replace(view))


@given(schedulers, fleet_views(), st.randoms(use_true_random=False))
def test_the_order_of_the_view_does_not_matter(
    rule: WeightedLoadSwap, view: FleetView, rng: random.Random
) -> None:
    def shuffled(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(rng.sample(values, len(values)))

    other = replace(
        view,
        instances=shuffled(view.instances),
        models=shuffled(view.models),
        waiting=shuffled(view.waiting),
    )
    assert rule.plan(other) == rule.plan(view)


@given(schedulers, fleet_views())
def test_every_action_would_be_begun(rule: WeightedLoadSwap, view: FleetView) -> None:
    """At most one an instance, free ones only, never LOST or swapping, never a model too large for it."""
    plan = rule.plan(view)
    assert accepted(view, plan) == tuple(plan)
    for swap in plan:
        assert isinstance(swap, Swap)
        instance = view.instance(swap.instance)
        assert swap.model not in instance.cooling_down
        assert not instance.memory_bytes or view.model(swap.model).weight_bytes <= instance.memory_bytes


@given(schedulers, fleet_views())
def test_no_model_is_brought_below_its_min_replicas(rule: WeightedLoadSwap, view: FleetView) -> None:
    after = assume(view, rule.plan(view))
    for m in view.models:
        before = len(view.replicas(m.id))
        assert len(after.replicas(m.id)) >= min(before, m.min_replicas)


@given(schedulers, fleet_views())
def test_a_plan_is_the_one_swap_rule_repeated(rule: WeightedLoadSwap, view: FleetView) -> None:
    rule = replace(rule, max_swaps=None)
    plan, seen = list(rule.plan(view)), view
    for action in plan:
        step = replace(rule, max_swaps=1).plan(seen)
        assert step[0] == action
        seen = assume(seen, [action])
    assert not rule.plan(seen)


def allocations(view: FleetView) -> tuple[int, ...]:
    return tuple(len(view.replicas(m.id)) for m in view.models)


@given(schedulers, steady_fleets(), st.randoms(use_true_random=False))
def test_swapping_ends_under_a_steady_load(
    rule: WeightedLoadSwap, view: FleetView, rng: random.Random
) -> None:
    """No allocation comes back, in whichever order loads end, so there is no A to B to A."""
    rule = replace(rule, guard=True, patience_s=None)
    seen = {allocations(view)}
    for _ in count():
        plan = rule.plan(view)
        view = began(view, plan)
        if plan:
            assert allocations(view) not in seen
            seen.add(allocations(view))
        elif not any(i.swapping for i in view.instances):
            break
        done = {i.id for i in view.instances if i.swapping and rng.random() < 0.5}
        after = {i.id: i for i in served(view).instances}
        view = replace(view, instances=tuple(after[i.id] if i.id in done else i for i in view.instances))
    assert not rule.plan(view)


@given(schedulers, steady_fleets())
@example(
    WeightedLoadSwap(1, 1, 1.0, patience_s=0.0, sigmas=0),
    fleet([serving("e0", "a")], [model("a", 2), model("b", 1)]),
)
def test_more_instances_than_active_models_leave_none_without(
    rule: WeightedLoadSwap, view: FleetView
) -> None:
    """With patience, every model with work has a replica as soon as one plan has been carried out."""

    def needs(m: ModelView) -> int:
        return max(m.min_replicas, 1 if m.num_requests else 0)

    rule = replace(rule, guard=True, patience_s=4.0, max_swaps=None)
    models = tuple(replace(m, num_failed_loads=0) for m in view.models)
    waits = tuple(waiting(m.id, 0.0) for m in models if m.num_waiting)
    view = replace(view, models=models, waiting=waits)
    if sum(map(needs, models)) > len(view.instances):
        return
    after = assume(view, rule.plan(view))
    assert all(after.replicas(m.id) for m in models if m.num_waiting)


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"t1": -1}, "t1"),
        ({"t1": inf}, "t1"),
        ({"t1": nan}, "t1"),
        ({"t2": 0}, "t2"),
        ({"b": 0.9}, "b"),
        ({"b": inf}, "b"),
        ({"b": -1, "reading": "margin"}, "b"),
        ({"reading": "factor"}, "reading"),
        ({"patience_s": -1}, "patience_s"),
        ({"max_swaps": 0}, "max_swaps"),
        ({"sigmas": -1}, "sigmas"),
        ({"sigmas": inf}, "sigmas"),
        ({"min_residency_s": nan}, "min_residency_s"),
        ({"deadline_s": nan}, "deadline_s"),
    ],
)
def test_a_senseless_setting_is_refused_by_name(values: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} is "):
        WeightedLoadSwap(**{"t1": 8, "t2": 6, "b": 2, **values})


def test_repr_shows_the_settings_whose_defaults_are_those_measured_on_unseen_loads() -> None:
    assert repr(WeightedLoadSwap()) == (
        "WeightedLoadSwap(t1=16.0, t2=50.0, b=1.5, reading='ratio', guard=True, patience_s=4.0, "
        "sigmas=3.0, min_residency_s=0.0, max_swaps=None, deadline_s=0.0)"
    )
