"""Metrics of a process for Prometheus, which asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider

__all__ = ["Metrics", "PrometheusMetrics"]


class Metrics(Protocol):
    """What `/metrics` gives."""

    @property
    def media_type(self) -> str:
        """The type of the text."""
        ...

    def text(self) -> bytes:
        """Return the metrics as they are now."""
        ...


class PrometheusMetrics:
    """OpenTelemetry's metrics in Prometheus' form.

    Give a fleet its `meter_provider`, and a door the object itself.
    """

    def __init__(self) -> None:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
        from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
        from prometheus_client import CollectorRegistry

        self._registry = CollectorRegistry()
        reader = PrometheusMetricReader(registry=self._registry)
        self.meter_provider: MeterProvider = SdkMeterProvider([reader])

    @property
    def media_type(self) -> str:
        from prometheus_client import CONTENT_TYPE_LATEST

        return CONTENT_TYPE_LATEST

    def text(self) -> bytes:
        """Return the metrics as they are now."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)
