"""What is learned from the views of some days: rates by slot, when there are none, and what is forgotten."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random

import pytest

from hotswap import FleetView, ModelId
from hotswap.errors import ConfigError
from hotswap.policies import SeasonalRates
from tests.policies.days import DAY_S, SLOTS, STEP_S, at, days
from tests.policies.views import model, serving

A, B = ModelId("a"), ModelId("b")
SLOT_S = DAY_S / SLOTS
MORNING = {"a": {2: 1}, "b": {2: 1, 7: 3}}


def learned(views: Iterable[FleetView]) -> SeasonalRates:
    rates = SeasonalRates(period_s=DAY_S, num_slots=SLOTS)
    for view in views:
        rates.learn(view)
    return rates


def in_slot(rates: SeasonalRates, name: ModelId, slot: int, *, day: int = 2) -> float:
    expected = rates.expected(name, day * DAY_S + slot * SLOT_S, SLOT_S)
    assert expected is not None
    return expected


def test_requests_that_come_at_one_time_of_the_day_are_expected_then() -> None:
    rates = learned(days(MORNING, 2 * DAY_S))
    assert in_slot(rates, A, 2) > 5 * in_slot(rates, A, 3)
    assert in_slot(rates, B, 7) > 2 * in_slot(rates, B, 2)
    assert in_slot(rates, B, 2) > 5 * in_slot(rates, B, 5)


def test_as_many_are_expected_as_came_where_nothing_changes() -> None:
    steady = {"a": dict.fromkeys(range(SLOTS), 1)}
    rates = learned(days(steady, 4 * DAY_S))
    assert in_slot(rates, A, 4, day=4) == pytest.approx(SLOT_S / STEP_S, rel=0.15)


def test_what_lies_ahead_adds_up() -> None:
    rates = learned(days(MORNING, 2 * DAY_S))
    parts = [rates.expected(A, 2 * DAY_S + 37.0 * n, 37.0) for n in range(10)]
    assert rates.expected(A, 2 * DAY_S, 370.0) == pytest.approx(sum(part or 0.0 for part in parts))
    assert rates.expected(A, 2 * DAY_S, 99 * DAY_S) == rates.expected(A, 2 * DAY_S, DAY_S)


def test_there_is_no_forecast_before_a_period_has_passed() -> None:
    rates = learned(days(MORNING, DAY_S - STEP_S))
    assert rates.expected(A, DAY_S, SLOT_S) is None
    rates.learn(at(DAY_S, "ab"))
    assert rates.expected(A, DAY_S, SLOT_S) is not None
    assert rates.expected(ModelId("c"), DAY_S, SLOT_S) is None


def test_a_model_that_comes_later_is_watched_for_a_period_first_and_one_that_goes_is_forgotten() -> None:
    rates = learned(days({"a": MORNING["a"]}, 2 * DAY_S))
    later = list(days(MORNING, 3.05 * DAY_S, from_s=2 * DAY_S + STEP_S))
    for view in later[:-10]:
        rates.learn(view)
    assert rates.expected(A, 3 * DAY_S, SLOT_S) is not None
    assert rates.expected(B, 3 * DAY_S, SLOT_S) is None
    for view in later[-10:]:
        rates.learn(view)
    assert rates.expected(B, 3 * DAY_S, SLOT_S) is None  # its first slot ends a period after it was seen
    for view in days(MORNING, 3.2 * DAY_S, from_s=3.05 * DAY_S + STEP_S):
        rates.learn(view)
    assert rates.expected(B, 3.2 * DAY_S, SLOT_S) is not None
    rates.learn(at(3.2 * DAY_S + STEP_S, "b"))
    rates.learn(at(3.2 * DAY_S + 2 * STEP_S, "ab"))
    assert rates.expected(A, 3.2 * DAY_S, SLOT_S) is None


def test_a_view_teaches_once() -> None:
    once, twice = (
        learned(days(MORNING, 2.5 * DAY_S)),
        learned(view for view in days(MORNING, 2.5 * DAY_S) for _ in range(2)),
    )
    for slot in range(SLOTS):
        assert in_slot(once, B, slot, day=3) == in_slot(twice, B, slot, day=3)


def test_time_that_runs_backwards_is_another_fleet() -> None:
    rates = learned([*days(MORNING, 2 * DAY_S), at(0.0, "ab")])
    assert not rates.is_ready
    for view in days(MORNING, 2 * DAY_S, from_s=STEP_S):
        rates.learn(view)
    assert in_slot(rates, A, 2) == in_slot(learned(days(MORNING, 2 * DAY_S)), A, 2)


def test_a_pause_is_no_time_without_requests() -> None:
    steady = {"a": dict.fromkeys(range(SLOTS), 1)}
    whole = learned(days(steady, 3 * DAY_S))
    paused = learned([*days(steady, 2 * DAY_S), *days(steady, 4 * DAY_S, from_s=3 * DAY_S)])
    assert in_slot(paused, A, 5, day=5) == pytest.approx(in_slot(whole, A, 5, day=5), rel=0.1)


def test_a_model_without_a_time_of_day_is_expected_as_much_at_any_time() -> None:
    random, hours = Random(1), list[FleetView]()
    for day in range(6):
        busy = {"a": {random.randrange(SLOTS): 5}}
        views = days(busy, (day + 1) * DAY_S, from_s=day * DAY_S)
        hours += list(views)[: -1 if day < 5 else None]
    rates = learned(hours)
    expected = [in_slot(rates, A, slot, day=7) for slot in range(SLOTS)]
    assert max(expected) == pytest.approx(min(expected))


def test_what_came_of_late_raises_what_is_expected() -> None:
    quiet = learned(days(MORNING, 2.5 * DAY_S))
    loud = learned(days(MORNING, 2.5 * DAY_S))
    now_s = 2.5 * DAY_S + STEP_S
    quiet.learn(at(now_s, "ab"))
    loud.learn(at(now_s, "ab", [("a", now_s - 1.0 - n / 10) for n in range(5)]))
    assert in_slot(loud, A, 6) > 1.5 * in_slot(quiet, A, 6)
    assert in_slot(loud, B, 6) == in_slot(quiet, B, 6)


def test_a_request_between_two_views_is_seen_by_the_time_at_which_its_instance_was_used() -> None:
    """An instance that is used by a request which ran in the view before has only been left."""

    def used(now_s: float, running: int) -> FleetView:
        instance = replace(serving("e", "a"), last_used_s=now_s - 1.0)
        return FleetView(now_s=now_s, instances=(instance,), models=(model("a", running),))

    start = list(days({"a": {}}, 2 * DAY_S))
    seen = learned([*start, used(2 * DAY_S + STEP_S, 0)])
    left = learned([*start[:-1], replace(start[-1], models=(model("a", 1),)), used(2 * DAY_S + STEP_S, 0)])
    for rates in (seen, left):
        for step in range(2, SLOTS + 1):
            rates.learn(at(2 * DAY_S + step * STEP_S, "a"))
    assert in_slot(seen, A, 0, day=3) > 0.0
    assert in_slot(left, A, 0, day=3) == 0.0


@pytest.mark.parametrize("period_s", [0.0, float("inf"), float("nan")])
def test_wrong_periods_are_refused(period_s: float) -> None:
    with pytest.raises(ConfigError, match="give"):
        SeasonalRates(period_s=period_s)


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="give"):
        SeasonalRates(num_slots=0)
    with pytest.raises(ConfigError, match="give"):
        SeasonalRates(memory=1.0)
    with pytest.raises(ConfigError, match="give"):
        SeasonalRates(prior=0.0)
