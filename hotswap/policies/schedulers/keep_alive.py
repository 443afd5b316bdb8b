"""Swapping as in Ollama and llama-swap: load on request, unload when idle for long. A baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from hotswap.action import Action, Swap, Unload
from hotswap.argument_kinds import check_arguments
from hotswap.errors import ConfigError
from hotswap.policies.schedulers.allocation import Allocation
from hotswap.policies.schedulers.instances import used_s
from hotswap.scheduler import Scheduler
from hotswap.view import FleetView, InstanceId, InstanceState, InstanceView, ModelView

__all__ = ["KeepAliveSwap"]


@check_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAliveSwap(Scheduler):
    """Loads an absent model when a request waits for it, on an EMPTY or the least recently used instance.

    Source: Ollama (`OLLAMA_KEEP_ALIVE`, five minutes by default) and llama-swap (`ttl`).

        absent model with a waiting request    an EMPTY instance, else the least recently used idle replica
        idle for keep_alive_s                  unloaded

    An instance without a request is idle. It was last used when its model was loaded, or a request came or
    left.

    **Readings.** Both servers keep one instance of a model, so a model that has a replica or is loading gets
    no second one, however many requests wait. No request is evicted: without an idle instance the waiting
    request stays, under a steady load for ever. (Ollama then drains one instance; llama-swap drains it at
    once.) Ollama orders idle models by the length of their keep-alive; here that is the same for all, and the
    least recently used goes first. The model with the longest wait goes first, halved for each failed load.

    **Ours:** no swap or unload goes below `min_replicas`; `RestoreMinReplicas` restores them.

    **What to set.** Nothing: with more active models than instances `keep_alive_s` hardly matters, as idle
    replicas are taken long before they are unloaded. With fewer it says how soon memory is given back.
    `math.inf` never unloads, which is llama-swap's default.
    """

    keep_alive_s: float = 300.0

    def __post_init__(self) -> None:
        if not self.keep_alive_s >= 0:
            raise ConfigError(
                f"keep_alive_s is {self.keep_alive_s!r}; give 0 or more seconds (inf is never)."
            )

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        allocation = Allocation(fleet)
        return (*self._loads(allocation, fleet), *self._unloads(allocation, fleet))

    def _loads(self, allocation: Allocation, fleet: FleetView) -> Iterator[Swap]:
        absent = [m for m in allocation.models.values() if m.num_waiting and not allocation.num_replicas(m)]
        idle = sorted((i for i in fleet.instances if absent and not i.num_requests), key=_preference)
        for model in sorted(absent, key=lambda m: (-allocation.waited_s(m), m.id)):
            instance = next((i for i in idle if allocation.can_swap(i, model)), None)
            if instance is not None:
                whose = "is EMPTY" if instance.model is None else f"has {instance.model}, idle for longest"
                reason = f"{model.id} is asked for; {instance.id} {whose}"
                swap = Swap(instance=instance.id, model=model.id, reason=reason)
                allocation.swap(swap)
                yield swap

    def _unloads(self, allocation: Allocation, fleet: FleetView) -> Iterator[Unload]:
        for model in sorted(allocation.models.values(), key=lambda m: m.id):
            for instance in sorted(allocation.free_replicas(model), key=_preference):
                idle_s = fleet.now_s - used_s(instance)
                if self._is_expired(model, instance, idle_s) and allocation.num_spare(model) > 0:
                    allocation.unload(instance)
                    reason = f"{model.id} was idle for {idle_s:.3g} s"
                    yield Unload(instance=instance.id, reason=reason)

    def _is_expired(self, model: ModelView, instance: InstanceView, idle_s: float) -> bool:
        unwanted = not instance.num_requests and not model.num_waiting
        return unwanted and self.keep_alive_s <= idle_s < inf  # infinite: the view does not say since when


def _preference(instance: InstanceView) -> tuple[bool, float, int, InstanceId]:
    """EMPTY instances first, small before large; then the least recently used."""
    return instance.state is not InstanceState.EMPTY, used_s(instance), instance.memory_bytes, instance.id
