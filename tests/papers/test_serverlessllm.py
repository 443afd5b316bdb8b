"""Fu et al., ServerlessLLM, OSDI 2024, section 6: the choice that its locality-driven placement is about.

One server has the model near its devices and is at work; another is free and would have to fetch it from far.
The nearer one has the model preloaded here; `test_serverlessllm_in_time` has nodes with host memory.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hotswap import FleetView, ModelId, RequestId, Residency, RunningView, StoreView, TierView
from hotswap.abc import Migrate, Swap
from hotswap.policies import (
    KeepAliveSwap,
    ShepherdSwap,
    StartupCosts,
    StartupTimePlacement,
)
from tests.policies.views import empty, fleet, model, serving, swaps

GB = 10**9
# OPT-30B, 66 GB, from a disk that gives 2 GB/s: 33 s. What follows costs a hundredth of a second a token.
FAR = StoreView(
    tiers=(TierView(name="disk", bytes_per_s=2 * GB),),
    residency=(Residency(model=ModelId("a"), tier="disk", size_bytes=66 * GB),),
)
COSTS = StartupCosts(token_s=0.01, start_s=0.1)


def two_servers(num_tokens: int) -> FleetView:
    """`near` has a staged and runs b; `free` is EMPTY; `other` has a second replica of b, with places."""
    near = replace(serving("near", "b", 1), preloaded=ModelId("a"))
    inference = RunningView(
        id=RequestId("r"), model=ModelId("b"), instance=near.id, num_tokens=num_tokens, num_remaining=10_000
    )
    view = fleet(
        [near, empty("free"), serving("other", "b")],
        [model("a", 1, waiting=1), model("b", 1, min_replicas=1)],
    )
    return replace(view, store=FAR, running=(inference,))


def test_a_migration_beats_a_load_from_far() -> None:
    """1000 tokens move in 10.1 s, after which `near` starts at once; the load on `free` takes 33 s."""
    view = two_servers(1000)
    plan = StartupTimePlacement(costs=COSTS).plan(view)
    assert [(a.request, a.destination) for a in plan if isinstance(a, Migrate)] == [("r", "other")]
    assert swaps(plan) == [("near", "a")]


def test_waiting_for_a_free_instance_is_slower_and_preemption_is_fast_but_disrupts() -> None:
    """The paper's other policies: by availability the far load, by preemption the victim's work is cut."""
    view = two_servers(1000)
    assert swaps(KeepAliveSwap().plan(view)) == [("free", "a")]
    busy = replace(view, instances=tuple(i for i in view.instances if i.id == "near"))
    busy = replace(busy, models=(model("a", 4, waiting=4), model("b", 1)))
    (swap,) = ShepherdSwap(lambda_=3.0).plan(busy)
    assert isinstance(swap, Swap)
    assert (swap.instance, swap.deadline_s) == ("near", 0.0)


@given(st.integers(1, 9000))
def test_the_least_of_load_and_migration_is_taken(num_tokens: int) -> None:
    chosen = swaps(StartupTimePlacement(costs=COSTS).plan(two_servers(num_tokens)))
    migration_s = 0.01 * num_tokens + 0.1
    if abs(migration_s - 33.0) > 1e-6:
        assert chosen == [("near" if migration_s < 33.0 else "free", "a")]
