"""The trace tells what happened: a tree per swap, and per request a span that links to what moved it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from anyio import to_thread
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader, MetricsData
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from hotswap import Request, Sampling
from hotswap.abc import TokenStream, WrapperEngine
from hotswap.errors import DeadlineExceeded, InvalidRequest, QueueFull, SwapFailed, UnknownModel
from hotswap.offline.virtual_time import run, virtual_time
from hotswap.runtime.metrics import LastView
from hotswap.runtime.state import FleetState
from hotswap.telemetry import Telemetry
from tests.runtime.support import Idle, engine_of, sim_fleet, store_of, until
from tests.runtime.test_swap import NoPreload, Unreadable

MANY = Sampling(max_tokens=60, ignore_eos=True)


class Recorder:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def children(self, parent: ReadableSpan) -> list[ReadableSpan]:
        found = [
            span
            for span in self.exporter.get_finished_spans()
            if span.parent is not None and span.parent.span_id == parent.context.span_id
        ]
        return sorted(found, key=lambda span: span.start_time or 0)


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


@virtual_time
async def test_a_swap_is_one_tree_with_a_span_for_each_phase() -> None:
    recorder = Recorder()
    engines = [NoPreload(engine_of("e0")), engine_of("e1")]
    async with sim_fleet(
        "a", "b", engines=engines, scheduler=Idle(), tracer_provider=recorder.provider
    ) as fleet:
        await fleet.swap("e0", to="a")
        record = await fleet.swap("e0", to="b", reason="load moved")
        await fleet.generate("b", (1,), Sampling(max_tokens=2, ignore_eos=True))
    swap = recorder.spans("hotswap.swap")[-1]
    assert [span.name for span in recorder.children(swap)] == [
        "hotswap.preflight",
        "hotswap.evict",
        "hotswap.unload",
        "hotswap.load",
        "hotswap.first_token",
    ]
    assert swap.attributes is not None
    assert swap.attributes["hotswap.swap.reason"] == "load moved"
    assert swap.attributes["hotswap.swap.to_model"] == "b"
    load = next(span for span in recorder.children(swap) if span.name == "hotswap.load")
    assert load.attributes is not None
    assert load.attributes["hotswap.load.bytes"] == 1 << 20
    assert load.attributes["hotswap.load.tier"] == record.tier
    assert seconds(load) == pytest.approx(record.phase_s("load"))
    assert seconds(swap) == pytest.approx(record.seconds)
    assert f"{swap.context.trace_id:032x}" == record.trace_id


@virtual_time
async def test_bytes_are_counted_in_the_phase_that_read_them() -> None:
    recorder = Recorder()
    async with sim_fleet("a", "b", scheduler=Idle(), tracer_provider=recorder.provider) as fleet:
        await fleet.swap("e0", to="a")
        record = await fleet.swap("e0", to="b")
    phases = {span.name: span.attributes for span in recorder.children(recorder.spans("hotswap.swap")[-1])}
    counted = {
        name: attributes["hotswap.load.bytes"]
        for name, attributes in phases.items()
        if attributes is not None and "hotswap.load.bytes" in attributes
    }
    assert counted == {"hotswap.preload": record.loaded_bytes, "hotswap.load": 0}


@virtual_time
async def test_a_failed_swap_carries_its_error() -> None:
    recorder = Recorder()
    store = Unreadable(store_of("a"), "a")
    async with sim_fleet("a", store=store, scheduler=Idle(), tracer_provider=recorder.provider) as fleet:
        with pytest.raises(SwapFailed):
            await fleet.swap("e0", to="a")
    (swap,) = recorder.spans("hotswap.swap")
    assert swap.status.status_code is StatusCode.ERROR
    assert "x.bin" in (swap.status.description or "")


@virtual_time
async def test_a_request_links_to_the_swap_that_evicted_it() -> None:
    recorder = Recorder()
    async with sim_fleet("a", "b", scheduler=Idle(), tracer_provider=recorder.provider) as fleet:
        await fleet.swap("e0", to="a")
        await fleet.swap("e1", to="a")
        async with fleet.stream("a", (1, 2), MANY) as stream:
            await anext(stream)
            at = next(i.id for i in fleet.view().instances if i.num_requests)
            await fleet.swap(at, to="b", reason="evicts it")
            await stream.collect()
    (request,) = recorder.spans("text_completion a")
    evicting = next(
        span
        for span in recorder.spans("hotswap.swap")
        if (span.attributes or {})["hotswap.swap.reason"] == "evicts it"
    )
    first, second = recorder.children(request)
    assert [link.context.span_id for link in request.links] == [evicting.context.span_id]
    assert list(first.links) == []
    assert [link.context.span_id for link in second.links] == [evicting.context.span_id]
    assert request.attributes is not None
    assert request.attributes["gen_ai.request.model"] == "a"
    assert request.attributes["gen_ai.usage.input_tokens"] == 2
    assert request.attributes["gen_ai.usage.output_tokens"] == 60
    assert request.attributes["gen_ai.response.finish_reasons"] == ("length",)


class Remembering(WrapperEngine):
    """An engine that had computed all but the last token before."""

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[TokenStream]:
        async with self.wrapped.stream(request) as tokens:
            tokens.num_reused_tokens = request.num_tokens - 1
            yield tokens


@virtual_time
async def test_a_hop_says_how_many_tokens_were_not_computed_again() -> None:
    recorder = Recorder()
    engines = [Remembering(engine_of("e0"))]
    async with sim_fleet("a", engines=engines, tracer_provider=recorder.provider) as fleet:
        await fleet.generate("a", (1, 2, 3), MANY)
    (hop,) = recorder.spans("hotswap.hop")
    assert (hop.attributes or {})["gen_ai.usage.cache_read.input_tokens"] == 2


@virtual_time
async def test_every_span_is_ended_when_the_fleet_has_closed() -> None:
    recorder = Recorder()
    started: list[str] = []
    tracer = recorder.provider

    class Counting(SimpleSpanProcessor):
        def on_start(self, span: object, parent_context: object = None) -> None:
            started.append("span")

    tracer.add_span_processor(Counting(InMemorySpanExporter()))
    async with sim_fleet("a", "b", tracer_provider=tracer) as fleet:
        await fleet.generate("a", (1,), MANY)
        await fleet.generate("b", (1,), MANY)
        await fleet.swap("e0", to="b") if fleet.view().instances[0].model != "b" else None
    assert len(started) == len(recorder.exporter.get_finished_spans())


def metrics_of(data: MetricsData | None) -> dict[str, list[float]]:
    assert data is not None
    found: dict[str, list[float]] = {}
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                points = [getattr(p, "sum", getattr(p, "value", None)) for p in metric.data.data_points]
                found[metric.name] = [float(point or 0) for point in points]
    return found


@virtual_time
async def test_metrics_count_requests_queues_swaps_and_residency() -> None:
    reader = InMemoryMetricReader()
    async with sim_fleet("a", "b", meter_provider=MeterProvider([reader])) as fleet:
        await fleet.generate("a", (1,), MANY)
        found = metrics_of(reader.get_metrics_data())
        assert found["hotswap.swaps"] == [1.0]
        assert found["gen_ai.server.time_to_first_token"][0] >= fleet.swaps[0].seconds
        assert found["gen_ai.server.time_per_output_token"][0] > 0
        assert found["hotswap.queue.length"] == [0.0, 0.0]
        assert sum(found["hotswap.store.resident_bytes"]) >= 1 << 20


async def test_gauges_are_read_from_any_thread_until_the_fleet_closes() -> None:
    reader = InMemoryMetricReader()
    async with sim_fleet("a", meter_provider=MeterProvider([reader])) as fleet:
        await fleet.generate("a", (1,), Sampling(max_tokens=1))
        found = metrics_of(await to_thread.run_sync(reader.get_metrics_data))
        assert found["hotswap.queue.length"] == [0.0]
        assert len(found["hotswap.store.resident_bytes"]) == len(fleet.view().store.tiers)
    assert "hotswap.queue.length" not in metrics_of(reader.get_metrics_data())


@pytest.mark.parametrize(
    ("provider", "wanted"), [(None, True), (MeterProvider(), True), (NoOpMeterProvider(), False)]
)
def test_only_for_a_meter_that_measures_is_a_view_kept(
    provider: MeterProvider | NoOpMeterProvider | None, wanted: bool
) -> None:
    """Without a provider one may still be installed."""

    async def views() -> int:
        last = LastView(FleetState(store_of("a")), wanted=Telemetry(meter_provider=provider).measures)
        last.keep()
        return len(list(last.seen()))

    assert run(views) == wanted


@virtual_time
async def test_the_span_of_a_request_says_why_it_ended_early() -> None:
    recorder = Recorder()
    async with sim_fleet("a", scheduler=Idle(), max_waiting=0, tracer_provider=recorder.provider) as fleet:
        with pytest.raises(QueueFull):
            await fleet.generate("a", (1,))
        await fleet.swap("e0", to="a")
        with pytest.raises(DeadlineExceeded):
            await fleet.generate("a", (1,), Sampling(max_tokens=4000, ignore_eos=True), deadline_s=1.0)
    said = [span.status.description for span in recorder.spans("text_completion a")]
    assert [text.partition(":")[0] for text in said if text] == ["QueueFull", "DeadlineExceeded"]


Point = tuple[dict[str, object], float]


def points(data: MetricsData | None) -> dict[str, list[Point]]:
    """The points of every metric: attributes, and the value, or the count of a histogram."""
    found: dict[str, list[Point]] = {}
    assert data is not None
    for scope in (scope for resource in data.resource_metrics for scope in resource.scope_metrics):
        for metric in scope.metrics:
            for point in metric.data.data_points:
                value = getattr(point, "count", getattr(point, "value", 0))
                found.setdefault(metric.name, []).append((dict(point.attributes or {}), float(value or 0)))
    return found


@virtual_time
async def test_requests_are_counted_by_outcome_and_error_and_their_tokens_by_type() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    async with sim_fleet("a", scheduler=Idle(), max_waiting=0, meter_provider=provider) as fleet:
        with pytest.raises(QueueFull):
            await fleet.generate("a", (1,), MANY)
        await fleet.swap("e0", to="a")
        await fleet.generate("a", (1, 2, 3), MANY)
        await fleet.generate("a", (1, 2), MANY)
        with pytest.raises(DeadlineExceeded):
            await fleet.generate("a", (1,), Sampling(max_tokens=4000, ignore_eos=True), deadline_s=1.0)
        async with fleet.stream("a", (1,), MANY) as stream:
            await anext(stream)
        with pytest.raises(UnknownModel):
            await fleet.generate("no such model", (1,))
        with pytest.raises(InvalidRequest):
            await fleet.generate("a", ())
        with pytest.raises(InvalidRequest, match="stop_token_ids"):  # there is no tokenizer
            await fleet.generate("a", (1,), Sampling(stop=["x"]))
    found = points(reader.get_metrics_data())
    counted = {
        (str(at["hotswap.request.outcome"]), str(at.get("error.type", ""))): value
        for at, value in found["hotswap.requests"]
    }
    assert counted == {
        ("length", ""): 2,
        ("left", ""): 1,
        ("error", "QueueFull"): 1,
        ("error", "DeadlineExceeded"): 1,
        ("refused", "UnknownModel"): 1,
        ("refused", "InvalidRequest"): 2,
    }
    assert {at.get("gen_ai.request.model", "a") for at, _ in found["hotswap.requests"]} == {"a"}, (
        "a client cannot make up names of series"
    )
    seconds_by_error = {at.get("error.type", ""): n for at, n in found["gen_ai.server.request.duration"]}
    assert seconds_by_error == {"": 3, "QueueFull": 1, "DeadlineExceeded": 1}
    assert {at["gen_ai.token.type"] for at, _ in found["gen_ai.client.token.usage"]} == {"input", "output"}


@virtual_time
async def test_a_request_for_many_samples_that_is_refused_is_one_request() -> None:
    recorder, reader = Recorder(), InMemoryMetricReader()
    async with sim_fleet(
        "a",
        scheduler=Idle(),
        max_waiting=7,
        tracer_provider=recorder.provider,
        meter_provider=MeterProvider([reader]),
    ) as fleet:
        with pytest.raises(QueueFull):
            await fleet.generate("a", (1,), Sampling(n=8, temperature=1.0))
    found = points(reader.get_metrics_data())
    assert [value for _, value in found["hotswap.requests"]] == [1]
    assert [value for _, value in found["gen_ai.server.request.duration"]] == [1]
    assert len(recorder.spans("text_completion a")) == 1


@virtual_time
async def test_tokens_add_up() -> None:
    reader = InMemoryMetricReader()
    async with sim_fleet("a", meter_provider=MeterProvider([reader])) as fleet:
        await fleet.generate("a", (1, 2, 3), MANY)
        await fleet.generate("a", (1, 2), MANY)
    assert sorted(metrics_of(reader.get_metrics_data())["gen_ai.client.token.usage"]) == [5.0, 120.0]


@virtual_time
async def test_gauges_show_what_runs_and_waits_and_what_instances_are_and_hold() -> None:
    reader = InMemoryMetricReader()
    engine = engine_of("e0", max_requests=1)
    provider = MeterProvider([reader])
    async with sim_fleet("a", engines=[engine], scheduler=Idle(), meter_provider=provider) as fleet:
        await fleet.swap("e0", to="a")
        async with (
            fleet.stream("a", (1,) * 100, MANY) as running,
            fleet.stream("a", (1,), MANY) as _,
            fleet.stream("a", (1,), MANY) as _,
        ):
            await anext(running)
            found = points(reader.get_metrics_data())
            assert found["hotswap.requests.running"] == [({"gen_ai.request.model": "a"}, 1.0)]
            assert found["hotswap.queue.length"] == [({"gen_ai.request.model": "a"}, 2.0)]
            assert found["hotswap.kv.blocks"] == [({"hotswap.instance": "e0"}, 512.0)]
            ((_, used),) = found["hotswap.kv.usage"]
            assert used == pytest.approx(1 - engine.status().num_free_kv_blocks / 512)
            assert used > 0
        engine.lose("it is tired")
        lost = points(reader.get_metrics_data())["hotswap.instances"]
        await until(lambda: engine.status().state == "EMPTY")
        found = points(reader.get_metrics_data())
    assert {at["hotswap.instance.state"]: value for at, value in lost}["LOST"] == 1
    assert {at["hotswap.instance.state"]: value for at, value in found["hotswap.instances"]} == {
        "EMPTY": 1,
        "LOADING": 0,
        "SERVING": 0,
        "DRAINING": 0,
        "LOST": 0,
    }
    assert found["hotswap.instance.losses"] == [({"hotswap.instance": "e0"}, 1.0)]
    assert found["hotswap.instance.restarts"] == [
        ({"hotswap.instance": "e0", "hotswap.restart.outcome": "done"}, 1.0)
    ]


@virtual_time
async def test_two_fleets_of_one_provider_have_gauges_of_their_own() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    async with sim_fleet("a", meter_provider=provider) as one:
        async with sim_fleet("b", "c", meter_provider=provider) as other:
            await one.generate("a", (1,), MANY)
            await other.generate("b", (1,), MANY)
            found = points(reader.get_metrics_data())
            models = sorted(str(at["gen_ai.request.model"]) for at, _ in found["hotswap.queue.length"])
            assert models == ["a", "b", "c"]
            assert len(found["hotswap.requests"]) == 2
        found = points(reader.get_metrics_data())
        assert [at["gen_ai.request.model"] for at, _ in found["hotswap.queue.length"]] == ["a"]


@virtual_time
async def test_buckets_fit_what_is_measured() -> None:
    """OpenTelemetry's own, from 5 s on, show nothing of a server."""
    reader = InMemoryMetricReader()
    async with sim_fleet("a", "b", meter_provider=MeterProvider([reader])) as fleet:
        await fleet.generate("a", (1,), MANY)
    data = reader.get_metrics_data()
    assert data is not None
    bounds = {
        metric.name: list(point.explicit_bounds)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
        if isinstance(point, HistogramDataPoint)
    }
    assert len(bounds) >= 6
    seconds_of = {name: of for name, of in bounds.items() if name != "gen_ai.client.token.usage"}
    assert all(len([bound for bound in of if bound < 5]) >= 6 for of in seconds_of.values())
    assert bounds["gen_ai.server.time_per_output_token"][:3] == [0.01, 0.025, 0.05]
    assert bounds["gen_ai.client.token.usage"][:4] == [1, 4, 16, 64]


