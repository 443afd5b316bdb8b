"""Trace a swap: its span tree on the console, phase by phase, and the request that it evicted.

    python -m examples.trace_a_swap

hotswap speaks OpenTelemetry's API alone. The application brings the SDK, here with an exporter that keeps the
spans in memory; `trace_to_otlp` sends them to a collector instead.
"""

from collections.abc import Sequence

import anyio
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import format_trace_id

from hotswap import Fleet, Model, Sampling, SwapRecord
from hotswap.backends.sim import DeviceProfile, SimEngine, SimStore
from hotswap.policies import KeepAsIs, LeastLoadedRouter

SMALL = DeviceProfile(memory_bytes=1_200_000_000)  # with more, the next model is loaded beside the old one
SHOWN = {
    "hotswap.instance": "on",
    "hotswap.swap.evicted_requests": "evicted",
    "hotswap.load.bytes": "bytes",
    "hotswap.load.tier": "from",
    "gen_ai.usage.output_tokens": "tokens",
}


async def main() -> tuple[SwapRecord, Sequence[ReadableSpan]]:
    """Swap an instance under a running request; return the swap's record and all spans."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    fleet = Fleet(
        engines=[SimEngine("e0", SMALL), SimEngine("e1", SMALL)],
        store=SimStore({"smollm-135m": "270 MB", "qwen-0.5b": "1 GB"}),
        models=[Model("smollm-135m"), Model("qwen-0.5b")],
        router=LeastLoadedRouter(),
        scheduler=KeepAsIs(),  # the swaps are made by hand
        tracer_provider=provider,
    )
    async with fleet:
        await fleet.swap("e0", to="smollm-135m")
        await fleet.swap("e1", to="smollm-135m")
        async with fleet.stream("smollm-135m", [1, 2, 3], Sampling(max_tokens=200)) as tokens:
            await anext(tokens)
            record = await fleet.swap(tokens.hops[-1].instance, to="qwen-0.5b")
            await tokens.collect()
        await fleet.generate("qwen-0.5b", [1, 2, 3], Sampling(max_tokens=1))
    spans = exporter.get_finished_spans()
    roots = [span for span in spans if span.parent is None]
    print_tree(next(root for root in roots if hex_trace_id(root) == record.trace_id), spans)
    print_tree(next(root for root in roots if root.links), spans)  # only the evicted request's has links
    return record, spans


def hex_trace_id(span: ReadableSpan) -> str:
    """The trace id as in `SwapRecord.trace_id` and in tracing backends."""
    assert span.context is not None
    return format_trace_id(span.context.trace_id)


def print_tree(span: ReadableSpan, spans: Sequence[ReadableSpan], depth: int = 0) -> None:
    milliseconds = ((span.end_time or 0) - (span.start_time or 0)) / 1e6
    facts = "  ".join(
        f"{SHOWN[key]} {value!s}" for key, value in (span.attributes or {}).items() if key in SHOWN
    )
    print(f"{'  ' * depth + span.name:<28}{milliseconds:8.1f} ms  {facts}")
    children = [child for child in spans if child.parent and child.parent == span.context]
    for child in sorted(children, key=lambda child: child.start_time or 0):
        print_tree(child, spans, depth + 1)


if __name__ == "__main__":
    anyio.run(main)
