"""Metrics and spans go to the server of OTLP that a file names."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from hotswap import Sampling
from hotswap.config import Serving, build, read_config
from hotswap.offline.virtual_time import virtual_time

FILE = """
[[engines]]
kind = "sim"
[[stores]]
kind = "sim"
[[models]]
id = "a"
size = "1 MB"
[telemetry]
otlp_endpoint = "ADDRESS"
otlp_metrics = true
service_name = "llm"
[door]
"""


@contextmanager
def collector() -> Generator[tuple[str, list[tuple[str, bytes]]]]:
    """A server that accepts every POST: its address, and the paths and bodies that it got."""
    got: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", got
        finally:
            server.shutdown()
            thread.join()


@virtual_time
async def generate_one(serving: Serving) -> None:
    async with serving.fleet as fleet:
        await fleet.generate("a", [1, 2, 3], Sampling(max_tokens=2, ignore_eos=True))


@pytest.mark.parametrize("door", ["", "metrics = false"])
def test_a_server_of_otlp_is_sent_the_metrics(tmp_path: Path, door: str) -> None:
    file = tmp_path / "fleet.toml"
    with collector() as (address, got):
        file.write_text(FILE.replace("ADDRESS", address) + door)
        serving = build(read_config(file))
        generate_one(serving)
        assert serving.metrics is not None
        assert serving.tracer_provider is not None
        serving.metrics.shutdown()
        serving.tracer_provider.shutdown()
    assert {path for path, _ in got} == {"/v1/metrics", "/v1/traces"}
    resources = [
        resource
        for path, body in got
        if path == "/v1/metrics"
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics
    ]
    called = {
        attribute.value.string_value
        for resource in resources
        for attribute in resource.resource.attributes
        if attribute.key == "service.name"
    }
    assert called == {"llm"}
    metrics = {
        metric.name: metric
        for resource in resources
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    (requests,) = metrics["hotswap.requests"].sum.data_points
    assert requests.as_int == 1