@virtual_time
async def test_an_eviction_and_a_client_that_leaves_are_no_errors() -> None:
    recorder = Recorder()
    async with sim_fleet("a", "b", scheduler=Idle(), tracer_provider=recorder.provider) as fleet:
        await fleet.swap("e0", to="a")
        await fleet.swap("e1", to="a")
        async with fleet.stream("a", (1, 2), MANY) as stream:
            await anext(stream)
            at = next(i.id for i in fleet.view().instances if i.num_requests)
            await fleet.swap(at, to="b")
            await stream.collect()
        async with fleet.stream("a", (1, 2), MANY) as stream:
            await anext(stream)
    spans = recorder.exporter.get_finished_spans()
    assert {span.status.status_code for span in spans} == {StatusCode.UNSET}
    assert not [event for span in spans for event in span.events if event.name == "exception"]
    evicted, _, left = recorder.spans("hotswap.hop")
    assert (evicted.attributes or {})["hotswap.ended_by"] == "eviction"
    assert (left.attributes or {})["hotswap.ended_by"] == "cancellation"


@virtual_time
async def test_the_span_of_a_request_is_named_and_described_as_the_conventions_say() -> None:
    recorder = Recorder()
    async with sim_fleet("a", tracer_provider=recorder.provider) as fleet:
        await fleet.generate("a", (1, 2), Sampling(max_tokens=3, temperature=0.5, top_p=0.9, top_k=4, seed=7))
        with pytest.raises(DeadlineExceeded):
            await fleet.generate("a", (1,), Sampling(max_tokens=4000, ignore_eos=True), deadline_s=1.0)
    span, failed = recorder.spans("text_completion a")
    assert span.kind is SpanKind.INTERNAL
    attributes = {name: value for name, value in (span.attributes or {}).items() if "gen_ai" in name}
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "hotswap",
        "gen_ai.request.model": "a",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 4,
        "gen_ai.request.seed": 7,
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ("length",),
    }
    assert failed.status.status_code is StatusCode.ERROR
    assert (failed.attributes or {})["error.type"] == "DeadlineExceeded"
