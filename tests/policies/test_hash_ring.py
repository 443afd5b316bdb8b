"""Hosts are met in the order of their points, from wherever a walk begins."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import FleetView, InstanceId, InstanceState, InstanceView, ModelId
from hotswap.policies.routers.hash_ring import _Ring, clockwise

_M = ModelId("m")
_LAST = (1 << 64) - 1


def _fleet(*names: str) -> FleetView:
    hosts = (InstanceView(id=InstanceId(name), state=InstanceState.SERVING, model=_M) for name in names)
    return FleetView(now_s=0.0, instances=tuple(hosts))


@pytest.mark.parametrize(("num_instances", "virtual_nodes"), [(1, 1), (1, 64), (3, 5), (200, 64)])
def test_a_walk_begins_with_the_first_point_that_is_not_before(
    num_instances: int, virtual_nodes: int
) -> None:
    ring = _Ring(frozenset(InstanceId(f"e{n}") for n in range(num_instances)), virtual_nodes)
    points = list(ring._points)
    assert points == sorted(points)
    for point in points:
        for near in {max(0, point - 1), point, min(_LAST, point + 1)}:
            assert ring.first_from(near) == bisect_left(points, near)
    assert ring.first_from(0) == 0
    assert ring.first_from(_LAST) == bisect_left(points, _LAST)


@given(st.integers(0, _LAST))
def test_a_walk_goes_once_round(point: int) -> None:
    fleet = _fleet("a", "b", "c")
    walk = list(clockwise(point, _M, fleet, virtual_nodes=4))
    assert sorted(walk) == sorted(["a", "b", "c"] * 4)


def test_walks_with_other_numbers_of_points_and_on_other_fleets_are_their_own() -> None:
    one, two = _fleet("a", "b", "c"), _fleet("a", "b", "d")
    for fleet in (one, two, one):
        for virtual_nodes in (1, 8, 1):
            walk = set(clockwise(7, _M, fleet, virtual_nodes=virtual_nodes))
            assert walk == fleet.host_ids(_M)
            assert len(list(clockwise(7, _M, fleet, virtual_nodes=virtual_nodes))) == 3 * virtual_nodes
