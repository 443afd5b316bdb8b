"""Send a fleet's spans to an OpenTelemetry collector, Jaeger, Tempo or another server of OTLP over HTTP.

    OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318 python -m examples.trace_to_otlp

That address is the default. Export runs on a thread of the SDK, so the fleet never waits for the collector.
"""

import anyio
from anyio import to_thread
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from hotswap import Fleet, Model, Sampling
from hotswap.backends.sim import SimEngine, SimStore

SIZES = {"smollm-135m": "270 MB", "qwen-0.5b": "1 GB"}


async def main(endpoint: str | None = None) -> tuple[str, ...]:
    """Serve two models on one engine; return the trace ids of the swaps, to look them up by."""
    provider = TracerProvider(resource=Resource.create({"service.name": "hotswap-example"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    fleet = Fleet(
        engines=[SimEngine("e0")],
        store=SimStore(SIZES),
        models=[Model(name) for name in SIZES],
        tracer_provider=provider,
    )
    try:
        async with fleet:
            for name in SIZES:
                await fleet.generate(name, [1, 2, 3], Sampling(max_tokens=8))
    finally:
        await to_thread.run_sync(provider.shutdown)  # sends what is left, off the event loop
    for swap in fleet.swaps:
        print(f"{swap.trace_id}  {swap.instance} -> {swap.model} in {swap.seconds:.3f} s")
    return tuple(swap.trace_id for swap in fleet.swaps)


if __name__ == "__main__":
    anyio.run(main)
