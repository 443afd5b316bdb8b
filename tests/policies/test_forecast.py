"""Models loaded before their requests: when, for which, on what, and what is left alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotswap import FleetView, ModelId, Residency, StoreView, TierView
from hotswap.abc import Action, Prefetch, Scheduler, Swap
from hotswap.errors import ConfigError
from hotswap.policies import CostSwap, Forecast, KeepAliveSwap, KeepAsIs, WeightedLoadSwap, accepted, assume
from hotswap.simulation import Arrivals, Cluster, Driver, Outcome, generate, generate_each, simulate
from hotswap.testing.strategies import fleet_views
from tests.policies.days import DAY_S, SLOTS, STEP_S, days
from tests.policies.views import empty, fleet, model, serving, swaps, waiting

# Of the day, "a" and "b" are asked for in the morning, "c" in the evening, "d" seldom.
HOURS = {"a": {2: 3}, "b": {2: 2}, "c": {7: 3}, "d": {5: 1}}
MORNING_S, EVENING_S = 2 * DAY_S + 190.0, 2 * DAY_S + 690.0


def learned(until_s: float, inner: Scheduler | None = None, *, least_gain: float = 0.2) -> Forecast:
    """One that has seen two days, up to a moment."""
    forecast = Forecast(
        inner or KeepAsIs(), horizon_s=50.0, period_s=DAY_S, num_slots=SLOTS, least_gain=least_gain
    )
    for view in days(HOURS, until_s):
        forecast.plan(view)
    return forecast


def store(*resident: str, room: int = 2) -> StoreView:
    """Four models of one byte on a disk, some in memory, which has room for so many."""
    where = [(name, "host") for name in resident] + [(name, "disk") for name in HOURS]
    return StoreView(
        tiers=(
            TierView(name="host", used_bytes=len(resident), capacity_bytes=room, bytes_per_s=1.0),
            TierView(name="disk", used_bytes=4, bytes_per_s=0.1),
        ),
        residency=tuple(Residency(model=ModelId(m), tier=tier, size_bytes=1) for m, tier in where),
    )


def seen_at(now_s: float, *held: str, busy: Sequence[str] = (), waits: Sequence[str] = ()) -> FleetView:
    """Instances that hold these models ("" is EMPTY), of which the `busy` have a request."""
    instances = [
        replace(serving(f"e{n}", name), num_requests=int(name in busy)) if name else empty(f"e{n}")
        for n, name in enumerate(held)
    ]
    models = [model(name, (name in busy) + waits.count(name), waiting=waits.count(name)) for name in HOURS]
    return fleet(instances, models, now_s=now_s, waiting=[waiting(name, now_s) for name in waits])


def planned(view: FleetView, *, least_gain: float = 0.2) -> list[tuple[str, str]]:
    return swaps(learned(view.now_s - STEP_S, least_gain=least_gain).plan(view))


def test_models_come_to_idle_instances_before_their_time_of_the_day() -> None:
    assert planned(seen_at(MORNING_S, "c", "d", "a")) == [("e1", "b")]
    assert planned(seen_at(EVENING_S, "a", "b", "d")) == [("e1", "c")]
    assert planned(seen_at(EVENING_S, "a", "", "d")) == [("e1", "c")]
    assert planned(seen_at(2 * DAY_S + 400.0, "a", "b", "c")) == []  # before nothing


def test_the_likeliest_goes_first_to_where_least_is_lost() -> None:
    assert planned(seen_at(MORNING_S, "c", "d")) in ([("e0", "a")], [("e1", "a")])
    assert planned(seen_at(MORNING_S, "a", "b")) == []


@pytest.mark.parametrize(
    "view",
    [
        seen_at(EVENING_S, "a", "b", "d", busy=["a", "b", "d"]),
        seen_at(EVENING_S, "a", "b", "d", busy=["a", "b"]),  # the last idle one
        seen_at(EVENING_S, "a", "b", "d", waits=["a"]),
        seen_at(EVENING_S, "a", "b", "d", waits=["c"]),
    ],
    ids=["all busy", "one idle", "one waits for what is held", "one waits for what is wanted"],
)
def test_what_has_demand_is_left_to_the_inner_scheduler(view: FleetView) -> None:
    assert planned(view) == []


def test_an_instance_that_is_worth_more_is_not_taken() -> None:
    late = seen_at(MORNING_S, "a", "b", "a", "b")
    assert planned(late) == []
    assert planned(replace(late, models=tuple(replace(m, weight=9.0) for m in late.models))) == []


def test_min_replicas_and_swaps_under_way_are_heeded() -> None:
    view = seen_at(EVENING_S, "a", "b")
    kept = replace(view, models=tuple(replace(m, min_replicas=int(m.id in "ab")) for m in view.models))
    assert planned(kept) == []
    moving = replace(serving("e2", "d"), swapping=True, target=ModelId("a"))
    assert planned(replace(view, instances=(*view.instances, moving))) == []


def test_a_gain_that_is_less_than_its_time_is_worth_is_not_taken() -> None:
    noon = seen_at(2 * DAY_S + 460.0, "a", "b", "c")  # "d" is asked for from 500 on, seldom
    assert planned(noon, least_gain=0.05) != []
    assert planned(noon, least_gain=1.0) == []


def test_the_inner_plan_comes_first_and_whole() -> None:
    view = seen_at(EVENING_S, "a", "", "", "b", waits=["d"])
    inner = KeepAliveSwap().plan(view)
    assert swaps(inner) == [("e1", "d")]
    assert list(learned(EVENING_S - STEP_S, KeepAliveSwap()).plan(view)) == list(inner)


def prefetched(view: FleetView) -> list[str]:
    plan = learned(view.now_s - STEP_S).plan(view)
    return [action.model for action in plan if isinstance(action, Prefetch)]


def test_weights_come_to_memory_before_their_time_of_the_day() -> None:
    view = seen_at(EVENING_S, "a", busy=["a"])
    assert prefetched(replace(view, store=store("a"))) == ["c"]
    assert prefetched(replace(view, store=store("b", "d"))) == ["c"]  # displaces one
    assert prefetched(replace(view, store=store("c", "d"))) == []
    assert prefetched(replace(seen_at(EVENING_S, "c", busy=["c"]), store=store("a", "d"))) == []
    assert prefetched(replace(view, store=replace(store("a"), tiers=store().tiers[1:]))) == []


def test_weights_do_not_displace_what_is_as_likely() -> None:
    view = seen_at(MORNING_S, "d", busy=["d"])
    assert prefetched(replace(view, store=store("a", room=1))) == []
    assert prefetched(replace(view, store=store("c", room=1))) == ["a"]


# ---------------------------------------------------------------------- over any fleet


def broken_rules(forecast: Forecast, fleet: FleetView, plan: Sequence[Action]) -> list[str]:
    """What of the stated rules a plan breaks, beside what the inner scheduler planned."""
    inner = CostSwap().plan(fleet)
    if list(plan[: len(inner)]) != list(inner):
        return ["the inner plan"]
    more, view = plan[len(inner) :], assume(fleet, inner)
    broken: list[str] = []
    if sum(isinstance(a, Swap) for a in more) > 1 or sum(isinstance(a, Prefetch) for a in more) > 1:
        broken.append("bounds")
    for swap in (action for action in more if isinstance(action, Swap)):
        instance = view.instance(swap.instance)
        if instance.num_requests or not instance.free or view.waiting:
            broken.append("demand")
        if instance.hosted is not None:
            old = forecast.rates.expected(instance.hosted, fleet.now_s, 50.0)
            new = forecast.rates.expected(swap.model, fleet.now_s, 50.0)
            if old is None or new is None or old > new:
                broken.append("a likelier model")
    if list(accepted(view, more)) != list(more):
        broken.append("refused by a fleet")
    return broken


def in_any_fleet(forecast: type[Forecast], *, examples: int = 150) -> list[str]:
    """Rules that are broken in views of any fleet, at a time for which there is a forecast."""
    broken: list[str] = []

    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(fleet_views(), st.booleans(), st.sampled_from([1000.0, 1190.0, 1690.0]))
    def look(fleet: FleetView, quiet: bool, now_s: float) -> None:
        scheduler = forecast(horizon_s=50.0, period_s=DAY_S, num_slots=SLOTS, least_gain=0.05)
        for view in days(HOURS, now_s):
            scheduler.rates.learn(view)
        view = replace(fleet, now_s=now_s, waiting=() if quiet else fleet.waiting)
        broken.extend(broken_rules(scheduler, view, scheduler.plan(view)))

    look()
    return broken


class _Takes(Forecast):
    """Loads the likeliest model to the first free instance, whatever that has."""

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        free = next((i for i in fleet.instances if i.free and i.model != "a"), None)
        known = any(m.id == "a" for m in fleet.models)
        more = () if free is None or not known else (Swap(instance=free.id, model=ModelId("a")),)
        return (*CostSwap().plan(fleet), *more)


class _Replaces(Forecast):
    """Plans in place of the inner scheduler."""

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        return tuple(a for a in super().plan(fleet) if a.reason.endswith("."))


class _Repeats(Forecast):
    def plan(self, fleet: FleetView) -> Sequence[Action]:
        return (*super().plan(fleet), *(Prefetch(model=m.id) for m in fleet.models))


def test_the_rules_hold_in_any_fleet() -> None:
    assert in_any_fleet(Forecast) == []


@pytest.mark.parametrize("faulty", [_Takes, _Replaces, _Repeats])
def test_a_forecast_that_breaks_the_rules_is_caught(faulty: type[Forecast]) -> None:
    assert in_any_fleet(faulty, examples=40)


# ---------------------------------------------------------------------- simulations


def facts(outcome: Outcome) -> str:
    """All of an outcome but the name and the settings of its scheduler."""
    whole = json.loads(outcome.as_json())
    return json.dumps([whole[part] for part in ("requests", "swaps", "migrations", "samples")])


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.sampled_from([1.0, 4.0]),
    st.sampled_from(
        [CostSwap(), KeepAliveSwap(keep_alive_s=5.0), WeightedLoadSwap(t1=2, t2=4, b=1.5, sigmas=0)]
    ),
    st.sampled_from([None, 40 * 10**9]),
)
def test_without_a_period_seen_every_decision_is_the_inner_ones(
    seed: int, num_engines: int, cv: float, inner: Scheduler, host_bytes: int | None
) -> None:
    trace = generate(seed, models=dict.fromkeys("abcd", 1.0), rate_per_s=2.0, seconds=40.0, cv=cv)
    cluster = Cluster(num_engines=num_engines, host_bytes=host_bytes)
    alone, beside = (
        simulate(trace, cluster, scheduler=scheduler, interval_s=0.5, driver="events")
        for scheduler in (inner, Forecast(inner, period_s=3600.0))
    )
    assert facts(alone) == facts(beside)


def daily(seed: int, num_days: int) -> dict[str, Arrivals]:
    """Six models, each asked for in an hour of its own."""
    return {
        f"m{n}": Arrivals(rate_per_s=0.2, parts=tuple(float(slot == n) for slot in range(6)) * num_days)
        for n in range(6)
    }


@pytest.mark.parametrize("driver", ["events", "clients"])
def test_in_a_fleet_the_first_requests_of_each_hour_find_their_model(driver: Driver) -> None:
    """In the third of three days of 600 s requests wait for loads by default, and hardly by a forecast."""
    trace = generate_each(1, daily(1, 3), seconds=1800.0)
    cluster = Cluster(num_engines=3, host_bytes=50 * 10**9)
    default, forecast = (
        simulate(trace, cluster, scheduler=scheduler, driver=driver)
        for scheduler in (CostSwap(), Forecast(period_s=600.0, num_slots=60, horizon_s=20.0))
    )
    late = [
        sum(r.ttft_s > 0.5 for r in outcome.requests if r.arrived_s > 1200.0)
        for outcome in (default, forecast)
    ]
    assert late[0] >= 5
    assert late[1] <= 2
    assert not any(swap.num_evicted for swap in forecast.swaps if "asked for soon" in swap.reason)


def test_another_simulation_begins_without_what_was_learned() -> None:
    trace = generate_each(1, daily(1, 3), seconds=1800.0)
    cluster, forecast = Cluster(num_engines=3), Forecast(period_s=600.0, num_slots=60)
    first, second = (simulate(trace, cluster, scheduler=forecast, driver="events") for _ in range(2))
    assert facts(first) == facts(second)


@pytest.mark.parametrize("number", [0.0, -1.0, float("inf"), float("nan")])
def test_wrong_settings_are_refused(number: float) -> None:
    with pytest.raises(ConfigError, match="give"):
        Forecast(horizon_s=number)
    with pytest.raises(ConfigError, match="give"):
        Forecast(least_gain=number)
    with pytest.raises(ConfigError, match="give"):
        Forecast(period_s=number)
