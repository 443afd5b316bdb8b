"""Routing requests with the same beginning to the same replica, while the fleet is even."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from hotswap.errors import ConfigError
from hotswap.policies.balance import check_thresholds, imbalanced
from hotswap.policies.least_loaded import by_load, candidates, first
from hotswap.policies.least_time import LeastTimeRouter
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

    **With `time`** the guard counts seconds, not requests, and the thresholds do not matter: eight prompts
    may take an engine milliseconds or a minute. Source: Qin et al., Mooncake, FAST 2025, Algorithm 1, the
    instance with the least

        TTFT = queue + prefill of what of the prompt is not found there

    with the two as `time` expects them. Ours is what counts as found: the tokens of the blocks that choose
    the replica, there alone. Algorithm 1 asks the caches and finds more, and it also copies prefixes from one
    instance to another; here nothing is copied.

    Attributes:
        block_tokens: Tokens of a block.
        num_blocks: Blocks that choose the replica, at most.
        abs_threshold: Requests between the most and the least loaded that are still even.
        rel_threshold: The ratio of the two that is still even.
        time: Expects the time to the first token; its constants are those of the device.
    """

    block_tokens: int = 16
    num_blocks: int = 4
    abs_threshold: float = 8
    rel_threshold: float = 1.5
    time: LeastTimeRouter | None = None

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ConfigError(f"block_tokens is {self.block_tokens!r}; give 1 or more tokens.")
        if self.num_blocks < 1:
            raise ConfigError(f"num_blocks is {self.num_blocks!r}; give 1 or more blocks.")
        check_thresholds(self.abs_threshold, self.rel_threshold)

    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        if self.time is not None:
            return self._soonest(request, fleet, self.time)
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

    def _soonest(self, request: Request, fleet: FleetView, time: LeastTimeRouter) -> InstanceId | None:
        num_tokens = min(len(request.prompt) // self.block_tokens, self.num_blocks) * self.block_tokens
        replicas = candidates(request, fleet)
        if not num_tokens or not replicas:
            return time.route(request, fleet)
        prefix = _digest(request, num_tokens)
        home = max(replicas, key=lambda instance: (_weight(prefix, instance.id), instance.id))
        home_s = time.expected_s(request, home, fleet) - num_tokens / time.prefill_tokens_per_s
        if all(home_s <= time.expected_s(request, instance, fleet) for instance in replicas):
            return home.id
        return time.route(request, fleet)

    def _imbalanced(self, busiest: int, idlest: int) -> bool:
        return imbalanced(busiest, idlest, abs_threshold=self.abs_threshold, rel_threshold=self.rel_threshold)


def _digest(request: Request, num_tokens: int) -> bytes:
    beginning = request.model, request.adapter, request.prompt[:num_tokens]
    return blake2b(repr(beginning).encode(), digest_size=16).digest()


def _weight(prefix: bytes, instance: InstanceId) -> bytes:
    return blake2b(prefix + instance.encode(), digest_size=8).digest()
