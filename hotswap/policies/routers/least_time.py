"""Routing by the expected time to first token."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from hotswap.argument_kinds import check_arguments
from hotswap.errors import ConfigError
from hotswap.policies.resume_costs import num_kept
from hotswap.policies.routers.candidates import can_hold, candidates, is_candidate
from hotswap.policies.routers.least_loaded import by_load
from hotswap.request import AdapterId, Request
from hotswap.router import Router
from hotswap.view import FleetView, InstanceId, InstanceState, InstanceView, WaitingView

__all__ = ["LeastTimeRouter"]

# Up to so many hosts are looked at one by one; more are kept in order.
_FEW = 8
# After so many hosts in order the router looks at all of them instead.
_MANY = 64
# The relative error of a sum of seconds that is added up in another order.
_ROUNDING = 1e-9


@check_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class LeastTimeRouter(Router):
    """Sends a request to the open replica of its model with the least expected time to first token.

    The multi-model post orders instances by the time they need first (model and adapter resident, 0; model
    resident, 15 ms; model in a warm tier, 2.5 s; cold, 23 s). This router turns that order into a sum of
    seconds that includes queues:

        T = tokens / prefill_tokens_per_s          the request's own, and those to be computed before them
          + steps * num_running * request_s        decodes that share these steps
          + copied * restore_token_s               tokens that are copied from the KV store
          + adapter_s                              if the adapter is not resident
          + blocks_s                               if fewer KV blocks are free than the tokens need

    `steps` is `tokens / step_tokens`, rounded up. So an adapter's holder is passed over when another replica
    saves more time than the adapter's load takes, a long prompt counts by its length, and no threshold is
    needed. Ties go to the node that has the request's KV blocks (`WaitingView.stored_node`), if they are to
    be copied, else as in `LeastLoadedRouter`. Among more than eight replicas a tie goes to one whose engine
    has seen all its requests, if there is one, and sums that differ by less than a billionth may count as
    equal.

    With many replicas the router looks at few. They are kept sorted by the time of a smaller request. A
    larger request needs the time of its additional tokens on every replica, so once a replica is later than
    the best by that much, all replicas behind it are later too. All are looked at during a burst between two
    steps of the engines, and for a request with an adapter, since the order does not know adapters.

    **Ours:** the whole sum, and its constants, which are rough figures of an 8B model on a recent GPU;
    measure your own. A request that the fleet has assigned and the engine has not seen yet counts with as
    many tokens as the request to route, so that a burst is spread. Of the request's own tokens those are not
    computed that the KV store has, if copies are sooner (`TimesView.restore_token_s`), nor those of which the
    instance that it left last still has KV blocks (`InstanceView.kept_since_s`): there is nothing copied
    either. A view does not know what else a prefix cache would save. Swaps are up to the scheduler: if no
    replica is open the answer is `None`, however soon one will be.

    Attributes:
        prefill_tokens_per_s: Prompt tokens that an instance computes per second.
        step_tokens: Token budget of a step.
        request_s: Seconds that one more running request adds to a step.
        adapter_s: Seconds to load an adapter.
        blocks_s: Seconds until enough KV blocks are free, where too few are.
        swap_s: Seconds of a swap besides reading the weights; used by `expected_s` alone.
    """

    prefill_tokens_per_s: float = 20_000.0
    step_tokens: int = 2048
    request_s: float = 0.0002
    adapter_s: float = 0.015
    blocks_s: float = 1.0
    swap_s: float = 0.2

    def __post_init__(self) -> None:
        if not self.prefill_tokens_per_s > 0:
            raise ConfigError(
                f"prefill_tokens_per_s is {self.prefill_tokens_per_s!r}; give tokens a second over 0."
            )
        if self.step_tokens < 1:
            raise ConfigError(f"step_tokens is {self.step_tokens!r}; give 1 or more tokens.")
        for name in ("request_s", "adapter_s", "blocks_s", "swap_s"):
            if not 0 <= getattr(self, name) < inf:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give 0 or more seconds, finite.")

    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        instance = self.soonest(request, fleet)
        return instance.id if instance else None

    def soonest(self, request: Request, fleet: FleetView) -> InstanceView | None:
        """Return the instance that `route` names, for routers that compare it with another."""
        waiting = _waiting(request, fleet)
        num_computed, copy_s = self._resume(request, waiting, fleet)
        soonest = self._soonest(request, num_computed, fleet)
        if soonest is not None and waiting is not None and num_computed < request.num_tokens:
            soonest = self._nearest(request, num_computed, waiting, soonest, fleet)
        if soonest is None or waiting is None or (left := waiting.last_instance) is None:
            return soonest
        if left not in fleet.ids:
            return soonest
        last = fleet.instance(left)
        if not (kept := num_kept(waiting, last)) or not is_candidate(last, request, like=soonest):
            return soonest
        last_s = self._here_s(request, request.num_tokens - kept, last)
        return last if last_s <= self._here_s(request, num_computed, soonest) + copy_s else soonest

    def _nearest(
        self,
        request: Request,
        num_computed: int,
        waiting: WaitingView,
        soonest: InstanceView,
        fleet: FleetView,
    ) -> InstanceView:
        """Of the instances that are as soon, one on the node that has the request's KV blocks."""
        if waiting.stored_node in ("", soonest.node):
            return soonest
        least_s = self._here_s(request, num_computed, soonest)
        near = [
            i
            for i in candidates(request, fleet)
            if i.node == waiting.stored_node and self._here_s(request, num_computed, i) <= least_s
        ]
        return min(near, key=_load, default=soonest)

    def _soonest(self, request: Request, num_computed: int, fleet: FleetView) -> InstanceView | None:
        """The candidate that is soonest if each computes so many of the request's tokens."""
        if request.adapter is None and len(fleet.host_ids(request.model)) > _FEW:
            soonest = self._soonest_of_many(request, num_computed, fleet)
            if soonest is not None:
                return soonest
        seconds = [(self._here_s(request, num_computed, i), i) for i in candidates(request, fleet)]
        least_s = min((s for s, _ in seconds), default=inf)
        return min((i for s, i in seconds if s == least_s), key=_load, default=None)

    def _soonest_of_many(self, request: Request, num_computed: int, fleet: FleetView) -> InstanceView | None:
        """Look at hosts in the order of a smaller request's time, until all others must be later.

        `None` if that would take many hosts, and if no host that keeps its model is large enough.
        """
        size = _size(num_computed)
        more_s = (num_computed - size) / self.prefill_tokens_per_s
        best: InstanceView | None = None
        standing: tuple[float, Any] = (inf, ())
        num_seen = 0
        for has_unseen in (False, True):
            if (1 + has_unseen) * num_computed / self.prefill_tokens_per_s >= standing[0]:
                break
            for instance in fleet.ranked(request.model, _ByTime(self, size, has_unseen)):
                if best is not None:
                    at_least_s = _here_s(self, size, size, None, instance) + (1 + has_unseen) * more_s
                    if at_least_s >= standing[0] * (1 - _ROUNDING):
                        break
                if (num_seen := num_seen + 1) > _MANY:
                    return None
                if can_hold(instance, request):
                    found = self._here_s(request, num_computed, instance), _load(instance)
                    best, standing = (instance, found) if found < standing else (best, standing)
        return best

    def expected_s(
        self, request: Request, instance: InstanceView, fleet: FleetView, *, num_cached: int = 0
    ) -> float:
        """Return the expected time to first token on any instance, with a swap if one is needed.

        A swap takes `swap_s` and, unless the model is preloaded there, the seconds in which the store reads
        it (`StoreView.load_s`). Infinite for an instance that serves another model and cannot swap, and for a
        model that the store does not have. Of the first `num_cached` tokens those are not computed either
        that must be anywhere else.
        """
        waiting = _waiting(request, fleet)
        num_computed, copy_s = self._resume(request, waiting, fleet)
        if waiting is not None and (kept := num_kept(waiting, instance)):
            num_computed, copy_s = request.num_tokens - kept, 0.0
        cached_s = max(0, num_cached + num_computed - request.num_tokens) / self.prefill_tokens_per_s
        if instance.state is InstanceState.SERVING and instance.model == request.model:
            return self._here_s(request, num_computed, instance) + copy_s - cached_s
        if not instance.free:
            return inf
        store = fleet.store.seen_from(instance.node)
        load_s = 0.0 if instance.preloaded == request.model else store.load_s(request.model)
        adapter_s = 0.0 if request.adapter is None else self.adapter_s
        prefill_s = num_computed / self.prefill_tokens_per_s
        return self.swap_s + load_s + adapter_s + prefill_s + copy_s - cached_s

    def _resume(self, request: Request, waiting: WaitingView | None, fleet: FleetView) -> tuple[int, float]:
        """How many tokens are computed where none are, and the seconds in which the others are copied."""
        token_s = fleet.times.restore_token_s if waiting is not None and waiting.stored_tokens else inf
        if waiting is None or token_s * self.prefill_tokens_per_s >= 1:
            return request.num_tokens, 0.0
        num_copied = min(waiting.stored_tokens, request.num_tokens - 1)
        return request.num_tokens - num_copied, num_copied * token_s

    def _here_s(self, request: Request, num_computed: int, instance: InstanceView) -> float:
        return _here_s(self, num_computed, request.num_tokens, request.adapter, instance)


