"""`AdapterPool`: needed now, then popular, then due; what is held counts, and nothing is asked twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given

from hotswap import AdapterId, AdapterView, FleetView, InstanceState, InstanceView, ModelId
from hotswap.abc import Action, PinAdapters
from hotswap.errors import ConfigError
from hotswap.policies import AdapterPool
from hotswap.testing.strategies import fleet_views
from tests.policies.views import fleet, model, serving, swapping_to

POOL = AdapterPool()


def adapter(
    name: str,
    popularity: float = 0.0,
    *,
    of: str = "a",
    running: int = 0,
    waiting: int = 0,
    asked_s: float = 0.0,
    gap_s: float | None = None,
) -> AdapterView:
    return AdapterView(
        id=AdapterId(name),
        model=ModelId(of),
        num_running=running,
        num_waiting=waiting,
        popularity=popularity,
        asked_s=asked_s,
        gap_s=gap_s,
    )


def holding(name: str, *adapters: str, places: int = 2, of: str = "a") -> InstanceView:
    return replace(serving(name, of), adapters=tuple(map(AdapterId, adapters)), max_adapters=places)


def view(instances: Iterable[InstanceView], adapters: Iterable[AdapterView]) -> FleetView:
    """At loop time 100."""
    return replace(fleet(instances, [model("a"), model("b")]), adapters=tuple(adapters))


def held(actions: Iterable[Action]) -> dict[str, tuple[str, ...]]:
    return {action.instance: action.adapters for action in actions if isinstance(action, PinAdapters)}


def carried_out(before: FleetView, actions: Iterable[Action]) -> FleetView:
    """The fleet once everything that was asked for is held; what was not goes where there are no places."""
    plans = {action.instance: action.adapters for action in actions if isinstance(action, PinAdapters)}

    def after(instance: InstanceView) -> InstanceView:
        wanted = plans.get(instance.id, ())
        others = [name for name in instance.adapters if name not in wanted]
        room = max(instance.max_adapters - len(wanted), 0)
        return replace(instance, adapters=(*wanted, *others[:room])) if wanted else instance

    return replace(before, instances=tuple(map(after, before.instances)))


# ------------------------------------------------------------------ one instance

DUE = adapter("d", asked_s=50, gap_s=52)
ASKED = [DUE, adapter("q", 3), adapter("p", 5), adapter("n", waiting=1), adapter("rare", 0.1)]


@pytest.mark.parametrize(("places", "given_to"), [(1, "n"), (2, "np"), (3, "npq"), (4, "npqd"), (8, "npqd")])
def test_places_go_to_the_needed_then_the_popular_then_the_due(places: int, given_to: str) -> None:
    assert held(POOL.plan(view([holding("e0", places=places)], ASKED))) == {"e0": tuple(given_to)}


def test_nothing_is_planned_where_all_is_as_it_should_be() -> None:
    assert POOL.plan(view([holding("e0", "p", "n")], ASKED)) == ()
    assert POOL.plan(view([holding("e0", "p", "n")], [])) == ()


def test_what_is_used_stays_and_what_its_request_brings_is_left_to_it() -> None:
    asked = [adapter("used", running=1), adapter("coming", 9, running=1), adapter("p", 5)]
    assert held(POOL.plan(view([holding("e0", "used", places=2)], asked))) == {"e0": ("used", "p")}
    assert POOL.plan(view([holding("e0", "used", places=1)], asked)) == ()


def test_one_that_is_held_gives_way_only_to_one_that_is_clearly_more_popular() -> None:
    for newer, makes_way in ((5.0, False), (7.0, True)):
        fleet_view = view([holding("e0", "p", places=1)], [adapter("p", 4), adapter("q", newer)])
        assert bool(POOL.plan(fleet_view)) is makes_way
        assert POOL.plan(replace(fleet_view, instances=(holding("e0", places=1),)))
    assert AdapterPool(stay=1).plan(view([holding("e0", "p", places=1)], [adapter("p", 4), adapter("q", 5)]))


@pytest.mark.parametrize(
    ("asked_s", "is_due"), [(90, False), (76, False), (74, True), (66, True), (64, False)]
)
def test_what_comes_regularly_is_held_around_the_time_it_is_expected(asked_s: float, is_due: bool) -> None:
    """It comes every 30 seconds, it is 100, and it may be 5 seconds early or late."""
    plan = POOL.plan(view([holding("e0")], [adapter("d", asked_s=asked_s, gap_s=30.0)]))
    assert bool(plan) is is_due
    assert AdapterPool(lead_s=0).plan(view([holding("e0")], [DUE])) == ()


# ------------------------------------------------------------------ several


def test_an_adapter_gets_as_many_replicas_as_its_share_of_the_requests_asks_for() -> None:
    replicas = [holding(f"e{n}") for n in range(4)]
    plans = held(POOL.plan(view(replicas, [adapter("p", 4), adapter("q", 2), adapter("r", 2)])))
    copies = Counter(name for names in plans.values() for name in names)
    assert copies == {"p": 2, "q": 1, "r": 1}
    assert sorted(map(len, plans.values())) == [1, 1, 1, 1]


def test_popular_ones_are_spread_over_the_replicas() -> None:
    plans = held(POOL.plan(view([holding("e0"), holding("e1")], [adapter(name, 4) for name in "pqrs"])))
    assert [len(plans["e0"]), len(plans["e1"])] == [2, 2]
    assert {*plans["e0"], *plans["e1"]} == set("pqrs")


def test_another_copy_of_what_is_popular_goes_before_the_first_of_what_is_due() -> None:
    replicas = [holding("e0", "p", places=1), holding("e1", places=1)]
    assert held(POOL.plan(view(replicas, [adapter("p", 9), DUE]))) == {"e1": ("p",)}


def test_only_instances_that_serve_the_model_and_stay_with_it_are_given_any() -> None:
    leaving = replace(swapping_to("e1", "b", of="a"), max_adapters=2)
    draining = replace(holding("e2"), draining=True)
    empty = replace(holding("e4"), state=InstanceState.EMPTY, model=None)
    instances = [leaving, draining, holding("e3", of="b"), empty, holding("e5", places=0)]
    assert POOL.plan(view(instances, ASKED)) == ()
    assert held(POOL.plan(view([*instances, holding("e0")], ASKED))) == {"e0": ("n", "p")}


def test_adapters_of_one_name_are_each_their_own_models() -> None:
    asked = [adapter("p", 5), adapter("p", 5, of="b")]
    plans = POOL.plan(view([holding("e0", "p"), holding("e1", of="b")], asked))
    assert held(plans) == {"e1": ("p",)}


# ------------------------------------------------------------------ any fleet


@given(fleet_views())
def test_what_is_needed_is_never_displaced_by_what_is_not(before: FleetView) -> None:
    plan = [action for action in POOL.plan(before) if isinstance(action, PinAdapters)]
    after = carried_out(before, plan)
    needed = {(a.model, a.id) for a in before.adapters if a.num_requests}
    for hold in plan:
        kept = set(after.instance(hold.instance).adapters)
        lost = set(before.instance(hold.instance).adapters) - kept
        assert not {(hold.model, name) for name in lost} & needed
        kinds = [(hold.model, name) in needed for name in hold.adapters]
        assert kinds == sorted(kinds, reverse=True), "what is needed is loaded first"


@given(fleet_views())
def test_no_adapter_gets_a_place_while_a_needed_one_has_none(before: FleetView) -> None:
    plan = [action for action in POOL.plan(before) if isinstance(action, PinAdapters)]
    after = carried_out(before, plan)
    there = {(i.model, name) for i in after.instances for name in i.adapters}
    for hold in plan:
        missing = {
            a.id for a in before.adapters if a.model == hold.model and a.num_waiting and not a.num_running
        } - {name for model, name in there if model == hold.model}
        needed = {a.id for a in before.adapters if a.model == hold.model and a.num_requests}
        assert not missing or set(hold.adapters) <= needed


@given(fleet_views())
def test_a_plan_that_was_carried_out_leaves_nothing_to_do(before: FleetView) -> None:
    assert POOL.plan(carried_out(before, POOL.plan(before))) == ()


@pytest.mark.parametrize(
    "settings",
    [{"least_popularity": 0.0}, {"lead_s": -1.0}, {"lead_s": float("inf")}, {"stay": 0.9}],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        AdapterPool(**settings)
