"""Routing to where the first token comes soonest."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from hotswap.errors import ConfigError
from hotswap.policies.least_loaded import candidates, least_loaded
from hotswap.request import Request
from hotswap.router import Router
from hotswap.view import FleetView, InstanceId, InstanceState, InstanceView

__all__ = ["LeastTimeRouter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastTimeRouter(Router):
    """Sends a request to the open replica of its model with the least expected time to first token.

    It makes the order of the multi-model post (model and adapter resident, 0; model resident, 15 ms; model in
    a warm tier, 2.5 s; cold, 23 s) a sum of seconds, which queues count in as well:

        T = tokens / prefill_tokens_per_s          to be computed there first, and those of the request
          + steps * num_running * request_s        decodes that share these steps
          + adapter_s                              where the adapter is not held
          + blocks_s                               where fewer KV blocks are free than the tokens need

    `steps` is `tokens / step_tokens`, rounded up. So an adapter's holder is passed over when the others save
    more than its load takes, a long prompt counts for what it is, and no threshold is needed. Ties go as in
    `LeastLoadedRouter`.

    **Ours:** all of the sum, and its constants, which are rough figures of an 8B model on a recent GPU;
    measure your own. Requests that the fleet sent there and the engine has not seen yet count with as many
    tokens as the request itself, so that a burst does not go to one place. What a prefix cache would save is
    not known to a view. A swap is the scheduler's to ask for: where no replica is open the answer is `None`,
    however soon one may be.

    Attributes:
        prefill_tokens_per_s: Prompt tokens that an instance computes in a second.
        step_tokens: Token budget of a step.
        request_s: Seconds that one more running request adds to a step.
        adapter_s: Seconds until an adapter is there.
        blocks_s: Seconds until KV blocks are free where there are too few.
        swap_s: Seconds of a swap beside reading the weights; for `expected_s` alone.
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
        seconds = [(self._here_s(request, i), i) for i in candidates(request, fleet)]
        least_s = min((s for s, _ in seconds), default=inf)
        instance = least_loaded([i for s, i in seconds if s == least_s])
        return instance.id if instance else None

    def expected_s(self, request: Request, instance: InstanceView, fleet: FleetView) -> float:
        """Return the expected seconds to the first token on any instance, also where it would take a swap.

        A swap takes `swap_s`, and unless the model is preloaded there, what the store needs to read it
        (`StoreView.load_s`). Infinite for an instance that takes no requests and cannot swap, and for a model
        that the store does not have.
        """
        if instance.state is InstanceState.SERVING and instance.model == request.model:
            return self._here_s(request, instance)
        if not instance.free:
            return inf
        store = fleet.store.seen_from(instance.node)
        load_s = 0.0 if instance.preloaded == request.model else store.load_s(request.model)
        adapter_s = 0.0 if request.adapter is None else self.adapter_s
        return self.swap_s + load_s + adapter_s + request.num_tokens / self.prefill_tokens_per_s

    def _here_s(self, request: Request, instance: InstanceView) -> float:
        num_unseen = max(instance.num_requests - instance.num_running - instance.num_waiting, 0)
        num_tokens = instance.num_prefill_tokens + (num_unseen + 1) * request.num_tokens
        num_steps = -(-num_tokens // self.step_tokens)
        seconds = num_tokens / self.prefill_tokens_per_s + num_steps * instance.num_running * self.request_s
        if request.adapter is not None and request.adapter not in instance.adapters:
            seconds += self.adapter_s
        free_tokens = instance.num_free_kv_blocks * instance.kv_block_tokens
        if instance.num_kv_blocks and free_tokens < request.num_tokens:
            seconds += self.blocks_s
        return seconds
