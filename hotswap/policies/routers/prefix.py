"""Routing requests with the same prefix to the same replica, while the load is even."""

from __future__ import annotations

from dataclasses import dataclass

from hotswap.argument_kinds import check_arguments
from hotswap.errors import ConfigError
from hotswap.policies.routers.candidates import best_candidate, is_candidate
from hotswap.policies.routers.hash_ring import clockwise, point_of
from hotswap.policies.routers.imbalance import check_thresholds, imbalanced
from hotswap.policies.routers.least_loaded import by_load
from hotswap.policies.routers.least_time import LeastTimeRouter
from hotswap.request import Request
from hotswap.router import Router
from hotswap.view import CountRank, FleetView, InstanceId, InstanceView

__all__ = ["PrefixRouter"]


@check_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRouter(Router):
    """Sends requests with the same prefix to one replica, whose KV blocks they reuse, unless it is too busy.

    Source: the cache-aware router of SGLang. With `max` and `min` over the loads of the open replicas,

        imbalanced   if max - min > abs_threshold  and  max > rel_threshold * min
        imbalanced:  the replica with the fewest requests
        else:        the replica that most likely has the prefix

    **Readings.** SGLang keeps a tree of the texts that it sent to each worker. A router here has no memory
    and sees no caches, so *most likely has the prefix* means the replica that an earlier request with the
    prefix was sent to: the first whole blocks of the prompt, at most `num_blocks` of `block_tokens` each,
    choose a replica by consistent hashing, without a bound. A replica that comes or goes changes the place of
    its own prefixes alone. The match rate is not known either: a prompt with a whole block has a prefix, and
    a shorter prompt has none and goes to the replica with the fewest requests.

    As in SGLang, the guard looks at all open replicas, not at the chosen one alone. A request that the guard
    sends elsewhere leaves its prefix there, where later requests do not look.

    Set `num_blocks` to the length of the shared part, a system prompt for example. With more blocks, requests
    that share that part alone do not meet; with fewer, requests that share little meet too. Requests of
    different models or adapters share nothing.

    **With `time`** the guard counts seconds instead of requests, and the thresholds have no effect: eight
    prompts may take an engine milliseconds or a minute. Source: Qin et al., Mooncake, FAST 2025, Algorithm 1,
    the instance with the least

        TTFT = queue + prefill of the tokens that are not cached there

    with both terms as `time` estimates them. **Ours** is what counts as cached: the tokens of the blocks that
    choose the replica, on that replica alone. Algorithm 1 asks the caches and finds more. It also copies
    prefixes between instances; this router does not.

    Attributes:
        block_tokens: Tokens of a block.
        num_blocks: The most blocks that choose the replica.
        abs_threshold: The largest even difference in requests between the most and the least loaded replica.
        rel_threshold: The largest even ratio of the two.
        time: Estimates the time to first token; set its constants for the device.
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
        idlest = best_candidate(request, fleet, by_load)
        if idlest is None:
            return None
        num_tokens = self._num_hashed(request)
        busiest = best_candidate(request, fleet, _by_most_load) or idlest
        if not num_tokens or self._imbalanced(busiest.num_requests, idlest.num_requests):
            return idlest.id
        return self._prefix_replica(request, num_tokens, fleet, idlest).id

    def _soonest(self, request: Request, fleet: FleetView, time: LeastTimeRouter) -> InstanceId | None:
        soonest = time.soonest(request, fleet)
        num_tokens = self._num_hashed(request)
        if not num_tokens or soonest is None:
            return soonest.id if soonest else None
        replica = self._prefix_replica(request, num_tokens, fleet, soonest)
        expected_s = time.expected_s(request, replica, fleet, num_cached=num_tokens)
        return replica.id if expected_s <= time.expected_s(request, soonest, fleet) else soonest.id

    def _num_hashed(self, request: Request) -> int:
        """The tokens of the blocks that choose the replica."""
        return min(len(request.prompt) // self.block_tokens, self.num_blocks) * self.block_tokens

    def _prefix_replica(
        self, request: Request, num_tokens: int, fleet: FleetView, other: InstanceView
    ) -> InstanceView:
        """The candidate that most likely has the prefix; `other` is the best candidate by some rank."""
        point = point_of(request.model, request.adapter, tokens=request.prompt[:num_tokens])
        hosts = (fleet.instance(name) for name in clockwise(point, request.model, fleet))
        return next(host for host in hosts if is_candidate(host, request, like=other))

    def _imbalanced(self, busiest: int, idlest: int) -> bool:
        return imbalanced(busiest, idlest, abs_threshold=self.abs_threshold, rel_threshold=self.rel_threshold)


@dataclass(frozen=True, slots=True)
class _ByMostLoad(CountRank):
    """Ranks open instances by their number of requests, the most first."""

    def count(self, instance: InstanceView) -> tuple[bool, int] | None:
        return (instance.swapping, -instance.num_requests) if instance.open else None


_by_most_load = _ByMostLoad()
