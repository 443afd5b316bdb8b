"""When instances come and go by freeness, which, and how fast."""

from collections import Counter
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import FleetView, InstanceView, ModelView
from hotswap.abc import Action, Unload
from hotswap.errors import ConfigError
from hotswap.policies import (
    Chain,
    Freeness,
    FreenessAutoscaler,
    VirtualUsageRescheduler,
    accepted,
    assume,
)
from tests.policies.loads import fleet_of, loaded, moves, running, terminating
from tests.policies.views import began, empty, fleet_views, model, served, swapping_to, swaps

RULE = FreenessAutoscaler()
A = [model("a", 1)]

rules = st.builds(
    FreenessAutoscaler,
    st.builds(Freeness, st.sampled_from(["paper", "artifact"])),
    low=st.sampled_from([1.0, 10.0]),
    high=st.sampled_from([10.0, 60.0]),
    min_instances=st.integers(0, 2),
    max_instances=st.integers(2, 4),
    interval_s=st.sampled_from([0.0, 10.0]),
)


def at(name: str, freeness: int, **facts: Any) -> InstanceView:
    """An instance of a batch of ten with that freeness."""
    return loaded(name, 10, free=10 * freeness, total=1000, **facts)


def unloads(actions: tuple[Action, ...] | Any) -> list[str]:
    return [action.instance for action in actions if isinstance(action, Unload)]


def plan(*instances: InstanceView, models: Any = A, rule: FreenessAutoscaler = RULE) -> tuple[Any, Any]:
    """What goes up, and what goes down."""
    actions = rule.plan(fleet_of(instances, models=models))
    return swaps(actions), unloads(actions)


# ------------------------------------------------------------------ up, down, neither


@pytest.mark.parametrize(
    ("first", "second", "up", "down"),
    [(9, 10, True, False), (10, 10, False, False), (60, 60, False, False), (60, 61, False, True)],
)
def test_the_average_decides(first: int, second: int, up: bool, down: bool) -> None:
    ups, downs = plan(at("e0", first), at("e1", second), empty("e2"))
    assert ups == ([("e2", "a")] if up else [])
    assert downs == (["e0"] if down else [])


def test_an_instance_without_requests_counts_as_with_one() -> None:
    assert plan(at("e0", 5), loaded("e1", free=20, total=20)) == ([], [])  # 12.5, and not infinite
    assert plan(at("e0", 5), loaded("e1", free=200, total=200)) == ([], ["e1"])
    assert plan(at("e0", -100), loaded("e1", free=20, total=20), empty("e2")) == ([("e2", "a")], [])


def test_the_one_with_the_fewest_requests_goes() -> None:
    few = loaded("e1", 2, free=200, total=1000)
    assert plan(at("e0", 90), few, loaded("e2", 3, free=900, total=1000)) == ([], ["e1"])


def test_requests_of_high_priority_bring_instances_unless_told_otherwise() -> None:
    instances = [at("e0", 20), at("e1", 20, high=1), empty("e2")]
    assert plan(*instances) == ([("e2", "a")], [])  # 20 and (200 - 900) / 10
    assert plan(*instances, rule=FreenessAutoscaler(Freeness(target_tokens=None))) == ([], [])


def test_the_least_and_the_most_instances_are_kept() -> None:
    bounded = FreenessAutoscaler(min_instances=2, max_instances=3)
    idle, busy = [at(f"e{n}", 90) for n in range(4)], [at(f"e{n}", 1) for n in range(4)]
    assert plan(*idle[:2], rule=bounded) == ([], [])
    assert plan(*idle[:3], rule=bounded) == ([], ["e0"])
    assert plan(*idle[:3], models=[model("a", min_replicas=3)], rule=bounded) == ([], [])
    assert plan(*busy[:2], empty("x"), rule=bounded) == ([("x", "a")], [])
    assert plan(*busy[:3], empty("x"), rule=bounded) == ([], [])
    assert plan(at("e0", 30), empty("x"), empty("y"), rule=bounded) == ([("x", "a")], [])


def test_a_waiting_request_adds_an_instance_and_keeps_the_others() -> None:
    some = [model("a", 20, waiting=1)]
    assert plan(at("e0", 30), empty("x"), models=some) == ([("x", "a")], [])
    assert plan(at("e0", 90), at("e1", 90), models=some) == ([], [])


