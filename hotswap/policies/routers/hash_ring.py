"""A consistent-hashing ring of instances: a key meets the same ones, whichever others come or go."""

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
# A model with at most so many hosts, in a fleet with so many times more instances, has a ring of its own. The
# hosts of other models are found soon on the ring of all instances, which no swap changes.
_FEW, _TIMES = 64, 16


def point_of(*names: str | None, tokens: Sequence[int] = ()) -> int:
    """Return the position of a key on the ring: the same in every process, on every machine."""
    key = repr(names).encode()
    try:
        key += _layout(len(tokens)).pack(*tokens)
    except error:  # not valid tokens, but the engine is to refuse them
        key += repr(tokens).encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")


@lru_cache(maxsize=256)
def _layout(num_tokens: int) -> Struct:
    return Struct(f"<{num_tokens}q")


def clockwise(
    point: int, model: ModelId, fleet: FleetView, *, virtual_nodes: int = VIRTUAL_NODES
) -> Iterator[InstanceId]:
    """Yield the hosts of a model clockwise from a point, once round the ring; each several times.

    Source: Karger et al., "Consistent Hashing and Random Trees", STOC 1997. Each instance has `virtual_nodes`
    points, so that the keys of one that goes are spread over the others. The order of the hosts is that of a
    ring of them alone, so a host that comes or goes moves the keys next to its points and no others.

    A ring is built once for a set of instances: a thousand instances with 64 points take a tenth of a second,
    and a megabyte while they are in use.
    """
    hosts = fleet.host_ids(model)
    few = len(hosts) <= _FEW and len(hosts) * _TIMES < len(fleet.ids)
    ring = _of_few(hosts, virtual_nodes) if few else _of_all(fleet.ids, virtual_nodes)
    owners, start = ring.owners, ring.first_from(point)
    # Once round from `start`: negative indices count from the end.
    for at in range(start - len(owners), start):
        if (owner := owners[at]) in hosts:
            yield owner


class _Ring:
    """The sorted points of some instances with their owners; of two at one point the smaller id owns it."""

    __slots__ = ("_bits", "_points", "_starts", "owners")

    def __init__(self, instances: frozenset[InstanceId], virtual_nodes: int) -> None:
        owner_of = {
            point: instance
            for instance in sorted(instances, reverse=True)
            for point in _points(instance, virtual_nodes)
        }
        points = self._points = array("Q", sorted(owner_of))
        self.owners = tuple(owner_of[point] for point in points)
        # Points are spread evenly, so arcs of equal size have few each, and a lookup searches one arc.
        self._bits = (len(points) // _POINTS_PER_ARC).bit_length()
        arcs = range(1 << self._bits)
        self._starts = [*(bisect_left(points, arc << _POINT_BITS - self._bits) for arc in arcs), len(points)]

    def first_from(self, point: int) -> int:
        """The index of the first point that is not before this one; the number of points if there is none."""
        arc = point >> _POINT_BITS - self._bits
        return bisect_left(self._points, point, self._starts[arc], self._starts[arc + 1])


class _Rings:
    """A cache of rings by set of instances and number of virtual nodes.

    A view returns the same set object until an instance comes or goes, so the cache looks it up by identity:
    to compare two sets would take longer than the rest of a route.
    """

    def __init__(self, max_rings: int) -> None:
        self._max_rings = max_rings
        self._made = lru_cache(max_rings)(_Ring)
        self._known: dict[tuple[int, int], tuple[frozenset[InstanceId], _Ring]] = {}

    def __call__(self, instances: frozenset[InstanceId], virtual_nodes: int) -> _Ring:
        key = id(instances), virtual_nodes
        known = self._known.get(key)
        if known is None:  # the set is kept with its ring, so no other object can have its id
            if len(self._known) >= self._max_rings:
                self._known.clear()
            known = self._known[key] = instances, self._made(instances, virtual_nodes)
        return known[1]


_of_all, _of_few = _Rings(8), _Rings(1024)


@lru_cache(maxsize=16384)
def _points(instance: InstanceId, virtual_nodes: int) -> tuple[int, ...]:
    num_digests = -(-virtual_nodes // _POINTS_PER_DIGEST)
    digests = b"".join(blake2b(f"{n}:{instance}".encode()).digest() for n in range(num_digests))
    return unpack(f"<{virtual_nodes}Q", digests[: 8 * virtual_nodes])
