"""The spare capacity for requests of an instance that swaps: reserved once, and counted by size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hotswap import FleetView, InstanceId, InstanceState, InstanceView, ModelId, RequestId, RunningView
from hotswap.policies.schedulers.startup_time.capacity import SpareCapacity
from tests.policies.views import serving, swapping_to

A = ModelId("a")


def capacity_of(*instances: InstanceView, sizes: dict[str, int] | None = None) -> SpareCapacity:
    """With one running request of so many tokens on each of some instances."""
    runs = [
        RunningView(id=RequestId(f"r-{name}"), model=A, instance=InstanceId(name), num_tokens=size)
        for name, size in (sizes or {}).items()
    ]
    return SpareCapacity(FleetView(now_s=0.0, instances=instances, running=tuple(runs)), instances)


def with_places(name: str, places: int) -> InstanceView:
    return replace(serving(name, "a", 2), max_requests=2 + places)


def test_a_reserved_place_is_given_once() -> None:
    capacity = capacity_of(with_places("e0", 1), with_places("e1", 2))
    assert capacity.total(A) == 3
    assert [capacity.reserve(A) for _ in range(4)] == ["e1", "e0", "e1", None]
    assert capacity.total(A) == 0


def test_a_removed_replica_has_no_places() -> None:
    first, second = with_places("e0", 1), with_places("e1", 2)
    capacity = capacity_of(first, second)
    capacity.reserve(A)
    capacity.remove(second)
    assert (capacity.of(first), capacity.of(second), capacity.total(A)) == (1, 0, 1)
    assert [instance.id for instance in capacity.replicas(A)] == ["e0", "e1"]


@pytest.mark.parametrize(
    "leaving",
    [swapping_to("e1", "b", of="a"), replace(serving("e1", "a"), state=InstanceState.DRAINING)],
    ids=["turns away", "drains"],
)
def test_the_largest_request_counts_wherever_it_runs(leaving: InstanceView) -> None:
    small = replace(serving("e0", "a"), num_kv_blocks=8, num_free_kv_blocks=8, kv_block_tokens=16)
    assert capacity_of(small, leaving, sizes={"e1": 60}).of(small) == 2
    assert capacity_of(small, leaving, sizes={"e1": 128}).of(small) == 0
