"""The policies that are there to be beaten: pinned models, keep-alive, preemption, horizontal scaling."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import FleetView, InstanceView
from hotswap.abc import Action, Scheduler, Swap, Unload
from hotswap.errors import ConfigError
from hotswap.policies import (
    HorizontalAutoscaler,
    KeepAliveSwap,
    ShepherdSwap,
    StaticPinning,
    accepted,
    assume,
)
from tests.policies.views import (
    MODELS,
    empty,
    fleet,
    fleet_views,
    model,
    served,
    serving,
    swapping_to,
    swaps,
    waiting,
)


def unloads(actions: Iterable[Action]) -> list[str]:
    return [action.instance for action in actions if isinstance(action, Unload)]


def used(instance: InstanceView, last_s: float) -> InstanceView:
    return replace(instance, last_used_s=last_s)


# ------------------------------------------------------------------ StaticPinning


PINS = StaticPinning({"e0": "a", "e1": "b", "e2": "a"})


def test_each_instance_gets_the_model_that_it_is_pinned_to() -> None:
    view = fleet(
        [empty("e2"), empty("e0"), empty("e1"), empty("e9")], [model("a"), model("b"), model("c", 9)]
    )
    assert swaps(PINS.plan(view)) == [("e0", "a"), ("e1", "b"), ("e2", "a")]
    assert PINS.plan(served(assume(view, PINS.plan(view)))) == ()


def test_no_load_however_high_moves_a_pinned_model() -> None:
    view = fleet(
        [serving("e0", "a"), serving("e1", "b"), serving("e2", "a")],
        [model("a"), model("b", 900, waiting=800), model("c", 900, waiting=900)],
    )
    assert PINS.plan(view) == ()


def test_a_swap_by_hand_is_undone_unless_min_replicas_forbid_it() -> None:
    models = [model("a"), model("b"), model("c", 3)]
    view = fleet([serving("e0", "c", 3), serving("e1", "b"), serving("e2", "a")], models)
    plan = replace(PINS, deadline_s=2.0).plan(view)
    assert swaps(plan) == [("e0", "a")]
    assert [action.deadline_s for action in plan if isinstance(action, Swap)] == [2.0]
    assert PINS.plan(replace(view, models=(*models[:2], model("c", 3, min_replicas=1)))) == ()


def test_what_the_fleet_does_not_have_is_passed_over() -> None:
    assert StaticPinning({"gone": "a", "e0": "gone"}).plan(fleet([empty("e0")], [model("a", 1)])) == ()


def test_pins_are_those_of_the_time_at_which_they_were_given() -> None:
    pins = {"e0": "a"}
    rule = StaticPinning(pins)
    pins["e0"] = "b"
    assert swaps(rule.plan(fleet([empty("e0")], [model("a"), model("b")]))) == [("e0", "a")]


@given(fleet_views(), st.dictionaries(st.sampled_from([f"e{n}" for n in range(7)]), st.sampled_from(MODELS)))
def test_nothing_but_pins_is_ever_loaded(view: FleetView, pins: dict[str, str]) -> None:
    if pins:
        assert all(pins[instance] == name for instance, name in swaps(StaticPinning(pins).plan(view)))


# ------------------------------------------------------------------ KeepAliveSwap


KEEP = KeepAliveSwap(keep_alive_s=30.0)  # now is 100 s
ABSENT = [model("a", 1, waiting=1), model("b"), model("c"), model("d", 4)]


def test_an_absent_model_takes_an_empty_instance_first() -> None:
    view = fleet([used(serving("e0", "b"), 80.0), empty("e1", memory=80), empty("e2", memory=40)], ABSENT)
    assert swaps(KEEP.plan(view)) == [("e2", "a")]


def test_else_the_idle_instance_used_longest_ago() -> None:
    instances = [
        used(serving("e0", "b"), 90.0),
        used(serving("e1", "c", since_s=85.0), 10.0),  # loaded since, and not asked for yet
        used(serving("e2", "b", since_s=10.0), 80.0),
        used(serving("e3", "d", 4), 5.0),  # longest ago, but at work
    ]
    assert swaps(KEEP.plan(fleet(instances, ABSENT))) == [("e2", "a")]


def test_no_request_is_evicted() -> None:
    view = fleet([serving("e0", "d", 2), serving("e1", "d", 2)], ABSENT, waiting=[waiting("a", 0.0)])
    assert KEEP.plan(view) == ()


def test_a_model_with_a_replica_gets_no_second_one() -> None:
    many = [model("a", 900, waiting=800), model("b")]
    assert KEEP.plan(fleet([serving("e0", "a", 100), empty("e1")], many)) == ()
    assert KEEP.plan(fleet([swapping_to("e0", "a"), empty("e1")], many)) == ()


def test_what_was_idle_for_its_time_is_unloaded() -> None:
    instances = [
        used(serving("e0", "b"), 70.0),
        used(serving("e1", "c"), 70.1),
        used(serving("e2", "d", 4), 0.0),
    ]
    assert unloads(KEEP.plan(fleet(instances, ABSENT[1:]))) == ["e0"]
    assert KEEP.plan(fleet(instances, [model("b", min_replicas=1), *ABSENT[2:]])) == ()
    assert KEEP.plan(fleet(instances, [model("b", 1, waiting=1), *ABSENT[2:]])) == ()
    assert KeepAliveSwap(keep_alive_s=inf).plan(fleet(instances, ABSENT[1:])) == ()


def test_what_takes_the_place_of_an_idle_model_unloads_it_already() -> None:
    view = fleet([used(serving("e0", "b"), 10.0), used(serving("e1", "c"), 20.0)], ABSENT)
    plan = KEEP.plan(view)
    assert (swaps(plan), unloads(plan)) == ([("e0", "a")], ["e1"])


def test_the_longest_wait_is_served_first() -> None:
    models = [model("a", 1, waiting=1), model("b", 1, waiting=1), model("c")]
    view = fleet([serving("e0", "c")], models, waiting=[waiting("a", 99.0), waiting("b", 98.0)])
    assert swaps(KEEP.plan(view)) == [("e0", "b")]


@given(fleet_views(), st.sampled_from([0.0, 20.0, inf]))
def test_only_idle_instances_change(view: FleetView, keep_alive_s: float) -> None:
    for action in KeepAliveSwap(keep_alive_s=keep_alive_s).plan(view):
        assert isinstance(action, Swap | Unload)
        assert (
            view.instance(action.instance).num_requests == 0 or view.instance(action.instance).model is None
        )


# ------------------------------------------------------------------ ShepherdSwap


PREEMPT = ShepherdSwap(lambda_=3.0)


@pytest.mark.parametrize(("num_waiting", "running", "fires"), [(9, 3, False), (10, 3, True), (1, 0, True)])
def test_more_than_lambda_times_the_work_preempts(num_waiting: int, running: int, fires: bool) -> None:
    view = fleet(
        [serving("e0", "b", running)], [model("a", num_waiting, waiting=num_waiting), model("b", running)]
    )
    assert swaps(PREEMPT.plan(view)) == ([("e0", "a")] if fires else [])


def test_work_is_weighted() -> None:
    view = fleet([serving("e0", "b", 3)], [model("a", 4, waiting=4, w=3.0), model("b", 3)])
    assert swaps(PREEMPT.plan(view)) == [("e0", "a")]  # 12 against 3
    slow = fleet([serving("e0", "b", 3)], [model("a", 10, waiting=10), model("b", 3, w=2.0)])
    assert swaps(PREEMPT.plan(slow)) == []  # 10 against 6


def test_the_instance_with_the_least_work_is_taken() -> None:
    instances = [serving("e0", "b", 5), serving("e1", "b", 2), serving("e2", "c", 3)]
    models = [model("a", 90, waiting=90), model("b", 7), model("c", 3)]
    assert swaps(PREEMPT.plan(fleet(instances, models))) == [("e1", "a")]
    assert swaps(PREEMPT.plan(fleet([*instances, serving("e3", "c"), empty("e4")], models))) == [("e4", "a")]


def test_a_batch_is_no_larger_than_the_instance() -> None:
    view = fleet(
        [replace(serving("e0", "b", 3), max_requests=8)], [model("a", 90, waiting=90), model("b", 3)]
    )
    assert swaps(PREEMPT.plan(view)) == []  # 8 against 3, whichever other models wait


def test_only_what_no_place_takes_counts_as_waiting() -> None:
    there = replace(serving("e0", "a", 2), max_requests=4)
    models = [model("a", 9, waiting=7), model("b", 2)]
    assert swaps(PREEMPT.plan(fleet([there, serving("e1", "b", 2)], models))) == []  # 5 against 2
    coming = replace(swapping_to("e2", "a"), max_requests=4)
    assert swaps(PREEMPT.plan(fleet([there, coming, serving("e1", "b")], models))) == [("e1", "a")]  # 1
    assert swaps(PREEMPT.plan(fleet([there, replace(coming, max_requests=5), empty("e1")], models))) == []


def test_more_instances_are_taken_while_enough_is_left() -> None:
    instances = [replace(serving(f"e{n}", "b", 1), max_requests=4) for n in range(4)]
    view = fleet(instances, [model("a", 11, waiting=11), model("b", 4)])
    assert swaps(PREEMPT.plan(view)) == [
        ("e0", "a"),
        ("e1", "a"),
    ]  # 11, 7, and 3 are left: not over 3 times 1


def test_the_largest_work_goes_first() -> None:
    models = [model("a", 4, waiting=4), model("b", 9, waiting=9), model("c", 1)]
    assert swaps(PREEMPT.plan(fleet([serving("e0", "c", 1)], models))) == [("e0", "b")]


def test_what_was_preempted_does_not_preempt_at_once() -> None:
    """Three wait where ten run: they need to be more than thirty."""
    view = fleet([serving("e0", "a", 10)], [model("a", 10), model("b", 3, waiting=3)])
    assert PREEMPT.plan(view) == ()


def test_min_replicas_are_kept_and_deadlines_given() -> None:
    models = [model("a", 90, waiting=90), model("b", 1, min_replicas=1)]
    assert PREEMPT.plan(fleet([serving("e0", "b", 1)], models)) == ()
    (swap,) = replace(PREEMPT, deadline_s=4.0).plan(
        fleet([serving("e0", "b", 1)], [models[0], model("b", 1)])
    )
    assert isinstance(swap, Swap)
    assert swap.deadline_s == 4.0


# ------------------------------------------------------------------ all of them


BASELINES: list[Scheduler] = [
    StaticPinning({"e0": "a", "e1": "b", "e2": "c"}),
    KeepAliveSwap(keep_alive_s=20.0),
    ShepherdSwap(lambda_=1.0),
]


@pytest.mark.parametrize("rule", BASELINES, ids=repr)
def test_every_action_would_be_begun_whatever_the_order_of_the_view(rule: Scheduler) -> None:
    @given(fleet_views())
    def look(view: FleetView) -> None:
        plan = rule.plan(view)
        assert accepted(view, plan) == tuple(plan)
        for swap in (action for action in plan if isinstance(action, Swap)):
            instance = view.instance(swap.instance)
            assert swap.model not in instance.cooling_down
            fits = view.model(swap.model).weight_bytes <= instance.memory_bytes
            assert fits or not instance.memory_bytes
        other = replace(
            view,
            instances=view.instances[::-1],
            models=view.models[::-1],
            waiting=view.waiting[::-1],
        )
        assert rule.plan(other) == plan

    look()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: StaticPinning({}), "pins"),
        (lambda: StaticPinning({"e0": "a"}, deadline_s=nan), "deadline_s"),
        (lambda: KeepAliveSwap(keep_alive_s=-1.0), "keep_alive_s"),
        (lambda: ShepherdSwap(lambda_=0.5), "lambda_"),
        (lambda: ShepherdSwap(lambda_=inf), "lambda_"),
        (lambda: ShepherdSwap(deadline_s=-1.0), "deadline_s"),
    ],
)
def test_a_senseless_setting_is_refused_by_name(make: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} is "):
        make()


def test_settings_show_and_compare() -> None:
    assert repr(PINS) == "StaticPinning(pins={'e0': 'a', 'e1': 'b', 'e2': 'a'}, deadline_s=0.0)"
    assert StaticPinning({"e2": "a", "e1": "b", "e0": "a"}) == PINS
    assert hash(PINS) == hash(StaticPinning({"e2": "a", "e1": "b", "e0": "a"}))


# ------------------------------------------------------------------ HorizontalAutoscaler


HPA = HorizontalAutoscaler(target=10)


@pytest.mark.parametrize(("p", "more"), [(0, 0), (9, 0), (11, 0), (12, 1), (20, 1), (31, 3), (500, 3)])
def test_replicas_are_the_requests_over_the_target(p: int, more: int) -> None:
    """A metric within a tenth of its target changes nothing."""
    view = fleet([serving("e0", "a", min(p, 9)), *(empty(f"e{n}") for n in (1, 2, 3))], [model("a", p)])
    assert len(HPA.plan(view)) == more
    assert len(replace(HPA, max_replicas=2).plan(view)) == min(more, 1)


def test_a_model_without_a_replica_gets_one_for_its_first_request_and_none_before() -> None:
    view = fleet([empty("e0"), empty("e1")], [model("a", 1, waiting=1), model("b")])
    assert swaps(HPA.plan(view)) == [("e0", "a")]


def test_an_idle_replica_of_another_model_is_not_taken() -> None:
    view = fleet([serving("e0", "a", 9), serving("e1", "b")], [model("a", 90), model("b")], now_s=100.0)
    assert HPA.plan(view) == ()


def test_what_is_not_wanted_goes_when_it_has_been_idle_for_long_but_not_below_min_replicas() -> None:
    instances = [used(serving(f"e{n}", "a"), last_s=100.0 * n) for n in range(4)]
    view = fleet(instances, [model("a", min_replicas=2)], now_s=600.0)
    assert unloads(HPA.plan(view)) == ["e0", "e1"]
    assert unloads(HPA.plan(replace(view, models=(model("a"),)))) == ["e0", "e1", "e2", "e3"]
    busy = replace(view, models=(model("a", 37),))
    assert unloads(HPA.plan(busy)) == []
    assert unloads(HPA.plan(replace(view, now_s=350.0))) == ["e0"]


@pytest.mark.parametrize(
    "settings",
    [{"target": 0}, {"target": inf}, {"tolerance": -1}, {"max_replicas": 0}, {"stabilization_s": nan}],
)
def test_a_horizontal_autoscaler_that_makes_no_sense_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        HorizontalAutoscaler(**{"target": 10, **settings})
