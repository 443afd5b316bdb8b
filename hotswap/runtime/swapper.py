"""Swaps as the fleet starts them, by plan or by hand: claimed, recorded, and told to those who wait."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping

import anyio

from hotswap.action import SwapRecord
from hotswap.errors import ConfigError, InstanceLost, LoadsExhausted, SwapFailed
from hotswap.model import ModelCard
from hotswap.request import ModelId
from hotswap.runtime.admission import WaitingRoom
from hotswap.runtime.instance import Instance
from hotswap.runtime.swap import SwapJob, SwapLimits
from hotswap.store import WeightStore
from hotswap.telemetry import Telemetry
from hotswap.view import InstanceId, InstanceState

__all__ = ["Swapper"]

log = logging.getLogger("hotswap")

MAX_RECORDS = 10_000


class Swapper:
    """Runs swaps on claimed instances and keeps their records.

    A model that failed to load `max_load_attempts` times in a row, and that no instance serves, has its
    waiting requests refused by `LoadsExhausted`; later requests start new attempts, after the pause. A load
    that ended because its instance was lost counts, and yet is no reason to refuse: the next may go well.
    """

    def __init__(
        self,
        *,
        cards: Mapping[ModelId, ModelCard],
        store: WeightStore,
        instances: Mapping[InstanceId, Instance],
        room: WaitingRoom,
        limits: SwapLimits,
        max_load_attempts: int,
        telemetry: Telemetry,
        on_change: Callable[[], None],
        on_record: Callable[[SwapRecord], None] | None,
    ) -> None:
        if max_load_attempts < 1:
            raise ConfigError(f"max_load_attempts is {max_load_attempts!r}; give 1 or more.")
        self.records: deque[SwapRecord] = deque(maxlen=MAX_RECORDS)
        self.num_failed_loads: Counter[ModelId] = Counter()
        self.last_evicted_s: dict[ModelId, float] = {}
        self._cards = cards
        self._store = store
        self._instances = instances
        self._room = room
        self._limits = limits
        self._max_load_attempts = max_load_attempts
        self._telemetry = telemetry
        self._on_change = on_change
        self._on_record = on_record

    def knows(self, model: ModelId) -> bool:
        """Whether the model is registered."""
        return model in self._cards

    async def run_claimed(
        self, instance: Instance, target: ModelId | None, deadline_s: float, reason: str
    ) -> None:
        """Run a planned swap; its failure is logged and recorded, and ends nothing else."""
        try:
            await self.run(instance, target, deadline_s=deadline_s, reason=reason)
        except SwapFailed as exc:
            log.warning("%s", exc)
        except Exception:  # not in a phase: a tracer's fault, say
            log.exception("The swap of instance %r to %r broke off.", instance.id, target)

    async def run(
        self, instance: Instance, target: ModelId | None, *, deadline_s: float, reason: str
    ) -> SwapRecord:
        """Run a swap on an instance that the caller has claimed, and give the instance back.

        Raises:
            SwapFailed: naming the phase.
        """
        job = SwapJob(
            instance,
            None if target is None else self._cards[target],
            self._store,
            deadline_s=deadline_s,
            reason=reason,
            limits=self._limits,
            telemetry=self._telemetry,
        )
        try:
            record = await job.run()
        except Exception as exc:
            self._blame(instance, target, exc)
            raise
        else:
            self._praise(instance, target)
            return record
        finally:
            instance.unclaim()
            if job.record is not None:
                self._keep(job.record)
            self._on_change()

    def _keep(self, record: SwapRecord) -> None:
        self.records.append(record)
        if record.model_before is not None and record.model_after != record.model_before:
            self.last_evicted_s[record.model_before] = anyio.current_time()
        if self._on_record is None:
            return
        try:
            self._on_record(record)
        except Exception:
            log.exception("`on_swap` failed for a swap of instance %r; the swap stands.", record.instance)

    def _praise(self, instance: Instance, target: ModelId | None) -> None:
        instance.succeeded(target)
        if target is not None:
            del self.num_failed_loads[target]

    def _blame(self, instance: Instance, target: ModelId | None, error: Exception) -> None:
        """Let the pair rest, and give up on the model where it failed too often and nobody serves it."""
        instance.failed(target)
        if target is None:
            return
        self.num_failed_loads[target] += 1
        failures = self.num_failed_loads[target]
        if isinstance(error.__cause__, InstanceLost) or self._served(target, but=instance):
            return
        if failures >= self._max_load_attempts:
            self._room.refuse(
                target,
                lambda: LoadsExhausted(
                    f"Model {target!r} failed to load {failures} times in a row; the last time: {error}"
                ),
            )

    def _served(self, model: ModelId, *, but: Instance) -> bool:
        views = (instance.view() for instance in self._instances.values() if instance is not but)
        return any(
            (v.model == model and v.state is InstanceState.SERVING) or v.target == model for v in views
        )

    def __repr__(self) -> str:
        done = sum(record.outcome == "done" for record in self.records)
        return f"<Swapper [{done} of {len(self.records)} swaps done]>"
