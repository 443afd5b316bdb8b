"""Swaps as the fleet starts them, by plan or by hand: claimed, recorded, and told to waiting requests."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from hotswap.action import SwapRecord
from hotswap.checks import check_counts
from hotswap.errors import ConfigError, InstanceLost, LoadsExhausted, SwapFailed
from hotswap.request import ModelId
from hotswap.runtime.admission import Admission
from hotswap.runtime.change import Change
from hotswap.runtime.instance import Instance, refusal
from hotswap.runtime.losses import Losses
from hotswap.runtime.offload import Offload
from hotswap.runtime.state import FleetState
from hotswap.runtime.swap import SwapJob, SwapLimits
from hotswap.telemetry import Telemetry

__all__ = ["Swaps"]

log = logging.getLogger("hotswap")

MAX_RECORDS = 10_000


class Swaps:
    """Runs swaps on claimed instances and keeps their records.

    A model that failed to load `max_load_attempts` times in a row, and that no instance serves, has its
    waiting requests refused by `LoadsExhausted`; later requests start new attempts, after the pause. A load
    that ended because its instance was lost counts, but is no reason to refuse: the next may go well.

    Args:
        state: Of the fleet.
        admission: Refuses waiting requests.
        losses: Told of instances that are lost in a swap.
        limits: Seconds that each phase may take.
        max_load_attempts: Failed loads in a row after which waiting requests are refused.
        telemetry: Records spans and metrics.
        offload: Saves KV blocks of requests that are evicted; `None` if they are lost.
        on_record: Called with every record, synchronously.
    """

    def __init__(
        self,
        state: FleetState,
        admission: Admission,
        losses: Losses,
        *,
        limits: SwapLimits,
        max_load_attempts: int,
        telemetry: Telemetry,
        offload: Offload | None,
        on_record: Callable[[SwapRecord], None] | None,
    ) -> None:
        check_counts(ConfigError, 1, max_load_attempts=max_load_attempts)
        self.records: deque[SwapRecord] = deque(maxlen=MAX_RECORDS)
        self.limits = limits
        self._state, self._admission, self._telemetry = state, admission, telemetry
        self._losses, self._max_load_attempts = losses, max_load_attempts
        self._offload, self._on_record = offload, on_record

    async def run_planned(
        self, instance: Instance, target: ModelId | None, *, deadline_s: float, reason: str
    ) -> None:
        """Run a planned swap on a claimed instance; its failure is logged and recorded alone."""
        try:
            await self.run(instance, target, deadline_s=deadline_s, reason=reason)
        except SwapFailed:
            pass
        except Exception:  # not in a phase: a tracer's fault, say
            log.exception("The swap of instance %r to %r broke off.", instance.id, target)

    async def run(
        self, instance: Instance, target: ModelId | None, *, deadline_s: float, reason: str
    ) -> SwapRecord:
        """Run a swap on an instance that the caller has claimed, and give the instance back.

        Raises:
            SwapFailed: naming the phase.
        """
        job: SwapJob | None = None
        self._state.events.note("swap_started", instance=instance.id, model=target, reason=reason)
        try:
            job = SwapJob(
                instance,
                None if target is None else self._state.models[target],
                self._state,
                deadline_s=deadline_s,
                reason=reason,
                limits=self.limits,
                telemetry=self._telemetry,
                offload=self._offload,
            )
            record = await job.run()
        except Exception as exc:
            if isinstance(exc, SwapFailed):
                log.warning("%s", exc)
            if isinstance(exc.__cause__, InstanceLost):
                self._losses.note(instance, exc.__cause__)
            self._note_failure(instance, target, exc)
            raise
        else:
            self._losses.over(instance)
            self._state.succeeded(instance, target)
            return record
        finally:
            self._state.unclaim(instance)
            if job is not None and job.record is not None:
                self._keep(job.record)
            self._state.tell(Change.INSTANCES)
            self._state.begin_turn(instance)

    def _keep(self, record: SwapRecord) -> None:
        if record.outcome != "failed":  # which is logged as a warning
            log.info(
                "The swap of instance %r from %r to %r is %s after %.3f s, of which %.3f s down: %d requests "
                "evicted, %d bytes loaded from %r (%s).",
                record.instance,
                record.model_before,
                record.model,
                record.outcome,
                record.seconds,
                record.downtime_s,
                record.num_evicted,
                record.loaded_bytes,
                record.tier,
                record.reason,
            )
        self.records.append(record)
        self._state.record_swap(record)
        self._state.events.note(
            "swap_ended", instance=record.instance, model=record.model, reason=record.reason, record=record
        )
        if self._on_record is None:
            return
        try:
            self._on_record(record)
        except Exception:
            log.exception("`on_swap` failed for a swap of instance %r; the swap stands.", record.instance)

    def _note_failure(self, instance: Instance, target: ModelId | None, error: Exception) -> None:
        """Have the pair cool down, and refuse the model's requests where it failed too often."""
        self._state.failed(instance, target)
        if target is None:
            return
        if refused := refusal(self._state.instances.values(), target):
            self._admission.refuse(target, refused)
        failures = self._state.num_failed_loads[target]
        if isinstance(error.__cause__, InstanceLost) or self._is_served(target, but=instance):
            return
        if failures >= self._max_load_attempts:
            exhausted = LoadsExhausted(
                f"Model {target!r} failed to load {failures} times in a row; the last time: {error}"
            )
            if num_refused := self._admission.refuse(target, exhausted):
                log.warning("%d waiting requests were refused. %s", num_refused, exhausted)

    def _is_served(self, model: ModelId, *, but: Instance) -> bool:
        self._state.refresh()
        others = (view for view in self._state.index.instances() if view.id != but.id)
        return any(model in (view.hosted, view.target) for view in others)

    def __repr__(self) -> str:
        done = sum(record.outcome == "done" for record in self.records)
        return f"<Swaps [{done} of {len(self.records)} done]>"