def _waiting(request: Request, fleet: FleetView) -> WaitingView | None:
    """What is known of a request that may have tokens somewhere: it was there, or others' were restored."""
    may_have = request.generated or fleet.times.restore_token_s
    return fleet.waiting_request(request.id) if may_have else None


def _here_s(
    time: LeastTimeRouter,
    num_computed: int,
    num_tokens: int,
    adapter: AdapterId | None,
    instance: InstanceView,
) -> float:
    """The expected time to first token of a request with `num_tokens`, of which `num_computed` are computed.

    Never less for more of either.
    """
    queued = instance.num_prefill_tokens + (_num_unseen(instance) + 1) * num_computed
    num_steps = -(-queued // time.step_tokens)
    seconds = queued / time.prefill_tokens_per_s + num_steps * instance.num_running * time.request_s
    if adapter is not None and adapter not in instance.adapters:
        seconds += time.adapter_s
    free_tokens = instance.num_free_kv_blocks * instance.kv_block_tokens
    if instance.num_kv_blocks and free_tokens < num_tokens:
        seconds += time.blocks_s
    return seconds


def _load(instance: InstanceView) -> Any:
    return by_load(instance)


def _size(num_tokens: int) -> int:
    """Return the largest power of 4 up to `num_tokens`: requests of similar size share one order."""
    return 1 << (max(num_tokens, 1).bit_length() - 1 & ~1)


def _num_unseen(instance: InstanceView) -> int:
    """Return how many requests the fleet assigned to an instance that its engine has not seen yet."""
    return max(instance.num_requests - instance.num_running - instance.num_waiting, 0)


@dataclass(frozen=True, slots=True)
class _ByTime:
    """Ranks open instances that keep their model by the time of a request with `num_tokens`, then by load.

    Instances with and without unseen requests are ranked apart. An unseen request counts as large as the
    request to route, so a larger one delays the instances that have any by more.
    """

    time: LeastTimeRouter
    num_tokens: int
    has_unseen: bool

    def __hash__(self) -> int:
        return hash((self.num_tokens, self.has_unseen))  # computed at every route

    def __call__(self, instance: InstanceView) -> tuple[float, Any] | None:
        if not instance.open or instance.swapping or (_num_unseen(instance) > 0) is not self.has_unseen:
            return None
        return _here_s(self.time, self.num_tokens, self.num_tokens, None, instance), by_load(instance)
