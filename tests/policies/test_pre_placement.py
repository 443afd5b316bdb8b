"""Models that come to the memory of more nodes: which, where, and what is left alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from hotswap import FleetView, InstanceView, ModelId, Residency, StoreView, TierView
from hotswap.abc import Prefetch, Scheduler
from hotswap.errors import ConfigError
from hotswap.policies import KeepAliveSwap, KeepAsIs, PrePlacement, StartupTimePlacement
from hotswap.simulation import Cluster, generate, simulate
from hotswap.testing.strategies import fleet_views
from tests.policies.views import empty, fleet, model, serving, swapping_to, waiting

NODES = ("n0", "n1")


def store(memory: Sequence[str], *, room: int = 2, queued: int = 0) -> StoreView:
    """Four models of ten bytes on the disk of each node, and those in the memories, as "n0 a"."""
    tiers: list[TierView] = []
    entries: list[Residency] = []
    for node in NODES:
        held = [place.split()[1] for place in memory if place.split()[0] == node]
        tiers.append(
            TierView(
                name="host",
                node=node,
                used_bytes=10 * len(held),
                capacity_bytes=10 * room,
                bytes_per_s=100.0,
            )
        )
        tiers.append(TierView(name="disk", node=node, bytes_per_s=1.0, queued_bytes=queued))
        where = [(name, "host") for name in held] + [(name, "disk") for name in "abcd"]
        entries += [Residency(model=ModelId(m), tier=tier, size_bytes=10, node=node) for m, tier in where]
    tiers.sort(key=lambda tier: tier.name != "host")
    return StoreView(tiers=tuple(tiers), residency=tuple(entries))


def on(instance: InstanceView, node: str) -> InstanceView:
    return replace(instance, node=node)


def seen_at(now_s: float, memory: Sequence[str], *held: str, **options: int) -> FleetView:
    """Instances that hold these models, the first half on a node each; "" is EMPTY."""
    instances = [
        on(serving(f"e{n}", name) if name else empty(f"e{n}"), NODES[n * len(NODES) // len(held)])
        for n, name in enumerate(held)
    ]
    view = fleet(instances, [model(name) for name in "abcd"], now_s=now_s)
    return replace(view, store=store(memory, **options))


def after_loads(loads: str, **options: float) -> PrePlacement:
    """One that has seen these models loaded, one after the other, on e0, a second each."""
    policy = PrePlacement(KeepAsIs(), **options)  # type: ignore[arg-type]  # any of them
    full = [f"{node} {name}" for node in NODES for name in "abcd"]
    policy.plan(seen_at(-1, full, "", "", room=4))
    for second, name in enumerate(loads):
        policy.plan(seen_at(second, full, name, "", room=4))
        policy.plan(seen_at(second + 0.5, full, "", "", room=4))
    return policy


def prefetches(policy: PrePlacement, view: FleetView) -> list[tuple[str, str]]:
    return [(a.model, a.node) for a in policy.plan(view) if isinstance(a, Prefetch)]


def test_memory_that_is_free_is_filled_by_what_is_loaded_most_often() -> None:
    policy = after_loads("abacab")
    assert prefetches(policy, seen_at(10, [], "", "")) == [("a", "n1")]
    assert prefetches(policy, seen_at(11, ["n1 a"], "", "")) == [("b", "n0")]
    # n0 and n1 rest for twice the ten seconds that a model takes
    assert prefetches(policy, seen_at(29, ["n0 b", "n1 a"], "", "")) == []
    # a second copy of what is loaded three times counts half, as half of the time n1 may be busy
    assert prefetches(policy, seen_at(40, ["n0 b", "n1 a"], "", "")) == [("a", "n0")]


def test_a_copy_beside_others_counts_by_how_busy_their_nodes_are() -> None:
    policy = after_loads("aaab")
    view = seen_at(10, ["n0 a"], "", "")
    calm = replace(view, store=store(["n0 a"], room=1))
    assert prefetches(policy, calm) == [("a", "n1")]


def test_a_full_memory_takes_what_is_loaded_now_and_nothing_else() -> None:
    full = ["n0 c", "n0 d", "n1 c", "n1 d"]
    assert prefetches(after_loads("aaa"), seen_at(4, full, "", "")) == [("a", "n1")]
    assert prefetches(after_loads("aaa"), seen_at(4, ["n0 a", "n0 d", "n1 a", "n1 d"], "", "")) == []
    assert prefetches(after_loads("aaa"), seen_at(4000, full, "", "")) == []  # long ago
    assert prefetches(after_loads("aaa", least_uses=5.0), seen_at(4, full, "", "")) == []
    as_often = seen_at(8, ["n0 b", "n0 c", "n1 b", "n1 c"], "", "")
    assert prefetches(after_loads("aabbcc", least_gain=3.0), as_often) == []


def test_a_node_that_loads_or_is_read_is_left_alone() -> None:
    policy = after_loads("ab")
    assert prefetches(policy, seen_at(10, [], "", "", queued=1)) == []
    view = seen_at(11, [], "", "")
    loading = tuple(on(swapping_to(f"e{n}", "d"), node) for n, node in enumerate(NODES))
    assert prefetches(policy, replace(view, instances=loading)) == []
    first = (loading[0], view.instances[1])
    assert [node for _, node in prefetches(policy, replace(view, now_s=12.0, instances=first))] == ["n1"]


def test_copies_and_prefetches_under_way_are_bounded() -> None:
    assert prefetches(after_loads("aa", max_copies=1), seen_at(4, ["n0 a", "n1 b"], "", "")) != [("a", "n1")]
    one = after_loads("ab", at_once=1)
    assert len(prefetches(one, seen_at(10, [], "", ""))) == 1
    assert prefetches(one, seen_at(11, [], "", "")) == []
    assert len(prefetches(one, seen_at(21, [], "", ""))) == 1


def test_the_same_view_has_the_same_plan() -> None:
    policy, view = after_loads("abc"), seen_at(10, [], "", "")
    assert policy.plan(view) == policy.plan(view) != ()


def test_stores_without_nodes_or_with_one_tier_get_nothing() -> None:
    policy, view = after_loads("abc"), seen_at(10, [], "", "")
    shared = replace(view.store, tiers=tuple(replace(tier, node="") for tier in view.store.tiers[::2]))
    assert prefetches(policy, replace(view, store=shared)) == []
    assert prefetches(policy, replace(view, store=StoreView())) == []
    alone = replace(view.store, tiers=tuple(tier for tier in view.store.tiers if tier.name == "disk"))
    assert prefetches(policy, replace(view, store=alone)) == []


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fleet_views())
def test_the_inner_plan_comes_first_and_whole(view: FleetView) -> None:
    inner = KeepAliveSwap().plan(view)
    plan = PrePlacement(KeepAliveSwap()).plan(view)
    assert list(plan[: len(inner)]) == list(inner)
    assert all(isinstance(action, Prefetch) for action in plan[len(inner) :])
    assert len(plan) <= len(inner) + 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("half_life_s", 0),
        ("share", 0),
        ("share", 1.1),
        ("max_copies", 0),
        ("at_once", 0),
        ("least_gain", 0.5),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        PrePlacement(**{name: value})  # type: ignore[arg-type]  # wrong ones


def test_loads_come_from_memory_where_there_is_room() -> None:
    cluster = Cluster(num_engines=4, num_nodes=4, disk_bytes_per_s=1e9, max_requests=2)
    trace = generate(3, models=dict.fromkeys("abcdefgh", 1.0), rate_per_s=0.15, seconds=3000, cv=4)

    def share_of_host(scheduler: Scheduler) -> float:
        loads = [s for s in simulate(trace, cluster, scheduler=scheduler, driver="events").swaps if s.model]
        assert len(loads) > 50
        return sum(swap.tier == "host" for swap in loads) / len(loads)

    alone, ahead = share_of_host(StartupTimePlacement()), share_of_host(PrePlacement())
    assert 1 - ahead < 0.75 * (1 - alone)


def test_requests_that_wait_are_the_inner_schedulers() -> None:
    view = seen_at(10, [], "", "")
    view = replace(
        view,
        models=tuple(model(name, 1, waiting=1) if name == "d" else model(name) for name in "abcd"),
        waiting=(waiting("d", 9.0),),
    )
    plan = PrePlacement(KeepAliveSwap()).plan(view)
    assert list(plan[:1]) == list(KeepAliveSwap().plan(view))
