"""Instances as points on a ring, on which a key finds the same ones whoever else comes or goes."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from struct import Struct, error, unpack

from hotswap.request import ModelId
from hotswap.view import FleetView, InstanceId

__all__ = ["VIRTUAL_NODES", "clockwise", "point_of"]

VIRTUAL_NODES = 64
_POINT_BITS = 64
# Points between two that a search begins with, in the mean: a few lines of the cache.
_POINTS_PER_ARC = 16
_POINTS_PER_DIGEST = 8
# A model with few hosts in a fleet with so many times more has a ring of its own. Other models' hosts are
# soon met on the ring of all instances, which no swap changes.
_FEW, _TIMES = 64, 16


def point_of(*names: str | None, tokens: Sequence[int] = ()) -> int:
    """Return where a key lies: the same in every process, on every machine."""
    key = repr(names).encode()
    try:
        key += _layout(len(tokens)).pack(*tokens)
    except error:  # no engine has such tokens, but that is for engines to say
        key += repr(tokens).encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")


@lru_cache(maxsize=256)
def _layout(num_tokens: int) -> Struct:
    return Struct(f"<{num_tokens}q")


def clockwise(
    point: int, model: ModelId, fleet: FleetView, *, virtual_nodes: int = VIRTUAL_NODES
) -> Iterator[InstanceId]:
    """Return the hosts of a model as they are met from a point on, once round; each several times.

    Source: Karger et al., "Consistent Hashing and Random Trees", STOC 1997. Each instance has `virtual_nodes`
    points, so that what it leaves is spread over the others. The order of hosts is that of a ring of them
    alone, so those that come or go change the way of the keys next to them and no other.

    A ring is made once for a set of instances: a thousand of 64 points take a tenth of a second, and a
    megabyte while they are of use.
    """
    hosts = fleet.host_ids(model)
    few = len(hosts) <= _FEW and len(hosts) * _TIMES < len(fleet.ids)
    ring = _of_few(hosts, virtual_nodes) if few else _of_all(fleet.ids, virtual_nodes)
    owners, start = ring.owners, ring.first_from(point)
    # From `start` once round: indices below zero count from the end.
    for at in range(start - len(owners), start):
        if (owner := owners[at]) in hosts:
            yield owner


class _Ring:
    """The points of some instances in order, and whose they are; two at one point: the smaller id's."""

    __slots__ = ("_bits", "_points", "_starts", "owners")

    def __init__(self, instances: frozenset[InstanceId], virtual_nodes: int) -> None:
        owner_of = {
            point: instance
            for instance in sorted(instances, reverse=True)
            for point in _points(instance, virtual_nodes)
        }
        points = self._points = array("Q", sorted(owner_of))
        self.owners = tuple(owner_of[point] for point in points)
        # Points are spread evenly: arcs of one size have few each, and where these begin is found at once.
        self._bits = (len(points) // _POINTS_PER_ARC).bit_length()
        arcs = range(1 << self._bits)
        self._starts = [*(bisect_left(points, arc << _POINT_BITS - self._bits) for arc in arcs), len(points)]

    def first_from(self, point: int) -> int:
        """The index of the first point that is not before this one; their number if there is none."""
        arc = point >> _POINT_BITS - self._bits
        return bisect_left(self._points, point, self._starts[arc], self._starts[arc + 1])


class _Rings:
    """Keeps the rings of some sets of instances, for each number of virtual nodes.

    A view gives the same set until somebody comes or goes, and it is known again by being the same: that two
    sets are equal would take longer to see than the rest of a route.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._made = lru_cache(most)(_Ring)
        self._known: dict[tuple[int, int], tuple[frozenset[InstanceId], _Ring]] = {}

    def __call__(self, instances: frozenset[InstanceId], virtual_nodes: int) -> _Ring:
        key = id(instances), virtual_nodes
        known = self._known.get(key)
        if known is None:  # it is kept, so nothing else has its id
            if len(self._known) >= self._most:
                self._known.clear()
            known = self._known[key] = instances, self._made(instances, virtual_nodes)
        return known[1]


_of_all, _of_few = _Rings(8), _Rings(1024)


@lru_cache(maxsize=16384)
def _points(instance: InstanceId, virtual_nodes: int) -> tuple[int, ...]:
    num_digests = -(-virtual_nodes // _POINTS_PER_DIGEST)
    digests = b"".join(blake2b(f"{n}:{instance}".encode()).digest() for n in range(num_digests))
    return unpack(f"<{virtual_nodes}Q", digests[: 8 * virtual_nodes])
