"""Routing by consistent hashing with bounded loads: requests of a kind meet, and nobody gets far too many."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from struct import unpack
from typing import Literal, TypeAlias

from hotswap.errors import ConfigError
from hotswap.policies.least_loaded import candidates
from hotswap.request import Request
from hotswap.router import Router
from hotswap.view import FleetView, InstanceId

__all__ = ["ConsistentHashRouter", "RoutingKey"]

RoutingKey: TypeAlias = Literal["prefix", "adapter"] | Callable[[Request], str]

_POINTS_PER_DIGEST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsistentHashRouter(Router):
    """Sends requests with the same key to the same replica, until that one has more than its share.

    Source: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads", arXiv:1608.01350,
    section 1. Instances and keys are points on a circle. A key goes to the first instance clockwise that has
    fewer requests than

        capacity = ceil(c (m + 1) / n)      n candidates, m requests at them, 1 for the one that is routed

    so right after a request was placed its instance has no more than `ceil(c * average)`. Some candidate is
    always below, since n times the capacity is over m. `c=inf` is consistent hashing without a bound. An
    instance that comes or goes changes the way of the keys that are next to it alone; with a small `c` some
    more are pushed on by them, O(1 / (c - 1)^2) for each in expectation.

    **The key** is `"prefix"`, the first `prefix_tokens` tokens of the prompt with model and adapter, so that
    requests meet the KV blocks of those before them; `"adapter"`, model and adapter alone, so that an adapter
    is held in few places (requests without one share a key); or a function from a request to text, which the
    model is added to. It must be pure.

    **Readings.**

    - Candidates are the open replicas of the request's model, as for every router here. Those that are full
      by their own `max_requests` are walked past and do not count in n and m.
    - The paper moves balls when others leave. A router moves nothing: where requests end elsewhere the
      capacity falls, and an instance that is over it takes nobody on until it is below again.

    **Ours, not the paper's:**

    - The circle has all instances of the fleet, whatever they serve, and the walk goes past those that are no
      candidates. That gives each key the same order of replicas as a circle of candidates would, and swaps
      and full instances change nothing in it: it is made once for a set of instances.
    - Each instance has `virtual_nodes` points, so that what it leaves is spread over the others. A thousand
      instances of 64 take a tenth of a second, once.
    - Points are BLAKE2b of ids, keys of values: the same in every process, on every machine.
    """

    key: RoutingKey = "prefix"
    prefix_tokens: int = 64
    c: float = 1.25
    virtual_nodes: int = 64

    def __post_init__(self) -> None:
        if not callable(self.key) and str(self.key) not in ("prefix", "adapter"):
            raise ConfigError(f"key is {self.key!r}; give 'prefix', 'adapter' or a function of a request.")
        if self.prefix_tokens < 1:
            raise ConfigError(f"prefix_tokens is {self.prefix_tokens!r}; give 1 or more tokens.")
        if not self.c >= 1:
            raise ConfigError(f"c is {self.c!r}; give 1 (even) or more times the mean load, or inf.")
        if self.virtual_nodes < 1:
            raise ConfigError(f"virtual_nodes is {self.virtual_nodes!r}; give 1 or more points.")

    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        replicas = candidates(request, fleet)
        if not replicas:
            return None
        # A whole number is below a ceiling where it is below what was rounded up.
        capacity = self.c * (sum(i.num_requests for i in replicas) + 1) / len(replicas)
        below = {i.id for i in replicas if i.num_requests < capacity}
        if len(below) == 1:
            return below.pop()
        points, owners = _ring(fleet.ids, self.virtual_nodes)
        start = bisect_left(points, _hash(self._key(request)))
        # From `start` once round: indices below zero count from the end.
        return next(owners[at] for at in range(start - len(owners), start) if owners[at] in below)

    def _key(self, request: Request) -> str:
        if callable(self.key):
            return repr((request.model, self.key(request)))
        tokens = request.prompt[: self.prefix_tokens] if self.key == "prefix" else ()
        return repr((request.model, request.adapter, tokens))


@lru_cache(maxsize=8)
def _ring(
    instances: frozenset[InstanceId], virtual_nodes: int
) -> tuple[tuple[int, ...], tuple[InstanceId, ...]]:
    """Return the points of the circle in order, and whose they are; two at one point: the smaller id's."""
    owners = {
        point: instance
        for instance in sorted(instances, reverse=True)
        for point in _points(instance, virtual_nodes)
    }
    points = tuple(sorted(owners))
    return points, tuple(owners[point] for point in points)


@lru_cache(maxsize=4096)
def _points(instance: InstanceId, virtual_nodes: int) -> tuple[int, ...]:
    num_digests = -(-virtual_nodes // _POINTS_PER_DIGEST)
    digests = b"".join(blake2b(f"{n}:{instance}".encode()).digest() for n in range(num_digests))
    return unpack(f"<{virtual_nodes}Q", digests[: 8 * virtual_nodes])


def _hash(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")
