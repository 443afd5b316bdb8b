"""How many requests each model will get, by the time of day, learned from the views of a running fleet."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import exp, floor, isfinite

from hotswap.argument_kinds import check_arguments
from hotswap.errors import ConfigError
from hotswap.request import ModelId
from hotswap.view import FleetView

__all__ = ["SeasonalRates"]


@check_arguments
class SeasonalRates:
    """The rates at which requests come, by model and by part of a period such as the day.

    Pass it the views in order; it has no clock of its own. The period is cut into slots, and

        rate(slot)   = (c + 1) / (T + 1 / mean)          c requests came in T seconds of the slot
        level        = (n + a) / (d + a)                 n came of late, d were due; old ones count less
        expected     = level x the integral of rate

    The rate of a slot is drawn to the mean over the period, as if one request had come at that. The level is
    that of a Gamma prior with shape `prior` (*a*), as in Holt-Winters' multiplicative seasons: what came of
    late scales the rates of the day. A model whose slots have told its counts worse than its mean has the
    mean alone. There is **no forecast** for a model until it was seen for a whole period.

    A request is seen if it waits or runs in one view; of those that come and end between two views one is
    seen, by the time at which its instance was last used. So rates of busy models are low, and those of
    seldom ones, which a forecast is for, are exact.

    It keeps three numbers a slot and model, and forgets a model that the view no longer has. If time runs
    backwards (another simulation) it begins anew; of a pause longer than a slot it learns nothing.

    Args:
        period_s: Seconds after which the load repeats.
        num_slots: Equal parts of the period.
        memory: The share of a slot's weight that is left when a period has passed, 0 to below 1.
        burst_s: Seconds after which a request counts as late by a factor of *e* less.
        prior: How many requests the rates of the day weigh, beside those that came of late.
    """

    def __init__(
        self,
        *,
        period_s: float = 86_400.0,
        num_slots: int = 48,
        memory: float = 0.7,
        burst_s: float = 300.0,
        prior: float = 0.5,
    ) -> None:
        for what, value in (("period_s", period_s), ("burst_s", burst_s), ("prior", prior)):
            if not (value > 0 and isfinite(value)):
                raise ConfigError(f"{what} is {value!r}; give a finite number over 0.")
        if num_slots < 1:
            raise ConfigError(f"num_slots is {num_slots!r}; give 1 or more.")
        if not 0 <= memory < 1:
            raise ConfigError(f"memory is {memory!r}; give 0 (the last period alone counts) to below 1.")
        self.period_s, self.num_slots = period_s, num_slots
        self._memory, self._burst_s, self._prior = memory, burst_s, prior
        self._models: dict[ModelId, _Model] = {}
        self._seen_s: float | None = None

    @property
    def slot_s(self) -> float:
        """Seconds of a slot."""
        return self.period_s / self.num_slots

    @property
    def is_ready(self) -> bool:
        """Whether there is a forecast for any model."""
        return any(model.rates for model in self._models.values())

    def learn(self, fleet: FleetView) -> None:
        """Learn from a view what came since the one before; the same view again teaches nothing."""
        now_s, before_s = fleet.now_s, self._seen_s
        if before_s is None or now_s < before_s:
            self._models.clear()
            before_s = now_s
        if now_s - before_s > self.slot_s:
            for model in self._models.values():
                model.start(now_s)
        elif self._slot(now_s) != self._slot(before_s):
            for model in self._models.values():
                self._close(model, before_s, now_s)
        if now_s > before_s:
            self._count(fleet, before_s)
        self._keep(fleet)
        self._seen_s = now_s

    def expected(self, model: ModelId, start_s: float, seconds: float) -> float | None:
        """Return how many requests will come in so many seconds from a loop time on; `None`: no forecast.

        At most one period is looked ahead.
        """
        known = self._models.get(model)
        if known is None or not known.rates:
            return None
        end_s = start_s + min(seconds, self.period_s)
        number, total = self._slot(start_s), 0.0
        while start_s < end_s:
            until_s = max(start_s, min(end_s, (number + 1) * self.slot_s))
            total += known.rates[number % self.num_slots] * (until_s - start_s)
            start_s, number = until_s, number + 1
        return total * self._level(known)

    # ------------------------------------------------------------------ learning

    def _count(self, fleet: FleetView, since_s: float) -> None:
        """Count the requests that came from `since_s` on, and before now, at which others may still come."""
        now_s = fleet.now_s
        came = Counter(r.model for r in fleet.waiting if since_s <= r.arrived_s < now_s)
        came.update(r.model for r in fleet.running if since_s <= r.arrived_s < now_s)
        for instance in fleet.instances:
            name, used_s = instance.model, instance.last_used_s
            if name is None or used_s is None or name in came or not since_s <= used_s < now_s:
                continue
            if (known := self._models.get(name)) is not None and not known.num_running:
                came[name] = 1  # nothing ran before: it came and has left
        for name, count in came.items():
            if (known := self._models.get(name)) is not None:
                known.count += count
                known.recent, known.due = self._late(known, now_s)
                known.recent, known.late_s = known.recent + count, now_s

    def _keep(self, fleet: FleetView) -> None:
        """Begin to watch new models, and forget those that have gone."""
        models = {model.id: model.num_running for model in fleet.models}
        for name in self._models.keys() - models.keys():
            del self._models[name]
        for name, num_running in models.items():
            known = self._models.get(name)
            if known is None:
                known = self._models[name] = _Model(fleet.now_s, self.num_slots)
            known.num_running = num_running

    def _close(self, model: _Model, before_s: float, now_s: float) -> None:
        """Add what came in the slot that ends to its earlier periods, and make the rates anew."""
        slot, seconds = self._slot(before_s) % self.num_slots, now_s - model.slot_since_s
        (model.recent, model.due), model.late_s = self._late(model, now_s), now_s
        if model.rates:
            for number, rate in enumerate((self._slot_rate(model, slot), model.mean)):
                error = abs(model.count - rate * seconds)
                model.errors[number] = (1.0 - 1.0 / self.num_slots) * model.errors[number] + error
        model.counts[slot] = self._memory * model.counts[slot] + model.count
        model.seconds[slot] = self._memory * model.seconds[slot] + seconds
        model.mean = sum(model.counts) / sum(model.seconds)
        if now_s - model.since_s >= self.period_s and min(model.seconds) > 0:
            if not model.rates:
                model.recent = model.due = 0.0
            model.rates = self._rates(model)
        model.start(now_s)

    def _rates(self, model: _Model) -> list[float]:
        by_slot, by_mean = model.errors
        if by_slot > by_mean or not model.mean:
            return [model.mean] * self.num_slots
        return [self._slot_rate(model, slot) for slot in range(self.num_slots)]

    def _slot_rate(self, model: _Model, slot: int) -> float:
        return (model.counts[slot] + 1.0) / (model.seconds[slot] + 1.0 / model.mean) if model.mean else 0.0

    def _level(self, model: _Model) -> float:
        assert self._seen_s is not None
        recent, due = self._late(model, self._seen_s)
        return (recent + self._prior) / (due + self._prior)

    def _late(self, model: _Model, now_s: float) -> tuple[float, float]:
        """Return how many requests came of late, and how many were due, older ones counting less."""
        left = exp((model.late_s - now_s) / self._burst_s)
        rate = model.rates[self._slot(model.late_s) % self.num_slots] if model.rates else 0.0
        return model.recent * left, model.due * left + rate * self._burst_s * (1.0 - left)

    def _slot(self, at_s: float) -> int:
        return floor(at_s / self.slot_s)

    def __repr__(self) -> str:
        return f"SeasonalRates(period_s={self.period_s:g}, num_slots={self.num_slots})"


@dataclass(slots=True)
class _Model:
    """What is known of one model: by slot what came and in how many seconds, and what came of late."""

    since_s: float
    num_slots: int
    slot_since_s: float = field(init=False)
    counts: list[float] = field(init=False)
    seconds: list[float] = field(init=False)
    rates: list[float] = field(default_factory=list[float])
    errors: list[float] = field(default_factory=lambda: [0.0, 0.0])
    mean: float = 0.0
    count: int = 0
    recent: float = 0.0
    due: float = 0.0
    late_s: float = 0.0
    num_running: int = 0

    def __post_init__(self) -> None:
        self.slot_since_s = self.late_s = self.since_s
        self.counts, self.seconds = [0.0] * self.num_slots, [0.0] * self.num_slots

    def start(self, now_s: float) -> None:
        """Begin a slot."""
        self.slot_since_s, self.count = now_s, 0
