"""The swap state machine: preflight, preload, evict, unload, load, each once, each with a time limit.

    SERVING old --preflight, preload--> SERVING old --evict--> DRAINING --unload--> EMPTY
    EMPTY --load--> SERVING new

A failure or a cancellation up to the eviction leaves the old model SERVING, afterwards EMPTY: the unload
that follows an eviction is shielded, so nothing ends in between. A preload that finds too little memory
beside the old model is no failure: the load then comes after the unload.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields

import anyio
from opentelemetry.trace import Span, format_trace_id

from hotswap import telemetry as tm
from hotswap.action import PhaseRecord, SwapOutcome, SwapRecord
from hotswap.checks import check_positive_seconds
from hotswap.engine import Engine, SupportsPreload
from hotswap.errors import ConfigError, HotswapError, InstanceError, InstanceLost, OutOfMemory, SwapFailed
from hotswap.loop_time import current_time
from hotswap.metered_store import MeteredStore
from hotswap.model import ModelCard
from hotswap.request import ModelId
from hotswap.runtime.instance import Instance
from hotswap.runtime.kv_saving import Saved
from hotswap.runtime.offload import Offload, beside
from hotswap.runtime.state import FleetState
from hotswap.stray_cancellation import no_stray_cancellation
from hotswap.telemetry import Telemetry
from hotswap.view import InstanceState

__all__ = ["SwapJob", "SwapLimits"]

log = logging.getLogger("hotswap")

# Between two notes of how much was read.
PROGRESS_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapLimits:
    """How long each phase of a swap may take, in seconds, before it counts as failed.

    `evict_s` is on top of the swap's own deadline.
    """

    preflight_s: float = 30.0
    preload_s: float = 900.0
    evict_s: float = 30.0
    unload_s: float = 120.0
    load_s: float = 900.0

    def __post_init__(self) -> None:
        check_positive_seconds(
            ConfigError, **{field.name: getattr(self, field.name) for field in fields(self)}
        )


class SwapJob:
    """One swap of one instance, from the first check to its record.

    The caller holds the instance. `model=None` only evicts and unloads.
    """

    def __init__(
        self,
        instance: Instance,
        model: ModelCard | None,
        state: FleetState,
        *,
        deadline_s: float,
        reason: str,
        limits: SwapLimits,
        telemetry: Telemetry,
        offload: Offload | None = None,
    ) -> None:
        self.instance = instance
        self.model = model
        self.deadline_s = deadline_s
        self.reason = reason
        self.limits = limits
        self.telemetry = telemetry
        self.record: SwapRecord | None = None
        self._state = state
        self._total_bytes = 0 if model is None else model.weight_bytes
        self._store = MeteredStore(state.store, _LoadProgress(state, instance))
        self._phases: list[PhaseRecord] = []
        self._phase = "preflight"
        self._num_evicted = 0
        self._offload, self._saved = offload, Saved()
        self._evicted_before = instance.num_evicted
        self._down_since_s: float | None = None
        self._before = instance.status().model

    async def run(self) -> SwapRecord:
        """Carry the swap out and return its record, which `self.record` holds also after a failure.

        Raises:
            SwapFailed: a phase failed or ran out of time; its cause is chained.
        """
        started_s = current_time()
        span = self.telemetry.start(tm.SPAN_SWAP, self._attributes())
        outcome: SwapOutcome = "cancelled"
        error: BaseException | None = None
        try:
            await self._steps(span)
            outcome = "done"
        except Exception as exc:
            outcome, error = "failed", exc
            raise self._failure(exc) from exc
        except BaseException as exc:
            error = exc
            raise
        finally:
            self.record = self._write(started_s, outcome, error, span)
            self._close(span, error)
            error = None  # or it and this frame keep each other, and with them what a load had made
        return self.record

    async def _steps(self, span: Span) -> None:
        engine = self.instance.engine
        self._state.begin_swap(self.instance, span.get_span_context())
        if self.model is None:
            return await self._empty(engine, span)
        try:
            await self._prepare(engine, self.model, span)
            await self._empty(engine, span)
            async with self._timed("load", self.limits.load_s, span):
                await engine.load(self.model, self._store)
                self._expect(InstanceState.SERVING, self.model.id)
        except BaseException:
            await self._drop_preload(engine)
            raise

    async def _prepare(self, engine: Engine, model: ModelCard, span: Span) -> None:
        """All that can fail or be done early, while the old model still serves."""
        async with self._timed("preflight", self.limits.preflight_s, span):
            self._store.go_to(self.instance.status().node)
            await self._store.manifest(model.id)
            self.instance.check_model(model)
            room = self.instance.status().memory_bytes
            if room and model.weight_bytes > room:
                raise OutOfMemory(
                    f"Model {model.id!r} has {model.weight_bytes:,} bytes of weights and instance "
                    f"{engine.id!r} {room:,} bytes of memory; swap it into a larger one."
                )
        if self.instance.tries_models:
            async with self._timed("preflight", self.limits.load_s, span):
                await self.instance.try_model(model, self._store)
        serving = self.instance.status().state is InstanceState.SERVING
        if serving and isinstance(engine, SupportsPreload) and engine.can_preload(model):
            try:
                async with (
                    self._timed("preload", self.limits.preload_s, span),
                    beside(self._offload, self.instance, self._saved, span),
                ):
                    await engine.preload(model, self._store)
            except OutOfMemory as exc:  # it may well fit once the old model is gone
                log.info("Instance %r loads %r after the eviction instead: %s", engine.id, model.id, exc)

    async def _empty(self, engine: Engine, span: Span) -> None:
        """Evict and unload; once requests are gone, a cancellation waits until the instance is EMPTY."""
        self._down_since_s = current_time()
        self.instance.end_first_token(self.telemetry)
        if self.instance.status().state is InstanceState.SERVING:
            async with self._timed("evict", self.deadline_s + self.limits.evict_s, span):
                self._num_evicted = await self._evict(engine, span)
        if self.instance.status().state is not InstanceState.EMPTY:
            with anyio.CancelScope(shield=True):
                async with self._timed("unload", self.limits.unload_s, span):
                    await engine.unload()
                    self._expect(InstanceState.EMPTY, None)
        self._state.set_serving_since(self.instance, None)
        await anyio.lowlevel.checkpoint_if_cancelled()

    async def _evict(self, engine: Engine, span: Span) -> int:
        if self._offload is None:
            return await engine.evict(deadline_s=self.deadline_s)
        return await self._offload.evict(self.instance, self.deadline_s, self._saved, span)

    def _expect(self, state: InstanceState, model: ModelId | None) -> None:
        """Hold the engine to what its verb promised; without this a plan would repeat the swap for ever."""
        view = self.instance.status()
        if view.state is not state or view.model != model:
            raise InstanceError(
                f"Engine {self.instance.id!r} ended its {self._phase} as {view.state} with model "
                f"{view.model!r}; the engine breaks its contract."
            )

    async def _drop_preload(self, engine: Engine) -> None:
        if not isinstance(engine, SupportsPreload):
            return
        with anyio.move_on_after(self.limits.unload_s, shield=True):
            try:
                with no_stray_cancellation("Dropping what was preloaded"):
                    await engine.drop_preload()
            except InstanceLost:  # and what it had preloaded with it
                return
            except Exception as exc:  # what broke the swap, or cancelled it, is what the caller must see
                what = "Instance %r did not drop what it had preloaded.\n%s"
                log.error(what, self.instance.id, tm.traceback_of(exc))

    @asynccontextmanager
    async def _timed(self, name: str, limit_s: float, span: Span) -> AsyncGenerator[None]:
        """Bracket a phase by its span, its time limit and its record."""
        self._phase = name
        self._state.begin_phase(self.instance, name, self._total_bytes, self._store)
        started_s, read_bytes = current_time(), self._store.num_bytes
        try:
            with self.telemetry.span(tm.SPAN_PHASE.format(name), parent=span) as phase:
                try:
                    with anyio.move_on_after(limit_s) as limit, no_stray_cancellation(f"the {name}"):
                        yield
                    if limit.cancelled_caught:
                        raise TimeoutError(f"{name} took longer than its limit of {limit_s:g} s.")
                finally:
                    phase.set_attribute(tm.SECONDS, current_time() - started_s)
                    self._describe(phase, name, self._store.num_bytes - read_bytes)
        finally:
            seconds = current_time() - started_s
            self._phases.append(PhaseRecord(name=name, started_s=started_s, seconds=seconds))

    def _describe(self, phase: Span, name: str, read_bytes: int) -> None:
        if name in ("load", "preload"):
            phase.set_attribute(tm.LOADED_BYTES, read_bytes)
            phase.set_attribute(tm.TIER, self._store.tier if read_bytes else "")
            phase.set_attribute(tm.BUFFERED, self._store.buffered and read_bytes > 0)
        if name == "evict":
            phase.set_attribute(tm.EVICTED, self._num_evicted)

    def _failure(self, error: Exception) -> SwapFailed:
        now = self.instance.status()
        serves = f"serves {now.model!r}" if now.state is InstanceState.SERVING else f"is {now.state}"
        wanted = repr(self.model.id) if self.model else "nothing"
        return SwapFailed(
            f"The swap of instance {self.instance.id!r} to {wanted} failed in {self._phase}: {_brief(error)} "
            f"The instance now {serves}; its requests go elsewhere or wait.",
            phase=self._phase,
        )

    def _write(
        self, started_s: float, outcome: SwapOutcome, error: BaseException | None, span: Span
    ) -> SwapRecord:
        now_s = current_time()
        after = self.instance.status()
        if outcome == "done" and self.model is not None:
            self._state.set_serving_since(self.instance, now_s)
        return SwapRecord(
            instance=self.instance.id,
            model_before=self._before,
            model=self.model.id if self.model else None,
            model_after=after.model if after.state is InstanceState.SERVING else None,
            outcome=outcome,
            reason=self.reason,
            started_s=started_s,
            seconds=now_s - started_s,
            downtime_s=0.0 if self._down_since_s is None else now_s - self._down_since_s,
            phases=tuple(self._phases),
            # With those that were on their way to the engine when it began to evict.
            num_evicted=max(self._num_evicted, self.instance.num_evicted - self._evicted_before),
            num_saved=self._saved.num_requests,
            saved_bytes=self._saved.num_bytes,
            loaded_bytes=self._store.num_bytes,
            tier=self._store.tier,
            load_path=after.load_path if outcome == "done" else "",
            error=_brief(error) if error is not None else "",
            trace_id=format_trace_id(span.get_span_context().trace_id),
        )

    def _close(self, span: Span, error: BaseException | None) -> None:
        assert self.record is not None
        record = self.record
        span.set_attributes(
            {
                tm.OUTCOME: record.outcome,
                tm.EVICTED: record.num_evicted,
                tm.LOADED_BYTES: record.loaded_bytes,
                tm.TIER: record.tier,
                tm.LOAD_PATH: record.load_path,
                tm.DOWNTIME_S: record.downtime_s,
            }
        )
        labels = {tm.OUTCOME: record.outcome, tm.TO_MODEL: record.model or ""}
        self.telemetry.swaps.add(1, labels)
        self.telemetry.swap_seconds.record(record.seconds, labels)
        if record.outcome == "done" and self.model is not None:
            first_token = self.telemetry.start(
                tm.SPAN_FIRST_TOKEN, {tm.INSTANCE: record.instance}, parent=span
            )
            self.instance.await_first_token(first_token)
        self.telemetry.finish(span, error)

    def _attributes(self) -> tm.Attributes:
        return {
            tm.INSTANCE: self.instance.id,
            tm.FROM_MODEL: self._before or "",
            tm.TO_MODEL: self.model.id if self.model else "",
            tm.REASON: self.reason,
        }


class _LoadProgress:
    """Tells readers of events what a swap has read of its model, a few times a second."""

    def __init__(self, state: FleetState, instance: Instance) -> None:
        self._state, self._instance = state, instance
        self._next_s = -math.inf

    def bytes_read(self) -> None:
        if self._state.events.is_awaited and (now_s := current_time()) >= self._next_s:
            self._next_s = now_s + PROGRESS_S
            phase, target = self._instance.current_phase(), self._instance.target
            self._state.events.note("swap_progress", instance=self._instance.id, model=target, phase=phase)


def _brief(error: BaseException) -> str:
    if not isinstance(error, Exception):  # a cancellation, whose text names tasks by their addresses
        return type(error).__name__
    text = str(error)
    return f"{type(error).__name__}: {text}" if not isinstance(error, HotswapError) or not text else text
