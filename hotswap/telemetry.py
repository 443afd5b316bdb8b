"""OpenTelemetry spans and metrics: their names, attributes, and timestamps. All are in docs/telemetry.md.

Names in `gen_ai` are those of OpenTelemetry's semantic conventions for generative AI, and mean what they say.
Spans have the event loop's time: the wall clock, read once, plus the loop time since then. So simulations in
virtual time are traced like real ones.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import anyio
from opentelemetry import metrics, trace
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from hotswap.errors import RequestEvicted

__all__ = ["Telemetry", "traceback_of"]

# What a span of a request is called, with its model: `chat llama`.
COMPLETION, CHAT = "text_completion", "chat"
SPAN_HOP = "hotswap.hop"
SPAN_SWAP = "hotswap.swap"
SPAN_PHASE = "hotswap.{}"
SPAN_FIRST_TOKEN = "hotswap.first_token"
SPAN_ADAPTER = "hotswap.adapter"
SPAN_ADAPTER_UPDATE = "hotswap.adapter.update"
SPAN_ADAPTER_PIN = "hotswap.adapter.pin"
SPAN_MIGRATE = "hotswap.migrate"
SPAN_MIGRATE_STAGE = "hotswap.migrate.stage"
SPAN_OFFLOAD = "hotswap.offload"
SPAN_RESIZE = "hotswap.resize"

MODEL = "gen_ai.request.model"
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
TOKEN_TYPE = "gen_ai.token.type"
ERROR_TYPE = "error.type"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
REUSED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
FINISH_REASONS = "gen_ai.response.finish_reasons"
MAX_TOKENS = "gen_ai.request.max_tokens"
TEMPERATURE = "gen_ai.request.temperature"
TOP_P = "gen_ai.request.top_p"
TOP_K = "gen_ai.request.top_k"
SEED = "gen_ai.request.seed"

FLEET = "hotswap.fleet"
INSTANCE = "hotswap.instance"
INSTANCE_STATE = "hotswap.instance.state"
REQUEST_ID = "hotswap.request.id"
PRIORITY = "hotswap.request.priority"
ADAPTER = "hotswap.adapter"
NUM_HOPS = "hotswap.request.hops"
REQUEST_OUTCOME = "hotswap.request.outcome"
ENDED_BY = "hotswap.ended_by"
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
KV_TIER = "hotswap.kv.tier"
KV_SAVED_REQUESTS = "hotswap.kv.saved_requests"
KV_SAVED_TOKENS = "hotswap.kv.saved_tokens"
KV_SAVED_BYTES = "hotswap.kv.saved_bytes"
KV_RESTORED_TOKENS = "hotswap.kv.restored_tokens"
KV_RESTORED_BYTES = "hotswap.kv.restored_bytes"
WANTED_BLOCKS = "hotswap.kv.wanted_blocks"
REACHED_BLOCKS = "hotswap.kv.reached_blocks"
LOADED_BYTES = "hotswap.load.bytes"
TIER = "hotswap.load.tier"
BUFFERED = "hotswap.load.buffered"
SECONDS = "hotswap.seconds"

REQUESTS = "hotswap.requests"
REQUESTS_RUNNING = "hotswap.requests.running"
REQUEST_SECONDS = "gen_ai.server.request.duration"
TOKEN_USAGE = "gen_ai.client.token.usage"
REUSED = "hotswap.tokens.reused"
TTFT = "gen_ai.server.time_to_first_token"
TPOT = "gen_ai.server.time_per_output_token"
QUEUE_LENGTH = "hotswap.queue.length"
QUEUE_SECONDS = "hotswap.queue.duration"
KV_USAGE = "hotswap.kv.usage"
KV_BLOCKS = "hotswap.kv.blocks"
KV_SAVED = "hotswap.kv.saved"
KV_RESTORED = "hotswap.kv.restored"
KV_STORED = "hotswap.kv.stored"
INSTANCES = "hotswap.instances"
LOSSES = "hotswap.instance.losses"
RESTARTS = "hotswap.instance.restarts"
RESTART_OUTCOME = "hotswap.restart.outcome"
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

# Upper bounds of buckets. Those of the conventions, and beyond, as a first token may wait for a swap.
_REQUEST_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84)
_FIRST_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0),
)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = tuple(4.0**power for power in range(14))
_SWAP_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_ERROR_S = (*(-bound for bound in reversed(_SHORT_S)), 0.0, *_SHORT_S)


class Telemetry:
    """The tracer, the meters and the clock of one fleet.

    Providers default to OpenTelemetry's global ones, which do nothing until an application installs its SDK.
    Counters and histograms of all fleets of a provider are one. Gauges are each fleet's own: their meter has
    the name of the fleet as an attribute of its scope.
    """

    def __init__(
        self,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
        *,
        fleet: str = "",
    ) -> None:
        self.tracer = trace.get_tracer("hotswap", tracer_provider=tracer_provider)
        self.meter = metrics.get_meter("hotswap", meter_provider=meter_provider)
        self.gauges = metrics.get_meter("hotswap", meter_provider=meter_provider, attributes={FLEET: fleet})
        # Whether measurements can be exported: a global provider may still be installed later.
        self.measures = not isinstance(self.meter, metrics.NoOpMeter)
        self._create_instruments()
        self._wall_ns_at_zero: int | None = None

    def _create_instruments(self) -> None:
        counter = self.meter.create_counter
        self.requests = counter(REQUESTS, "{request}", "Requests that ended or were refused, by outcome")
        self.request_seconds = self._seconds(REQUEST_SECONDS, "Arrival to the end of a request", _REQUEST_S)
        self.token_usage = self.meter.create_histogram(
            TOKEN_USAGE,
            "{token}",
            "Tokens of prompts and of answers",
            explicit_bucket_boundaries_advisory=_TOKENS,
        )
        self.reused = counter(REUSED, "{token}", "Tokens of prompts that were not computed again")
        self.ttft = self._seconds(TTFT, "Arrival to first token, time in the queue included", _FIRST_S)
        self.tpot = self._seconds(TPOT, "Mean time per output token after the first", _TOKEN_S)
        self.queue_seconds = self._seconds(QUEUE_SECONDS, "Arrival until a request first runs", _FIRST_S)
        self.losses = counter(LOSSES, "{loss}", "Instances that were lost")
        self.restarts = counter(RESTARTS, "{restart}", "Restarts of lost instances by outcome")
        self.swaps = counter(SWAPS, "{swap}", "Swaps by outcome")
        self.swap_seconds = self._seconds(SWAP_SECONDS, "Duration of swaps", _SWAP_S)
        self.adapter_seconds = self._seconds(ADAPTER_SECONDS, "Duration of adapters' loads", _SHORT_S)
        self.migrations = counter(MIGRATIONS, "{move}", "Moves of requests by outcome")
        self.downtime = self._seconds(DOWNTIME, "Downtime of requests that move", _SHORT_S)
        self.estimate_error = self._seconds(ESTIMATE_ERROR, "Downtime of moves minus the estimate", _ERROR_S)
        self.kv_saved = counter(KV_SAVED, "By", "KV blocks of requests that were saved before an eviction")
        self.kv_restored = counter(KV_RESTORED, "{token}", "Tokens that were restored, not computed again")
        self.control_errors = counter(
            CONTROL_ERRORS, "{error}", "Plans that failed, and planned actions that could not be started"
        )

    def _seconds(self, name: str, description: str, buckets: Sequence[float]) -> metrics.Histogram:
        return self.meter.create_histogram(
            name, "s", description, explicit_bucket_boundaries_advisory=buckets
        )

    def refused(self, operation: str, model: str | None, error: Exception) -> None:
        """Count a request that was refused before it began; `model` is `None` if none is called so."""
        named = {} if model is None else {MODEL: model}
        self.requests.add(
            1,
            {
                OPERATION: operation,
                PROVIDER: "hotswap",
                REQUEST_OUTCOME: "refused",
                ERROR_TYPE: type(error).__name__,
                **named,
            },
        )

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
            kind=SpanKind.INTERNAL,  # of the conventions for models in the same process
            attributes=attributes,
            links=[Link(link) for link in links if link.is_valid],
            start_time=self.now_ns(),
        )

    def finish(self, span: Span, error: BaseException | None = None) -> None:
        """End a span now, with an error status if it failed, which eviction and cancellation are not."""
        if isinstance(error, RequestEvicted):
            span.set_attribute(ENDED_BY, "eviction")
        elif isinstance(error, GeneratorExit | anyio.get_cancelled_exc_class()):
            span.set_attribute(ENDED_BY, "cancellation")
        elif error is not None:
            span.set_attribute(ERROR_TYPE, type(error).__name__)
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
        """Run a block in a span; an error of the block is recorded on it, as by `finish`.

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


def traceback_of(error: BaseException) -> str:
    """Return an error with its causes as Python prints them, for the log.

    A record of the log with the error itself would keep its frames, and with them KV blocks and weights of
    engines: an unload would fail for as long as a handler keeps the record.
    """
    return "".join(traceback.format_exception(error)).rstrip()
