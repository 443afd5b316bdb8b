"""Routing requests with the same beginning to the same replica, while the fleet is even."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from hotswap.errors import ConfigError
from hotswap.policies.balance import check_thresholds, imbalanced
from hotswap.policies.least_loaded import by_load, candidates, first
from hotswap.request import Request
from hotswap.router import Router
from hotswap.view import FleetView, InstanceId

__all__ = ["PrefixRouter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRouter(Router):
    """Sends requests that begin alike to one replica, whose KV blocks they reuse, unless it makes them wait.

    Source: the cache-aware router of SGLang. With `max` and `min` over the loads of the open replicas,

        imbalanced   if max - min > abs_threshold  and  max > rel_threshold * min
        imbalanced:  the replica with the fewest requests
        else:        the replica that most likely has the prefix

    **Readings.** SGLang keeps a tree of the texts that it sent to each worker. A router here remembers
    nothing and sees no caches, so *most likely has the prefix* is where an earlier request with it would have
    been sent: the first whole blocks of the prompt, `num_blocks` at most of `block_tokens` each, choose
    a replica by highest random weight (Thaler and Ravishankar, 1998). A replica that comes or goes takes or
    leaves its own prefixes alone. The rate of matching is not known either: a prompt with a whole block has
    a prefix, a shorter one has none and goes to the replica with the fewest requests.

    The guard looks at all open replicas, as there, not at the chosen one alone. Requests that went elsewhere
    under it leave their prefix there, which is not found again.

    Give `num_blocks` the length of what is shared, a system prompt for example: with more, requests that
    share that alone do not meet; with fewer, requests that share little meet too. Requests of different
    models or adapters share nothing. A route hashes once for each open replica.
    """

    block_tokens: int = 16
    num_blocks: int = 4
    abs_threshold: float = 8
    rel_threshold: float = 1.5

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ConfigError(f"block_tokens is {self.block_tokens!r}; give 1 or more tokens.")
        if self.num_blocks < 1:
            raise ConfigError(f"num_blocks is {self.num_blocks!r}; give 1 or more blocks.")
        check_thresholds(self.abs_threshold, self.rel_threshold)

    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        replicas = candidates(request, fleet)
        idlest = first(request, fleet, by_load)
        if idlest is None:
            return None
        num_blocks = min(len(request.prompt) // self.block_tokens, self.num_blocks)
        busiest = max(i.num_requests for i in replicas)
        if not num_blocks or self._imbalanced(busiest, idlest.num_requests):
            return idlest.id
        prefix = _digest(request, num_blocks * self.block_tokens)
        return max((_weight(prefix, i.id), i.id) for i in replicas)[1]

    def _imbalanced(self, busiest: int, idlest: int) -> bool:
        return imbalanced(busiest, idlest, abs_threshold=self.abs_threshold, rel_threshold=self.rel_threshold)


def _digest(request: Request, num_tokens: int) -> bytes:
    beginning = request.model, request.adapter, request.prompt[:num_tokens]
    return blake2b(repr(beginning).encode(), digest_size=16).digest()


def _weight(prefix: bytes, instance: InstanceId) -> bytes:
    return blake2b(prefix + instance.encode(), digest_size=8).digest()
