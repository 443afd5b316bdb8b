"""OpenTelemetry spans and metrics: their names, attributes, and timestamps.

Spans have the event loop's time: the wall clock, read once, plus the loop time since then. So simulations in
virtual time are traced like real ones.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import anyio
from opentelemetry import metrics, trace
from opentelemetry.trace import Link, Span, SpanContext, Status, StatusCode
from opentelemetry.util.types import AttributeValue

__all__ = ["Telemetry"]

SPAN_REQUEST = "hotswap.request"
SPAN_HOP = "hotswap.hop"
SPAN_SWAP = "hotswap.swap"
SPAN_PHASE = "hotswap.{}"
SPAN_FIRST_TOKEN = "hotswap.first_token"
SPAN_PREFETCH = "hotswap.prefetch"
SPAN_ADAPTER = "hotswap.adapter"
SPAN_ADAPTER_UPDATE = "hotswap.adapter.update"
SPAN_ADAPTER_PIN = "hotswap.adapter.pin"
SPAN_MIGRATE = "hotswap.migrate"
SPAN_MIGRATE_STAGE = "hotswap.migrate.stage"

MODEL = "gen_ai.request.model"
OPERATION = "gen_ai.operation.name"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
REUSED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
FINISH_REASONS = "gen_ai.response.finish_reasons"
MAX_TOKENS = "gen_ai.request.max_tokens"
TEMPERATURE = "gen_ai.request.temperature"

INSTANCE = "hotswap.instance"
REQUEST_ID = "hotswap.request.id"
PRIORITY = "hotswap.request.priority"
ADAPTER = "hotswap.adapter"
NUM_HOPS = "hotswap.request.hops"
FROM_MODEL = "hotswap.swap.from_model"
TO_MODEL = "hotswap.swap.to_model"
REASON = "hotswap.swap.reason"
OUTCOME = "hotswap.swap.outcome"
EVICTED = "hotswap.swap.evicted_requests"
DOWNTIME_S = "hotswap.swap.downtime_s"
LOAD_PATH = "hotswap.swap.load_path"
DESTINATION = "hotswap.migrate.destination"
METHOD = "hotswap.migrate.method"
STAGE = "hotswap.migrate.stage"
STAGES = "hotswap.migrate.stages"
COPIED_BYTES = "hotswap.migrate.bytes"
ESTIMATED_S = "hotswap.migrate.estimated_downtime_s"
LOADED_BYTES = "hotswap.load.bytes"
TIER = "hotswap.load.tier"
BUFFERED = "hotswap.load.buffered"
SECONDS = "hotswap.seconds"

TTFT = "gen_ai.server.time_to_first_token"
TPOT = "gen_ai.server.time_per_output_token"
QUEUE_LENGTH = "hotswap.queue.length"
SWAPS = "hotswap.swaps"
SWAP_SECONDS = "hotswap.swap.duration"
RESIDENT_BYTES = "hotswap.store.resident_bytes"
ADAPTER_SECONDS = "hotswap.adapter.load.duration"
MIGRATIONS = "hotswap.migrations"
DOWNTIME = "hotswap.migration.downtime"
ESTIMATE_ERROR = "hotswap.migration.estimate_error"
ADAPTERS_HELD = "hotswap.adapters.held"
CONTROL_ERRORS = "hotswap.control.errors"

Attributes = Mapping[str, AttributeValue]


class Telemetry:
    """The tracer, the meter and the clock of one fleet.

    Providers default to OpenTelemetry's global ones, which do nothing until an application installs its SDK.
    """

    def __init__(
        self,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
    ) -> None:
        self.tracer = trace.get_tracer("hotswap", tracer_provider=tracer_provider)
        self.meter = metrics.get_meter("hotswap", meter_provider=meter_provider)
        # Whether measurements can be exported: a global provider may still be installed later.
        self.measures = not isinstance(self.meter, metrics.NoOpMeter)
        self.ttft = self.meter.create_histogram(
            TTFT, "s", "Arrival to first token, time in the queue included"
        )
        self.tpot = self.meter.create_histogram(TPOT, "s", "Mean time per output token after the first")
        self.swaps = self.meter.create_counter(SWAPS, "{swap}", "Swaps by outcome")
        self.swap_seconds = self.meter.create_histogram(SWAP_SECONDS, "s", "Duration of swaps")
        self.adapter_seconds = self.meter.create_histogram(
            ADAPTER_SECONDS, "s", "Duration of adapters' loads"
        )
        self.migrations = self.meter.create_counter(MIGRATIONS, "{move}", "Moves of requests by outcome")
        self.downtime = self.meter.create_histogram(DOWNTIME, "s", "Downtime of requests that move")
        self.estimate_error = self.meter.create_histogram(
            ESTIMATE_ERROR, "s", "Downtime of moves minus the estimate"
        )
        self.control_errors = self.meter.create_counter(
            CONTROL_ERRORS, "{error}", "Plans that failed, and planned actions that could not be started"
        )
        self._wall_ns_at_zero: int | None = None

    def now_ns(self) -> int:
        """The loop's time as nanoseconds since the epoch."""
        loop_ns = int(anyio.current_time() * 1e9)
        if self._wall_ns_at_zero is None:
            self._wall_ns_at_zero = time.time_ns() - loop_ns
        return self._wall_ns_at_zero + loop_ns

    def start(
        self,
        name: str,
        attributes: Attributes | None = None,
        *,
        parent: Span | None = None,
        links: Sequence[SpanContext] = (),
    ) -> Span:
        """Start a span now, under `parent` or as a root; end it with `finish`."""
        context = trace.set_span_in_context(parent) if parent is not None else None
        return self.tracer.start_span(
            name,
            context,
            attributes=attributes,
            links=[Link(link) for link in links if link.is_valid],
            start_time=self.now_ns(),
        )

    def finish(self, span: Span, error: BaseException | None = None) -> None:
        """End a span now, with an error status if it failed."""
        if error is not None:
            span.record_exception(error, timestamp=self.now_ns())
            span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        span.end(end_time=self.now_ns())

    @contextmanager
    def span(
        self,
        name: str,
        attributes: Attributes | None = None,
        *,
        parent: Span | None = None,
        links: Sequence[SpanContext] = (),
    ) -> Generator[Span]:
        """Run a block in a span; an error of the block is recorded on it.

        It is the current span in the block, so that spans of engines and stores become its children.
        """
        span = self.start(name, attributes, parent=parent, links=links)
        error: BaseException | None = None
        try:
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                yield span
        except BaseException as exc:
            error = exc
            raise
        finally:
            self.finish(span, error)
