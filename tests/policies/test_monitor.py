"""What the monitor recommends, when, and how often."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hotswap import FleetView, InstanceId, InstanceView, ModelId, SwapRecord
from hotswap.errors import ConfigError
from hotswap.policies.planning import Recommendation, ScalingMonitor, ScalingStep
from tests.policies.views import empty, fleet, model, serving

MONITOR = ScalingMonitor(max_swaps_per_h=30, max_waiting=50, min_use=0.2, window_s=3600, cooldown_s=600)
NOW_S = 10_000.0


def swapped(instance: str, to: str, *, at_s: float = NOW_S, outcome: Any = "done") -> SwapRecord:
    return SwapRecord(
        instance=InstanceId(instance),
        model_before=None,
        model=ModelId(to),
        model_after=ModelId(to),
        outcome=outcome,
        reason="",
        started_s=at_s,
        seconds=1.0,
        downtime_s=1.0,
    )


def seen(*fleets: FleetView) -> list[FleetView]:
    """One view a minute, the last of them now."""
    return [replace(view, now_s=NOW_S - 60 * ago) for ago, view in enumerate(fleets[::-1])][::-1]


def busy(load: int = 1, waiting: int = 0) -> FleetView:
    return fleet([serving("e0", "a", load)], [model("a", load + waiting, waiting=waiting)])


def told(found: Sequence[Recommendation]) -> list[tuple[str, str | None]]:
    return [(r.step, r.model or r.instance) for r in found]


# ------------------------------------------------------------------ swaps


def test_an_instance_that_swaps_all_the_time_needs_another_beside_it() -> None:
    swaps = [swapped("e0", "abb"[n % 3], at_s=NOW_S - 100 * n) for n in range(31)]
    assert told(MONITOR.recommend([*seen(busy())], swaps)) == [("dedicate", "b")]
    assert told(MONITOR.recommend([*seen(busy())], swaps[:30])) == []


def test_old_swaps_and_failed_ones_do_not_count() -> None:
    old = [swapped("e0", "a", at_s=NOW_S - 3601) for _ in range(50)]
    failed = [swapped("e0", "a", outcome="failed") for _ in range(50)]
    spread = [swapped(f"e{n % 2}", "a") for n in range(60)]
    assert told(MONITOR.recommend(seen(busy()), [*old, *failed, *spread])) == []
    twice_the_rate = replace(MONITOR, window_s=1800)
    assert told(twice_the_rate.recommend(seen(busy()), spread)) == [("dedicate", "a")]


# ------------------------------------------------------------------ waiting


def test_a_model_for_which_many_wait_needs_one_more() -> None:
    assert told(MONITOR.recommend(seen(busy(waiting=0), busy(waiting=102)), ())) == [("add", "a")]
    assert told(MONITOR.recommend(seen(busy(waiting=0), busy(waiting=100)), ())) == []


# ------------------------------------------------------------------ use


def used(*times: int, instance: InstanceView, min_replicas: int = 0) -> list[FleetView]:
    models = [model("a", 1), model("b", min_replicas=min_replicas)]
    return seen(*[fleet([serving("e0", "a", 1), replace(instance, num_requests=n)], models) for n in times])


def test_an_instance_that_is_seldom_used_may_go() -> None:
    idle = serving("e1", "b")
    assert told(MONITOR.recommend(used(0, 0, 3, 0, 0, 0, instance=idle), ())) == [("remove", "e1")]
    assert told(MONITOR.recommend(used(0, 0, 3, 0, 0, instance=idle), ())) == []
    assert told(MONITOR.recommend(used(0, instance=empty("e1")), ())) == [("remove", "e1")]


def test_an_instance_stays_that_min_replicas_need_or_that_swapped_or_is_new() -> None:
    idle = serving("e1", "b")
    assert told(MONITOR.recommend(used(0, instance=idle, min_replicas=1), ())) == []
    assert told(MONITOR.recommend(used(0, instance=idle), [swapped("e1", "b")])) == []
    assert told(MONITOR.recommend([*seen(busy()), *used(0, instance=idle)], ())) == []


def test_one_goes_at_a_time_the_least_used_first() -> None:
    models = [model("a", 1), model("b")]
    views = [
        fleet([serving("e0", "a", 1), serving("e1", "b", n), serving("e2", "b")], models)
        for n in (1, 0, 0, 0, 0, 0)
    ]
    assert told(MONITOR.recommend(seen(*views), ())) == [("remove", "e2")]


# ------------------------------------------------------------------ again


def test_what_was_recommended_rests() -> None:
    views = seen(busy(waiting=102))
    first = MONITOR.recommend(views, ())
    assert told(first) == [("add", "a")]
    assert str(first[0]) == "add a: 102 requests wait on average"
    later = [replace(view, now_s=view.now_s + 599) for view in views]
    assert MONITOR.recommend(later, (), made=first) == ()
    later = [replace(view, now_s=view.now_s + 600) for view in views]
    assert told(MONITOR.recommend(later, (), made=first)) == [("add", "a")]
    others = [replace(first[0], model=ModelId("b")), replace(first[0], step=ScalingStep.DEDICATE)]
    assert MONITOR.recommend(views, (), made=others) == first


def test_of_nothing_seen_nothing_is_said() -> None:
    assert MONITOR.recommend([], [swapped("e0", "a")] * 99) == ()


@pytest.mark.parametrize(
    "values", [{"max_swaps_per_h": -1}, {"min_use": 1.1}, {"window_s": 0}, {"cooldown_s": float("nan")}]
)
def test_a_senseless_setting_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{next(iter(values))} is "):
        ScalingMonitor(**values)
