"""Sending spans to a server of OTLP over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotswap.config.schema import TelemetryConfig
from hotswap.errors import BackendMissing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

__all__ = ["tracer_of"]


def tracer_of(config: TelemetryConfig) -> TracerProvider | None:
    """Return what sends spans where a file says, on a thread of its own; `None` if it names no server.

    Raises:
        BackendMissing: the exporter is not installed.
    """
    if config.otlp_endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as exc:
        raise BackendMissing("Spans are sent by OpenTelemetry: pip install 'hotswap[otel]'.") from exc
    provider = TracerProvider(resource=Resource.create({"service.name": config.service_name}))
    url = f"{config.otlp_endpoint.rstrip('/')}/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
    return provider
