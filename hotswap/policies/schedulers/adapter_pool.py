"""Loading adapters before requests ask for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import ceil, isfinite

from hotswap.action import Action, PinAdapters
from hotswap.argument_kinds import check_arguments
from hotswap.errors import ConfigError
from hotswap.policies.schedulers.instances import is_leaving
from hotswap.request import AdapterId, ModelId
from hotswap.scheduler import Scheduler
from hotswap.view import AdapterView, FleetView, InstanceId, InstanceState, InstanceView

__all__ = ["AdapterPool"]


@check_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPool(Scheduler):
    """Keeps adapters loaded on the replicas of their model: needed ones first, then popular, then due ones.

    Source: the adapter pools of the multi-model post, and prefetching for waiting requests (Sheng et al.,
    S-LoRA, arXiv:2311.03285, section 5). An instance has `max_adapters` places. They are given, in this
    order, to adapters that are

        needed now    a request runs with it or waits for it
        popular       popularity >= least_popularity, the most popular first
        due           |asked_s + gap_s - now| <= lead_s, the one that is due first

    so a due adapter never takes the place of a popular one, nor a popular one that of a needed one. A needed
    adapter stays on every instance that holds it. Each adapter gets one place first. Then needed and popular
    adapters get places by their share *s* of the requests, `ceil(s r)` of *r* replicas, before any due
    adapter. Copies go to present holders, then to the replica with the least popularity so far.

    **Ours:** the whole order, and the meaning of popular and due. Both are read from `AdapterView`, so
    nothing is remembered between plans. Only a rhythm is predicted: an adapter that is asked for at random is
    never due, but may be popular. A held adapter counts as `stay` times as popular, so that two of nearly
    equal popularity do not displace each other in turn. An adapter that its running requests will load by
    themselves is left to them.

    It plans nothing for an instance that lacks no adapter. It loads no models: chain it behind a scheduler
    that does, `Chain(WeightedLoadSwap(), AdapterPool())`.

    Attributes:
        least_popularity: The popularity from which an adapter is held without being needed.
        lead_s: Seconds before and after its expected request for which an adapter is held; more than the
            fleet's interval.
        stay: The factor by which a held adapter counts as more popular, 1 or more.
    """

    least_popularity: float = 0.5
    lead_s: float = 5.0
    stay: float = 1.5

    def __post_init__(self) -> None:
        if not self.least_popularity > 0:
            raise ConfigError(f"least_popularity is {self.least_popularity!r}; give requests, over 0.")
        if not (self.lead_s >= 0 and isfinite(self.lead_s)):
            raise ConfigError(f"lead_s is {self.lead_s!r}; give 0 (nothing is predicted) or more seconds.")
        if not (self.stay >= 1 and isfinite(self.stay)):
            raise ConfigError(f"stay is {self.stay!r}; give a finite factor of 1 or more.")

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        wanted: dict[ModelId, list[AdapterView]] = defaultdict(list)
        for adapter in fleet.adapters:
            wanted[adapter.model].append(adapter)
        replicas: dict[ModelId, list[InstanceView]] = defaultdict(list)
        for instance in fleet.instances:
            if instance.model is not None and instance.model in wanted and _may_hold(instance):
                replicas[instance.model].append(instance)
        return tuple(
            hold
            for model, instances in replicas.items()
            for hold in self._holds(model, instances, wanted[model], fleet.now_s)
        )

    def _holds(
        self,
        model: ModelId,
        instances: Sequence[InstanceView],
        adapters: Sequence[AdapterView],
        now_s: float,
    ) -> Iterator[PinAdapters]:
        places = _Places(instances)
        kinds = self._kinds(adapters, places.holders, now_s)
        reasons = {adapter.id: kind for kind, those in kinds.items() for adapter in those}
        order = {name: rank for rank, name in enumerate(reasons)}
        for adapter in kinds["needed now"]:
            places.keep(adapter)
        for kind in ("needed now", "popular"):
            for adapter in kinds[kind]:
                places.give(adapter, 1)
        total = sum(adapter.popularity for adapter in adapters)
        for adapter in (*kinds["needed now"], *kinds["popular"]):
            places.give(adapter, _num_copies(adapter, total, len(instances)))
        for adapter in kinds["due"]:
            places.give(adapter, 1)
        for instance in instances:
            given = sorted(places.given[instance.id], key=order.__getitem__)
            missing = [name for name in given if name not in instance.adapters]
            if missing:
                reason = ", ".join(f"{name} is {reasons[name]}" for name in missing)
                yield PinAdapters(instance=instance.id, model=model, adapters=tuple(given), reason=reason)

    def _kinds(
        self, adapters: Iterable[AdapterView], holders: Mapping[AdapterId, Sequence[InstanceId]], now_s: float
    ) -> dict[str, list[AdapterView]]:
        """The adapters that should be held, by reason, the most urgent first."""
        kinds: dict[str, list[AdapterView]] = {"needed now": [], "popular": [], "due": []}
        for adapter in adapters:
            if adapter.num_requests:
                if adapter.num_waiting or adapter.id in holders:  # else its requests load it
                    kinds["needed now"].append(adapter)
            elif adapter.popularity >= self.least_popularity:
                kinds["popular"].append(adapter)
            elif abs(_due_s(adapter) - now_s) <= self.lead_s:
                kinds["due"].append(adapter)

        def popularity(adapter: AdapterView) -> tuple[float, AdapterId]:
            factor = self.stay if adapter.id in holders else 1.0
            return -factor * adapter.popularity, adapter.id

        kinds["needed now"].sort(key=popularity)
        kinds["popular"].sort(key=popularity)
        kinds["due"].sort(key=lambda adapter: (_due_s(adapter), adapter.id))
        return kinds


class _Places:
    """The adapter places of one model's replicas, as a plan assigns them.

    Attributes:
        holders: The instances that hold each adapter now.
        given: The adapters that each replica should hold.
    """

    def __init__(self, instances: Sequence[InstanceView]) -> None:
        self.holders: dict[AdapterId, list[InstanceId]] = defaultdict(list)
        self.given: dict[InstanceId, set[AdapterId]] = {i.id: set() for i in instances}
        self._free = {i.id: i.max_adapters for i in instances}
        self._popularity = dict.fromkeys(self.given, 0.0)
        self._copies: dict[AdapterId, set[InstanceId]] = defaultdict(set)
        self._least = [(0.0, i.id) for i in instances]
        heapify(self._least)
        for instance in instances:
            for name in instance.adapters:
                self.holders[name].append(instance.id)

    def keep(self, adapter: AdapterView) -> None:
        """Give an adapter the places that it holds now."""
        for instance in self.holders.get(adapter.id, ()):
            self._give(adapter, instance)

    def give(self, adapter: AdapterView, num_copies: int) -> None:
        """Give an adapter up to `num_copies` places, those already given included."""
        copies = self._copies[adapter.id]
        for instance in self.holders.get(adapter.id, ()):
            if len(copies) < num_copies:
                self._give(adapter, instance)
        passed: list[tuple[float, InstanceId]] = []
        while len(copies) < num_copies and self._least:
            popularity, instance = heappop(self._least)
            if popularity != self._popularity[instance] or not self._free[instance]:
                continue  # an outdated entry, or a full replica
            if instance in copies:
                passed.append((popularity, instance))
            else:
                self._give(adapter, instance)
        for entry in passed:
            heappush(self._least, entry)

    def _give(self, adapter: AdapterView, instance: InstanceId) -> None:
        if not self._free[instance] or instance in self._copies[adapter.id]:
            return
        self._free[instance] -= 1
        self.given[instance].add(adapter.id)
        self._copies[adapter.id].add(instance)
        self._popularity[instance] += adapter.popularity
        heappush(self._least, (self._popularity[instance], instance))


def _may_hold(instance: InstanceView) -> bool:
    serving = instance.state is InstanceState.SERVING and not instance.draining
    return serving and instance.max_adapters > 0 and not is_leaving(instance)


def _due_s(adapter: AdapterView) -> float:
    """The loop time of the next expected request; infinity before two requests came."""
    return float("inf") if adapter.gap_s is None else adapter.asked_s + adapter.gap_s


def _num_copies(adapter: AdapterView, total: float, num_replicas: int) -> int:
    share = adapter.popularity / total if total else 0.0
    return max(1, ceil(share * num_replicas - 1e-9))  # without rounding errors
