"""Routing by consistent hashing with bounded loads: equal keys meet, and no replica is overloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Literal, TypeAlias

from hotswap.argument_kinds import check_arguments
from hotswap.errors import ConfigError
from hotswap.policies.routers.candidates import can_hold, candidates
from hotswap.policies.routers.hash_ring import VIRTUAL_NODES, clockwise, point_of
from hotswap.request import Request
from hotswap.router import Router
from hotswap.view import CountRank, FleetView, InstanceId, InstanceView

__all__ = ["ConsistentHashRouter", "RoutingKey"]

RoutingKey: TypeAlias = Literal["prefix", "adapter"] | Callable[[Request], str]


@check_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class ConsistentHashRouter(Router):
    """Sends requests with the same key to the same replica, until that one has more than its share.

    Source: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads", arXiv:1608.01350,
    section 1. Instances and keys are points on a ring. A key goes to the first instance clockwise that has
    fewer requests than

        capacity = ceil(c (m + 1) / n)      n candidates, m requests on them, 1 for the request to route

    so its instance has no more than `ceil(c * average)` requests right after it was placed. Some candidate is
    always below the capacity, since n times the capacity is over m. `c=inf` is consistent hashing without a
    bound. An instance that comes or goes moves the keys next to its points alone; with a small `c` these push
    some more on, O(1 / (c - 1)^2) each in expectation.

    **The key** is one of

    - `"prefix"`: the first `prefix_tokens` tokens of the prompt, with model and adapter, so that a request
      finds the KV blocks of earlier ones;
    - `"adapter"`: model and adapter alone, so that few replicas hold an adapter (requests without an adapter
      share a key);
    - a pure function from a request to text, to which the model is added.

    **Readings.**

    - Candidates are the open replicas of the request's model, as for every router here. Replicas that are
      full by their own `max_requests` are skipped, and do not count in n and m.
    - The paper moves balls when others leave. A router moves nothing: when requests end elsewhere the
      capacity falls, and an instance above it gets no request until it is below again.

    **Ours, not the paper's:**

    - The walk skips instances that are no candidates. Each key so has the same order of replicas as on a ring
      of candidates, and no swap or full instance changes that order.
    - Each instance has `virtual_nodes` points, so that the keys of one that goes are spread over the others.
      A thousand instances with 64 points take a tenth of a second, once.
    - Points are BLAKE2b of ids, and keys BLAKE2b of values: the same in every process, on every machine.

    A route costs the steps of its walk, not the size of the fleet: the number of candidates and of their
    requests is kept from request to request. All replicas are looked at only if one could not hold the
    request.
    """

    key: RoutingKey = "prefix"
    prefix_tokens: int = 64
    c: float = 1.25
    virtual_nodes: int = VIRTUAL_NODES

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
        walk = clockwise(self._point(request), request.model, fleet, virtual_nodes=self.virtual_nodes)
        num_keeping, num_requests = fleet.total(request.model, _requests_unless_swapping)
        smallest = fleet.min_by(request.model, _by_size)
        if num_keeping and smallest is not None and can_hold(smallest, request):
            capacity = self._capacity(num_requests, num_keeping)
            for name in walk:
                instance = fleet.instance(name)
                if instance.num_requests < capacity and instance.open and not instance.swapping:
                    return name
        replicas = {instance.id: instance.num_requests for instance in candidates(request, fleet)}
        if not replicas:
            return None
        capacity = self._capacity(sum(replicas.values()), len(replicas))
        return next(name for name in walk if name in replicas and replicas[name] < capacity)

    def _capacity(self, num_requests: int, num_candidates: int) -> float:
        """The bound that a candidate must be below; not rounded up, as no whole number lies between."""
        return self.c * (num_requests + 1) / num_candidates

    def _point(self, request: Request) -> int:
        if callable(self.key):
            return point_of(request.model, self.key(request))
        tokens = request.prompt[: self.prefix_tokens] if self.key == "prefix" else ()
        return point_of(request.model, request.adapter, tokens=tokens)


def _requests_unless_swapping(instance: InstanceView) -> int | None:
    return instance.num_requests if instance.open and not instance.swapping else None


class _BySize(CountRank):
    """Ranks by the largest request that an instance can hold, on which load has no influence."""

    def count(self, instance: InstanceView) -> float:
        return inf if instance.max_tokens is None else instance.max_tokens


_by_size = _BySize()
