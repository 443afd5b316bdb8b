"""Moves as the fleet starts them: chosen, counted, recorded. What a move does is in `move`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry.trace import format_trace_id

from hotswap import telemetry as tm
from hotswap.action import MigrationMethod, MigrationOutcome, MigrationRecord
from hotswap.errors import HotswapError, MigrationAborted
from hotswap.loop_time import current_time
from hotswap.migration import MoveChoice, Mover, MoveView, SupportsMigration
from hotswap.request import Request
from hotswap.runtime.active import ActiveRequest
from hotswap.runtime.adapter_cache import AdapterCaches
from hotswap.runtime.instance import Instance
from hotswap.runtime.move import MigrationLimits, Move
from hotswap.runtime.state import FleetState
from hotswap.stray_cancellation import no_stray_cancellation
from hotswap.telemetry import Telemetry

if TYPE_CHECKING:
    from opentelemetry.trace import Span

__all__ = ["Moves"]

log = logging.getLogger("hotswap")

MAX_RECORDS = 10_000
_BROKE_OFF = "The move of request %r broke off.\n%s"


class Moves:
    """Carries moves of requests out and keeps their records; belongs to one fleet.

    Args:
        state: Of the fleet.
        adapters: Has the destination hold what the request names.
        limits: When a move is given up.
        mover: Chooses the method where the caller does not; `None` takes KV blocks where both engines can.
        telemetry: Records spans and metrics.
        on_record: Called with every record, synchronously.
    """

    def __init__(
        self,
        state: FleetState,
        adapters: AdapterCaches,
        *,
        limits: MigrationLimits,
        mover: Mover | None,
        telemetry: Telemetry,
        on_record: Callable[[MigrationRecord], None] | None,
    ) -> None:
        self.limits = limits
        self.records: deque[MigrationRecord] = deque(maxlen=MAX_RECORDS)
        self._state, self._adapters, self._mover = state, adapters, mover
        self._telemetry, self._on_record = telemetry, on_record
        self._moves: set[Move] = set()

    def is_busy(self, instance: Instance) -> bool:
        """Whether an instance takes part in as many moves as it may."""
        return instance.num_moves >= self.limits.per_instance

    def turn_away(self, instance: Instance) -> None:
        """Give up the moves that go to an instance, which takes no more requests."""
        for move in self._moves:
            if move.destination is instance:
                move.turn_away()

    async def run_planned(
        self, active: ActiveRequest, destination: Instance, *, method: MigrationMethod | None, reason: str
    ) -> None:
        """Run a planned move; what cannot be begun is dropped, and its failure ends nothing else."""
        try:
            await self.run(active, destination, method=method, reason=reason)
        except MigrationAborted:
            return
        except Exception as exc:  # not of the move: a mover's fault, say
            log.error(_BROKE_OFF, active.request.id, tm.traceback_of(exc))

    async def run(
        self, active: ActiveRequest, destination: Instance, *, method: MigrationMethod | None, reason: str
    ) -> MigrationRecord:
        """Move a request and return what became of it, which is not always a move.

        A cancellation leaves the request where it is, or on its way with everything that it needs.

        Raises:
            MigrationAborted: in stage `"begin"`, with nothing done: it runs nowhere, or there already, or
                moves; an instance takes part in as many moves as it may, or could not serve it.
        """
        source = self._check(active, destination)
        choice = self._choose(active, source, destination, method)
        span = self._telemetry.start(
            tm.SPAN_MIGRATE, _describe(active, source, destination, choice, reason), parent=active.span
        )
        move = Move(
            active,
            source,
            destination,
            state=self._state,
            adapters=self._adapters,
            limits=self.limits,
            telemetry=self._telemetry,
            span=span,
        )
        started_s = current_time()
        outcome: MigrationOutcome = "cancelled"
        error: BaseException | None = None
        try:
            with self._taking_part(move), move.unless_in_vain(), no_stray_cancellation("The move"):
                outcome = await self._carry_out(move, choice.method, may_fall_back=method is None)
        except Exception as exc:
            outcome, error = ("finished" if active.finished else "aborted"), exc
            if not isinstance(exc, HotswapError):
                log.error(_BROKE_OFF, active.request.id, tm.traceback_of(exc))
        except BaseException as exc:
            error = exc
            raise
        finally:
            record = _record(move, choice, outcome, error, started_s, reason, span)
            self._keep(record, span, error if outcome in ("aborted", "cancelled") else None)
            error = None  # or it and this frame keep each other, and with them both engines' KV blocks
        return record

    async def _carry_out(
        self, move: Move, method: MigrationMethod, *, may_fall_back: bool
    ) -> MigrationOutcome:
        move.method = method
        if method == "wait":
            return "waited"
        if method == "kv":
            try:
                await move.with_blocks()
                return "done"
            except MigrationAborted as exc:
                # Blocks that cannot move, find no room or have no transport are no reason to stay.
                if not may_fall_back or exc.stage not in ("export", "reserve", "link"):
                    raise
        await move.as_tokens()
        return "done"

    def _check(self, active: ActiveRequest, destination: Instance) -> Instance:
        source, view, because = active.instance, destination.view(), ""
        if source is None or active.finished:
            because = "it runs on no instance"
        elif source is destination:
            because = f"it runs on {destination.id!r} already"
        elif active.moving:
            because = "it is moving already"
        elif not view.open or view.model != active.request.model:
            because = f"instance {view.id!r} is {view.state} with model {view.model!r}, and open: {view.open}"
        elif view.max_tokens is not None and self._longest(active.request) > view.max_tokens:
            because = f"it may outgrow the KV blocks of {view.id!r}, which hold {view.max_tokens} tokens"
        elif busy := [instance.id for instance in (source, destination) if self.is_busy(instance)]:
            because = f"instance {busy[0]!r} takes part in as many moves as it may"
        if source is None or because:
            raise MigrationAborted(f"Request {active.request.id!r} does not move: {because}.", stage="begin")
        return source

    def _longest(self, request: Request) -> int:
        """The most tokens that a request may have in KV blocks; the last one is never computed."""
        most = len(request.prompt) + request.sampling.max_tokens
        return min(most, self._state.models[request.model].max_context_tokens) - 1

    def _choose(
        self, active: ActiveRequest, source: Instance, destination: Instance, method: MigrationMethod | None
    ) -> MoveChoice:
        possible = all(isinstance(end.engine, SupportsMigration) for end in (source, destination))
        if self._mover is None or method is not None:
            return MoveChoice(method or ("kv" if possible else "tokens"))
        request = active.remaining
        return self._mover.choose(
            MoveView(
                num_tokens=request.num_tokens,
                num_remaining=request.remaining_tokens,
                kv_bytes_per_token=self._state.models[request.model].kv_bytes_per_token,
                source=source.view(),
                destination=destination.view(),
                kv_possible=possible,
            )
        )

    @contextmanager
    def _taking_part(self, move: Move) -> Generator[None]:
        ends = (move.source, move.destination)
        move.active.moving = True
        self._state.count_move(1, *ends)
        self._moves.add(move)
        try:
            yield
        finally:
            move.active.moving = False
            self._state.count_move(-1, *ends)
            self._moves.discard(move)

    def _keep(self, record: MigrationRecord, span: Span, error: BaseException | None) -> None:
        self.records.append(record)
        self._state.events.note(
            "move_ended", instance=record.destination, reason=record.reason, record=record
        )
        labels = {tm.METHOD: record.method, tm.OUTCOME: record.outcome}
        self._telemetry.migrations.add(1, labels)
        if record.outcome == "done":
            self._telemetry.downtime.record(record.downtime_s, labels)
            if record.estimated_s:
                self._telemetry.estimate_error.record(record.downtime_s - record.estimated_s, labels)
        span.set_attributes(
            {
                **labels,
                tm.DOWNTIME_S: record.downtime_s,
                tm.STAGES: record.num_stages,
                tm.COPIED_BYTES: record.copied_bytes,
            }
        )
        self._telemetry.finish(span, error)
        for tell in (self._mover.learn if self._mover else None, self._on_record):
            try:
                if tell is not None:
                    tell(record)
            except Exception:
                log.exception("What is told of moves failed for request %r; the move stands.", record.request)

    def __repr__(self) -> str:
        done = sum(record.outcome == "done" for record in self.records)
        return f"<Moves [{done} of {len(self.records)} done]>"


def _describe(
    active: ActiveRequest, source: Instance, destination: Instance, choice: MoveChoice, reason: str
) -> tm.Attributes:
    return {
        tm.REQUEST_ID: active.request.id,
        tm.MODEL: active.request.model,
        tm.INSTANCE: source.id,
        tm.DESTINATION: destination.id,
        tm.METHOD: choice.method,
        tm.ESTIMATED_S: choice.estimated_s,
        tm.REASON: reason,
    }


def _record(
    move: Move,
    choice: MoveChoice,
    outcome: MigrationOutcome,
    error: BaseException | None,
    started_s: float,
    reason: str,
    span: Span,
) -> MigrationRecord:
    return MigrationRecord(
        request=move.active.request.id,
        source=move.source.id,
        destination=move.destination.id,
        method=move.method,
        outcome=outcome,
        reason=reason,
        started_s=started_s,
        seconds=current_time() - started_s,
        downtime_s=move.downtime_s,
        num_tokens=move.num_tokens,
        num_stages=move.num_stages,
        copied_bytes=move.copied_bytes,
        estimated_s=choice.estimated_s,
        stage="" if outcome in ("done", "waited") else move.stage,
        error="" if error is None else f"{type(error).__name__}: {error}",
        trace_id=format_trace_id(span.get_span_context().trace_id),
    )