def test_from_nothing_to_nothing() -> None:
    rule = FreenessAutoscaler(min_instances=0)
    assert plan(empty("x"), models=[model("a")], rule=rule) == ([], [])
    assert plan(empty("x"), models=[model("a", 1, waiting=1)], rule=rule) == ([("x", "a")], [])
    assert plan(loaded("e0"), models=[model("a")], rule=rule) == ([], ["e0"])
    assert plan(loaded("e0"), models=[model("a")]) == ([], [])


def test_the_least_free_model_is_served_first() -> None:
    models = [model("a", 10), model("b", 10), model("c")]
    instances = [at("e0", 5), at("e1", 2, of="b"), empty("x"), empty("y")]
    assert plan(*instances, models=models[:2]) == ([("x", "b"), ("y", "a")], [])
    assert plan(*instances, models=models) == ([("x", "c"), ("y", "b")], [])  # c has none at all
    models = [model("a", 10), model("b", 10, min_replicas=2)]
    assert plan(at("e0", 5), at("e1", 30, of="b"), empty("x"), models=models) == ([("x", "b")], [])


# ------------------------------------------------------------------ how fast


def test_nothing_changes_while_an_instance_comes_or_goes() -> None:
    low, spare = [at("e0", 1), at("e1", 1)], empty("x")
    assert plan(*low, swapping_to("e2", "a"), spare) == ([], [])
    assert plan(*low, terminating(at("e2", 1)), spare) == ([], [])
    assert plan(*low, swapping_to("e2", "b"), spare) == ([("x", "a")], [])
    assert plan(at("e0", 90), at("e1", 90), terminating(at("e2", 90))) == ([], [])


@pytest.mark.parametrize(("age_s", "up"), [(9.0, False), (10.0, True), (None, True)])
def test_the_youngest_is_given_time(age_s: float | None, up: bool) -> None:
    young = at("e1", 1, since_s=None if age_s is None else 100.0 - age_s)
    assert bool(plan(at("e0", 1), young, empty("x"))[0]) is up


@pytest.mark.parametrize(("ago_s", "down"), [(9.0, False), (10.0, True), (None, True)])
def test_one_goes_at_a_time(ago_s: float | None, down: bool) -> None:
    gone = replace(empty("x"), swapped_s=None if ago_s is None else 100.0 - ago_s)
    assert bool(plan(at("e0", 90), at("e1", 90), gone)[1]) is down
    assert bool(plan(at("e0", 1), at("e1", 1), gone)[0])


def test_a_loop_start_counts_as_a_time_like_any_other() -> None:
    view = fleet_of([at("e0", 1, since_s=0.0), empty("x")], models=A, now_s=5.0)
    assert RULE.plan(view) == ()
    assert swaps(RULE.plan(replace(view, now_s=10.0))) == [("x", "a")]


# ------------------------------------------------------------------ down is an unload with time


def test_a_termination_has_a_deadline_and_its_requests_move() -> None:
    both = Chain(FreenessAutoscaler(drain_s=30.0), VirtualUsageRescheduler())
    instances = [loaded("e0", 1, free=90), loaded("e1", 1, free=80)]
    view = fleet_of(instances, [running("r0", "e0"), running("r1", "e1")], models=A)
    first, second = both.plan(view)
    assert isinstance(first, Unload)
    assert (first.instance, first.deadline_s) == ("e0", 30.0)
    assert first.reason == "average F(a)=85 > 60"
    assert moves([second]) == [("r0", "e1")]


def test_an_instance_that_is_drained_by_hand_is_not_counted() -> None:
    drained = replace(at("e1", 900), draining=True)
    assert plan(at("e0", 30), drained, empty("x")) == ([], [])
    assert plan(drained, empty("x")) == ([("x", "a")], [])


# ------------------------------------------------------------------ every fleet


