"""Sending spans and metrics to a server of OTLP over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotswap.config.schema import TelemetryConfig
from hotswap.errors import BackendMissing

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.trace import TracerProvider

__all__ = ["readers_of", "tracer_of"]

_MISSING = "Spans and metrics are sent by OpenTelemetry: pip install 'hotswap[otel]'."


def readers_of(config: TelemetryConfig) -> list[MetricReader]:
    """Return what sends metrics where a file says, on a thread of its own; nothing if it asks for none.

    Raises:
        BackendMissing: the exporter is not installed.
    """
    if not config.otlp_metrics:
        return []
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    except ImportError as exc:
        raise BackendMissing(_MISSING) from exc
    return [PeriodicExportingMetricReader(OTLPMetricExporter(f"{_base(config)}/v1/metrics"))]


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
        raise BackendMissing(_MISSING) from exc
    provider = TracerProvider(resource=Resource.create({"service.name": config.service_name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{_base(config)}/v1/traces")))
    return provider


def _base(config: TelemetryConfig) -> str:
    return (config.otlp_endpoint or "").rstrip("/")
