"""Recommendations for operators: when a fleet needs more instances, fewer, or one for a single model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from statistics import fmean

from hotswap.action import SwapRecord
from hotswap.errors import ConfigError
from hotswap.request import ModelId
from hotswap.view import FleetView, InstanceId, InstanceState

__all__ = ["Recommendation", "ScalingMonitor", "ScalingStep"]


class ScalingStep(StrEnum):
    """The steps that may be recommended."""

    DEDICATE = "dedicate"
    ADD = "add"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """One step for a model or an instance, with its reason; `at_s` is the loop time of the recommendation."""

    step: ScalingStep
    model: ModelId | None = None
    instance: InstanceId | None = None
    reason: str = ""
    at_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.step} {self.instance or ''}{self.model or ''}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingMonitor:
    """Recommends the steps that no scheduler can take: more engines, fewer, or one for a model alone.

    Source: the multi-model serving post, its monitor and its table of triggers.

        an instance swapped over `max_swaps_per_h` times      an instance for the model it loaded most
        a model with over `max_waiting` waiting requests      one more instance for it
        an instance in use for under `min_use` of the time    one instance fewer

    A recommendation for a model or an instance is not repeated for `cooldown_s`.

    **Readings.** The post has 50 swaps an hour in its code and 30 in its table; the default is the table's.
    It names the model that the instance has at that moment; here it is the one loaded there most often, since
    an instance of its own saves these loads. Utilisation is read as the share of views in which an instance
    has requests. An instance that swapped, or whose model would fall below `min_replicas`, is not given up.
    Triggers on latency and on adapters need data that a view does not have.

    **Ours:** the monitor has no memory. The caller keeps views (one a minute for half an hour is enough),
    swaps (`Fleet.swaps`) and earlier recommendations.
    """

    max_swaps_per_h: float = 30.0
    max_waiting: float = 50.0
    min_use: float = 0.2
    window_s: float = 3600.0
    cooldown_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("max_swaps_per_h", "max_waiting", "cooldown_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give 0 or more.")
        if not 0 <= self.min_use <= 1:
            raise ConfigError(f"min_use is {self.min_use!r}; give a share between 0 (never) and 1.")
        if not 0 < self.window_s < inf:
            raise ConfigError(f"window_s is {self.window_s!r}; give seconds over 0, finite.")

    def recommend(
        self,
        views: Sequence[FleetView],
        swaps: Iterable[SwapRecord],
        *,
        made: Iterable[Recommendation] = (),
    ) -> tuple[Recommendation, ...]:
        """Return the steps that are due at the time of the last view.

        Args:
            views: Views of the fleet, oldest first, evenly spaced; without any, nothing is recommended.
            swaps: Records of swaps; those begun more than `window_s` ago do not count.
            made: Earlier recommendations.
        """
        if not views:
            return ()
        now_s = views[-1].now_s
        cooling_down = {(r.step, r.model, r.instance) for r in made if now_s - r.at_s < self.cooldown_s}
        loaded = self._loaded(swaps, now_s)
        found = (*self._dedicate(loaded, now_s), *self._add(views), *self._remove(views, loaded))
        return tuple(r for r in found if (r.step, r.model, r.instance) not in cooling_down)

    def _loaded(self, swaps: Iterable[SwapRecord], now_s: float) -> dict[InstanceId, list[ModelId]]:
        loaded: defaultdict[InstanceId, list[ModelId]] = defaultdict(list)
        for swap in swaps:
            recent = now_s - swap.started_s <= self.window_s
            if recent and swap.outcome == "done" and swap.model is not None:
                loaded[swap.instance].append(swap.model)
        return loaded

    def _dedicate(self, loaded: dict[InstanceId, list[ModelId]], now_s: float) -> Iterator[Recommendation]:
        wanted: Counter[ModelId] = Counter()
        for models in loaded.values():
            if len(models) * 3600.0 / self.window_s > self.max_swaps_per_h:
                counts = Counter(models)
                most = min(counts, key=lambda model: (-counts[model], model))
                wanted[most] += counts[most]
        for model, count in sorted(wanted.items()):
            reason = f"{count} swaps to it in {self.window_s / 60:g} minutes, where instances swap most"
            yield Recommendation(step=ScalingStep.DEDICATE, model=model, reason=reason, at_s=now_s)

    def _add(self, views: Sequence[FleetView]) -> Iterator[Recommendation]:
        waiting: defaultdict[ModelId, int] = defaultdict(int)
        for view in views:
            for model in view.models:
                waiting[model.id] += model.num_waiting
        for model_id, total in sorted(waiting.items()):
            if total / len(views) > self.max_waiting:
                reason = f"{total / len(views):.3g} requests wait on average"
                yield Recommendation(
                    step=ScalingStep.ADD, model=model_id, reason=reason, at_s=views[-1].now_s
                )

    def _remove(
        self, views: Sequence[FleetView], loaded: dict[InstanceId, list[ModelId]]
    ) -> Iterator[Recommendation]:
        """At most one instance: without it, the others are used more."""
        used: defaultdict[InstanceId, list[bool]] = defaultdict(list)
        for view in views:
            for instance in view.instances:
                used[instance.id].append(instance.num_requests > 0 or instance.swapping)
        last = views[-1]
        spare = {m.id for m in last.models if len(last.replicas(m.id)) > m.min_replicas}
        idle = [
            (fmean(used[i.id]), i.id)
            for i in last.instances
            if i.id not in loaded
            and len(used[i.id]) == len(views)
            and (i.state is InstanceState.EMPTY or (i.state is InstanceState.SERVING and i.model in spare))
        ]
        if idle and min(idle)[0] < self.min_use:
            share, instance_id = min(idle)
            reason = f"in use for {share:.0%} of the time"
            yield Recommendation(
                step=ScalingStep.REMOVE, instance=instance_id, reason=reason, at_s=last.now_s
            )
