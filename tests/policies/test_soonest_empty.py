"""Busy instances come in the order in which they would be empty, and few of their requests are looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from hotswap import FleetView, InstanceId, InstanceView, RequestId, RunningView
from hotswap.policies import StartupCosts
from hotswap.policies.schedulers.startup_time.soonest_empty import SoonestEmpty, disruption, lru_key
from tests.policies.views import fleet, serving

COSTS = StartupCosts(token_s=0.01, start_s=0.1, tpot_s=0.05)
# Few different numbers, so that many are equal.
RUNS = st.lists(st.tuples(st.sampled_from((10, 20, 900)), st.sampled_from((1, 5, 400))), max_size=4)
INSTANCES = st.lists(st.tuples(RUNS, st.sampled_from((1.0, 2.0))), max_size=9)


def seen(instances: Sequence[tuple[Sequence[tuple[int, int]], float]]) -> FleetView:
    """A fleet of instances, each with what runs on it (tokens, and how many it may still get) and its age."""
    views: list[InstanceView] = []
    running: list[RunningView] = []
    for number, (runs, used_s) in enumerate(instances):
        view = replace(serving(f"e{number}", "b", len(runs)), last_used_s=used_s)
        assert view.model is not None
        views.append(view)
        running += (
            RunningView(
                id=RequestId(f"r{number}-{at}"),
                model=view.model,
                instance=view.id,
                num_tokens=tokens,
                num_remaining=left,
            )
            for at, (tokens, left) in enumerate(runs)
        )
    return replace(fleet(views, ()), running=tuple(running))


@given(INSTANCES, st.integers(0, 9), st.booleans())
def test_it_is_the_order_of_sorting_them_all(
    instances: list[tuple[list[tuple[int, int]], float]], read_before: int, everyone_leaves_at_once: bool
) -> None:
    view = seen(instances)
    leave_s = (lambda runs: 0.0) if everyone_leaves_at_once else COSTS.leave_s
    order = SoonestEmpty(view, view.instances, leave_s)
    list(islice(order, read_before))  # instances that were read are read again
    expected = sorted(
        view.instances, key=lambda i: (leave_s(view.running_on(i.id)), disruption(i), lru_key(i))
    )
    assert list(order) == list(order) == expected


def test_only_an_instance_that_may_be_first_is_read_whole() -> None:
    long = [(900, 400)] * 4
    view = seen([(long, 1.0)] * 50 + [([(10, 400)] * 4, 1.0)] + [(long, 1.0)] * 49)
    looked_at: list[int] = []

    def leave_s(runs: Sequence[RunningView]) -> float:
        looked_at.append(len(runs))
        return COSTS.leave_s(runs)

    first = next(iter(SoonestEmpty(view, view.instances, leave_s)))
    assert first.id == InstanceId("e50")
    assert looked_at == [1] * 100 + [4]