@given(fleet_views(), rules)
def test_it_fills_what_is_empty_and_empties_what_serves(view: FleetView, rule: FreenessAutoscaler) -> None:
    actions = rule.plan(view)
    assert accepted(view, actions) == tuple(actions)
    changes = Counter(of for _, of in swaps(actions))
    for instance, _ in swaps(actions):
        assert view.instance(instance).model is None  # type: ignore[arg-type]
    for m in view.models:
        before, after = len(view.replicas(m.id)), len(assume(view, actions).replicas(m.id))
        least = max(rule.min_instances, m.min_replicas)
        assert min(before, least) <= after <= max(before, least, rule.max_instances)
        if after < before:
            assert after == before - 1
        if rule.freeness.reading == "paper":
            assert changes[m.id] <= max(1, least)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 4))
def test_under_a_steady_load_it_comes_to_rest(loads: list[int], spare: int) -> None:
    """Requests spread evenly, and each change is done before the next plan."""
    rule = replace(RULE, interval_s=0.0)
    for requests in loads:
        view = _spread([loaded("e0"), *(empty(f"e{n + 1}") for n in range(spare))], requests)
        for _ in range(2 * spare + 2):
            actions = rule.plan(view)
            if not actions:
                break
            view = _spread(list(served(began(view, actions)).instances), requests)
        assert rule.plan(view) == ()


def _spread(instances: list[InstanceView], requests: int) -> FleetView:
    """Requests of four blocks, the same number on each of the instances that serve, as far as that goes."""
    replicas = [i.id for i in instances if i.model is not None]
    share = {name: requests // len(replicas) for name in replicas}
    for name in replicas[: requests % len(replicas)]:
        share[name] += 1
    spread = [
        loaded(i.id, share[i.id], free=160 - 4 * share[i.id], total=160) if i.id in share else empty(i.id)
        for i in instances
    ]
    return fleet_of(spread, models=[ModelView(id=A[0].id, num_running=requests)])


@pytest.mark.parametrize(
    "values",
    [
        {"low": 61.0},
        {"low": nan},
        {"min_instances": 17},
        {"min_instances": -1},
        {"interval_s": -1.0},
        {"drain_s": inf},
    ],
)
def test_a_senseless_setting_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{next(iter(values))} is "):
        FreenessAutoscaler(**values)


# ------------------------------------------------------------------ the artifact's reading

POOLED = FreenessAutoscaler(Freeness("artifact", watermark=0.0))


def test_the_artifact_takes_all_instances_as_one() -> None:
    busy, idle = at("e0", 5), loaded("e1", free=1000, total=1000)
    assert plan(busy, idle) == ([], ["e1"])  # the mean of 5 and 1000
    assert plan(busy, idle, rule=POOLED) == ([], [])  # 1050 / 10, and 50 / 10 without one
    assert plan(at("e0", 1), idle, empty("x"), rule=POOLED) == ([], [])


@pytest.mark.parametrize(("freeness", "down"), [(90, []), (99, ["e0"])])
def test_the_artifact_removes_one_when_the_others_can_hold_all(freeness: int, down: list[str]) -> None:
    three = [at(f"e{n}", freeness) for n in range(3)]  # (2700 - 1000) / 30 = 57, (2970 - 1000) / 30 = 66
    assert plan(*three, rule=POOLED) == ([], down)


def test_the_artifact_brings_as_many_at_once_as_it_takes() -> None:
    spares = [empty(name) for name in "xyz"]
    needy = [at("e0", -60), at("e1", -60)]  # 70 blocks for each of 20 requests: 1.4 instances
    assert plan(*needy, *spares, rule=POOLED)[0] == [("x", "a"), ("y", "a")]
    assert plan(*needy, *spares)[0] == [("x", "a")]
    bounded = replace(POOLED, max_instances=3)
    assert plan(*needy, *spares, rule=bounded)[0] == [("x", "a")]
    assert plan(*needy, empty("x"), rule=POOLED)[0] == [("x", "a")]


def test_in_the_artifact_one_that_goes_does_not_keep_others_from_coming() -> None:
    going = terminating(at("e2", 99))
    assert plan(at("e0", 1), at("e1", 1), going, empty("x"), rule=POOLED) == ([("x", "a")], [])
    assert plan(*[at(f"e{n}", 99) for n in (0, 1, 3)], going, rule=POOLED) == ([], [])
    assert plan(at("e0", 1), swapping_to("e1", "a"), empty("x"), rule=POOLED) == ([], [])
