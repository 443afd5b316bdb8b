"""Metrics of a process for Prometheus, which asks for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from hotswap import Fleet

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader
    from prometheus_client.metrics_core import Metric

__all__ = ["Metrics", "PrometheusMetrics"]


class Metrics(Protocol):
    """What `/metrics` gives."""

    @property
    def media_type(self) -> str:
        """The type of the text."""
        ...

    def text(self, fleet: Fleet) -> bytes:
        """Return the metrics as they are now; `fleet` is the one of the door that is asked."""
        ...


class PrometheusMetrics:
    """OpenTelemetry's metrics in Prometheus' form.

    Give a fleet its `meter_provider`, and a door the object itself.

    Args:
        vllm_names: Whether what vLLM has as well is told by its names, too, such as
            `vllm:num_requests_waiting`, for gateways that look for them.
        readers: Where else metrics go.
        service_name: What these readers call the process.
    """

    def __init__(
        self,
        *,
        vllm_names: bool = False,
        readers: Sequence[MetricReader] = (),
        service_name: str | None = None,
    ) -> None:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
        from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
        from opentelemetry.sdk.resources import Resource
        from prometheus_client import CollectorRegistry

        self._registry = CollectorRegistry()
        self._vllm_names = vllm_names
        reader = PrometheusMetricReader(registry=self._registry)
        named = None if service_name is None else Resource.create({"service.name": service_name})
        self._provider = SdkMeterProvider([reader, *readers], resource=named)

    @property
    def meter_provider(self) -> MeterProvider:
        """What a fleet records its metrics by."""
        return self._provider

    @property
    def media_type(self) -> str:
        from prometheus_client import CONTENT_TYPE_LATEST

        return CONTENT_TYPE_LATEST

    def text(self, fleet: Fleet) -> bytes:
        """Return the metrics as they are now."""
        from prometheus_client import generate_latest
        from prometheus_client.registry import Collector

        families = list(self._registry.collect())
        if self._vllm_names:
            from hotswap.door.vllm_names import vllm_families

            families += vllm_families(families, fleet)

        class Collected(Collector):
            def collect(self) -> Iterator[Metric]:
                return iter(families)

        return generate_latest(Collected())

    def shutdown(self) -> None:
        """Send what is left to where metrics go, and record no more."""
        self._provider.shutdown()
