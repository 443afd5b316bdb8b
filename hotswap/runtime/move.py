"""One move of a request from one instance to another: with its KV blocks, or as tokens in rounds.

    kv      reserve, copy what is full while the request decodes, again what has come since, until little is
            left; stop, copy the rest, commit, hand over (Llumnix: Sun et al., arXiv:2406.03243, section 4.2)
    tokens  have the destination prefill the tokens so far while the request decodes, again what has come
            since, until little is left; cut, hand over (ServerlessLLM: Fu et al., OSDI 2024, section 5.3)

A hand-over tells the request where to go next (`ActiveRequest.redirect`). A failure before that leaves the
request where it was; a failure afterwards is handled like that of any other stay on an instance.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import anyio

from hotswap import telemetry as tm
from hotswap.action import MigrationMethod
from hotswap.checks import check_counts, check_positive_seconds
from hotswap.errors import ConfigError, MigrationAborted, RequestEvicted
from hotswap.loop_time import current_time
from hotswap.migration import KVSink, KVSource, SupportsMigration
from hotswap.request import Request, RequestId
from hotswap.runtime.active import ActiveRequest
from hotswap.runtime.adapter_cache import AdapterCaches
from hotswap.runtime.instance import Instance
from hotswap.runtime.state import FleetState
from hotswap.sampling import with_checked
from hotswap.telemetry import Telemetry
from hotswap.view import InstanceState

if TYPE_CHECKING:
    from opentelemetry.trace import Span

__all__ = ["MigrationLimits", "Move"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationLimits:
    """When a move is given up, and how little is left when the request stops for it.

    Attributes:
        per_instance: Moves at once that an instance takes part in, as either end.
        max_stages: Copies before the last one, and rounds of tokens; a move that needs more is given up.
        last_stage_blocks: KV blocks left at which the request stops for the last copy.
        last_round_tokens: Tokens left at which the request is cut.
        chunk_bytes: Of KV blocks on their way at once; a block is the least.
        stage_s: How long any stage may take that is no round of tokens.
        round_s: How long such a round may take, a prefill for which no client waits.
    """

    per_instance: int = 1
    max_stages: int = 16
    last_stage_blocks: int = 2
    last_round_tokens: int = 16
    chunk_bytes: int = 16 << 20
    stage_s: float = 60.0
    round_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("per_instance", "max_stages", "last_stage_blocks", "last_round_tokens", "chunk_bytes"):
            check_counts(ConfigError, 1, **{name: getattr(self, name)})
        check_positive_seconds(ConfigError, stage_s=self.stage_s, round_s=self.round_s)


class Move:
    """Carries one request from `source` to `destination`; used once.

    Attributes:
        method: With blocks or as tokens.
        stage: Where it is.
        num_stages: How many copies or rounds there were.
        copied_bytes: Of KV blocks.
        num_tokens: Of the request, when it was handed over.
        stopped_s: The loop time at which the source last could decode.
        downtime_s: From there to the first token on the destination.
    """

    def __init__(
        self,
        active: ActiveRequest,
        source: Instance,
        destination: Instance,
        *,
        state: FleetState,
        adapters: AdapterCaches,
        limits: MigrationLimits,
        telemetry: Telemetry,
        span: Span,
    ) -> None:
        self.active, self.source, self.destination = active, source, destination
        self.method: MigrationMethod = "tokens"
        self.stage = "begin"
        self.num_stages = self.copied_bytes = self.num_tokens = 0
        self.stopped_s = self.downtime_s = 0.0
        self._owes = False
        self._scope, self._in_vain = anyio.CancelScope(), ""
        self._state, self._adapters, self._limits = state, adapters, limits
        self._telemetry, self._span = telemetry, span

    async def with_blocks(self) -> None:
        """Move with KV blocks.

        Raises:
            MigrationAborted: naming the stage; the request goes on where it was, or has ended.
            InstanceLost: an end was lost, likewise.
        """
        self.method = "kv"
        source, destination = self.source.engine, self.destination.engine
        if not (isinstance(source, SupportsMigration) and isinstance(destination, SupportsMigration)):
            raise self._abort("export", "one of the engines cannot move KV blocks")
        request = self.active.remaining
        async with (
            self._adapters.held(self.active.adapter, request.id, self.destination, self._span),
            source.export_kv(request.id) as exported,
            destination.import_kv(request) as imported,
        ):
            if exported.layout != imported.layout:
                raise self._abort("reserve", "the engines keep KV blocks in different layouts")
            with self._assigned():
                num_copied = await self._copy_while_decoding(exported, imported)
                await self._hand_over_blocks(exported, imported, num_copied)
            await self._arrive()

    async def as_tokens(self) -> None:
        """Move as tokens, which the destination computes.

        Raises:
            MigrationAborted: it computes them no faster than new ones come, or keeps nothing of them.
            InstanceLost: the destination was lost.
        """
        self.method = "tokens"
        request = self.active.request
        async with self._adapters.held(self.active.adapter, request.id, self.destination, self._span):
            with self._assigned():
                await self._prefill_in_rounds()
                self.stage = "hand over"
                self._require_here()
                self.stopped_s, self.num_tokens = current_time(), self.active.remaining.num_tokens
                self._redirect()
                self.active.interrupt()
            await self._arrive()

    @contextmanager
    def unless_in_vain(self) -> Generator[None]:
        """Bracket the move: it ends, by `MigrationAborted`, when the request will not come any more."""
        self.active.move = self
        try:
            with self._scope:
                yield
        finally:
            self.active.move = None
        if self._scope.cancelled_caught:
            raise self._abort(self.stage, self._in_vain)

    def turn_away(self) -> None:
        """Give the move up, unless the request has gone to its destination already."""
        if not self._has_gone:
            self._in_vain = f"instance {self.destination.id!r} takes no more requests"
            self._scope.cancel()

    def source_left(self) -> None:
        """Give the move up if the request has left early; with blocks the verbs of the source end it."""
        if self.method == "tokens" and not self._has_gone:
            self._in_vain = "the request has ended or gone elsewhere"
            self._scope.cancel()

    @property
    def _has_gone(self) -> bool:
        return self.stage == "arrive" or self.destination in (self.active.next_instance, self.active.instance)

    # ------------------------------------------------------------------ blocks

    async def _copy_while_decoding(self, source: KVSource, sink: KVSink) -> int:
        """Copy full blocks until few are left; return how many of the request's were copied."""
        block_tokens, num_copied = source.layout.block_tokens, sink.num_present_blocks
        for _ in range(self._limits.max_stages):
            with self._timed("reserve"):
                self._require_here()
                num_full = await source.num_tokens() // block_tokens
                await sink.reserve((num_full + 1) * block_tokens)
            if num_full - num_copied < self._limits.last_stage_blocks:
                return num_copied
            with self._timed("copy"):
                await self._copy(source, sink, num_copied, num_full * block_tokens)
            num_copied = num_full
        raise self._abort("copy", f"{self.num_stages} copies were too few to catch up with the request")

    async def _copy(self, source: KVSource, sink: KVSink, first_block: int, end: int) -> None:
        """Copy from a block on to token `end`, some at a time."""
        block_tokens = source.layout.block_tokens
        step = max(1, self._limits.chunk_bytes // max(1, source.layout.block_bytes)) * block_tokens
        self.num_stages += 1
        for at in range(first_block * block_tokens, end, step):
            self.copied_bytes += await source.copy_to(sink, at // block_tokens, min(step, end - at))

    async def _hand_over_blocks(self, source: KVSource, sink: KVSink, num_copied: int) -> None:
        with self._timed("stop"):
            self._require_here()
            stopped = await source.stop_for(sink, num_copied)
            self.stopped_s = current_time() - stopped.ago_s
            self.num_tokens = len(stopped.tokens)
        with self._timed("last copy"):
            await sink.reserve(stopped.num_computed)
            await self._copy(source, sink, num_copied, stopped.num_computed)
        with self._timed("commit"):
            await sink.commit(stopped.tokens)
            self._require_here()
            self._redirect()
            try:
                await source.release()
            except BaseException:
                self._owes = self.active.take_next() is not None
                raise

    # ------------------------------------------------------------------ tokens

    async def _prefill_in_rounds(self) -> None:
        """Have the destination compute all but a few of the request's tokens."""
        num_sent, num_left = 0, 0
        while True:
            request = self.active.remaining
            before, num_left = num_left, request.num_tokens - num_sent
            if self.num_stages and num_left <= self._limits.last_round_tokens:
                return
            if self.num_stages >= self._limits.max_stages or (self.num_stages > 1 and num_left >= before):
                raise self._abort("rounds", f"{num_left} tokens came during the last of {self.num_stages}")
            self.stage = "rounds"
            self._require_here()
            await self._prefill(request, num_sent)
            num_sent = request.num_tokens

    async def _prefill(self, request: Request, num_sent: int) -> None:
        """Have the destination compute a request's tokens, and find `num_sent` of them computed before."""
        self.num_stages += 1
        limited = with_checked(request.sampling, max_tokens=len(request.generated) + 1, min_tokens=0, stop=())
        round_id = RequestId(f"{request.id}/{self.num_stages}")
        ahead = replace(request, id=round_id, sampling=limited)
        with self._timed("rounds"):
            try:
                async with self.destination.engine.stream(ahead) as tokens:
                    await anext(tokens)
                    num_reused = tokens.num_reused_tokens
            except RequestEvicted as exc:
                raise self._abort("rounds", f"instance {self.destination.id!r} admits no request") from exc
        if num_sent and 2 * num_reused < num_sent:
            raise self._abort(
                "rounds", f"instance {self.destination.id!r} kept {num_reused} of {num_sent} tokens"
            )

    # ------------------------------------------------------------------ both

    @contextmanager
    def _assigned(self) -> Generator[None]:
        """Assign the request to the destination, until the request takes that over."""
        request = self.active.request
        self._state.assign(request, self.destination)
        self._owes = True
        try:
            yield
        finally:
            if self._owes:
                self._state.release(request, self.destination)

    def _redirect(self) -> None:
        self.active.redirect(self.destination, self._span.get_span_context())
        self._owes = False

    async def _arrive(self) -> None:
        """Wait for the first token, or for another end of the hop."""
        with self._timed("arrive"):
            assert self.active.arrived is not None, "it was told to come here"
            await self.active.arrived.wait()
        if self.active.arrived_s is None:
            raise self._abort("arrive", "the destination gave it no token")
        self.downtime_s = max(0.0, self.active.arrived_s - self.stopped_s)

    @contextmanager
    def _timed(self, stage: str) -> Generator[None]:
        """Bracket a stage by its span and its time limit."""
        self.stage = stage
        limit_s = self._limits.round_s if stage == "rounds" else self._limits.stage_s
        with self._telemetry.span(tm.SPAN_MIGRATE_STAGE, {tm.STAGE: stage}, parent=self._span):
            with anyio.move_on_after(limit_s) as limit:
                yield
            if limit.cancelled_caught:
                raise self._abort(stage, f"it took longer than {limit_s:g} s")

    def _require_here(self) -> None:
        """Raise unless the request still runs where it is to be taken from, and it can go where it is to."""
        if self.active.finished or self.active.instance is not self.source:
            raise self._abort(self.stage, "the request has ended or gone elsewhere")
        view = self.destination.view()
        if view.state is not InstanceState.SERVING or view.model != self.active.request.model:
            raise self._abort(self.stage, f"instance {view.id!r} is {view.state} with model {view.model!r}")
        if view.draining:
            raise self._abort(self.stage, f"instance {view.id!r} is being drained")

    def _abort(self, stage: str, because: str) -> MigrationAborted:
        return MigrationAborted(
            f"The move of request {self.active.request.id!r} to {self.destination.id!r} ended in {stage!r}: "
            f"{because}. The request goes on without it.",
            stage=stage,
        )
