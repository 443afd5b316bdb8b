"""vLLM's own spans are children of hotswap's: a request's of its stay, those of a start of the swap."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

# In a process of its own, since a provider is the process's.
_SCRIPT = """
    import json, os, threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    import anyio
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    spans = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            request = ExportTraceServiceRequest()
            request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    async def main(endpoint):
        from hotswap import Fleet, Model, Sampling
        from hotswap.policies import LeastLoadedRouter
        from tests.backends.vllm.support import make_engine, make_store
        from tests.runtime.support import Idle

        engine = make_engine("one", arguments={"otlp_traces_endpoint": endpoint})
        fleet = Fleet(
            engines=[engine], store=make_store(), models=[Model("a")], router=LeastLoadedRouter(),
            scheduler=Idle(),
        )
        async with fleet:
            await fleet.swap("one", to="a")
            await fleet.generate("a", [3, 4, 5], Sampling(max_tokens=4, ignore_eos=True))

    if __name__ == "__main__":
        collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        trace.set_tracer_provider(provider)
        anyio.run(main, endpoint)
        provider.shutdown()
        print(json.dumps([[s.name, s.span_id.hex(), s.parent_span_id.hex()] for s in spans]))
"""


def test_spans_of_vllm_hang_below_ours(tmp_path: Path) -> None:
    script = tmp_path / "traced.py"
    script.write_text(textwrap.dedent(_SCRIPT))
    run = subprocess.run(
        [sys.executable, str(script)],
        env={
            **os.environ,
            "PYTHONPATH": os.getcwd(),
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        },
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    spans: list[list[str]] = json.loads(run.stdout.splitlines()[-1])
    names = {span_id: name for name, span_id, _ in spans}
    parents = {span_id: parent for _, span_id, parent in spans}

    def ancestors(span_id: str) -> list[str]:
        above = parents.get(span_id, "")
        return [names.get(above, "unknown"), *ancestors(above)] if above else []

    requests = [span_id for name, span_id, _ in spans if name == "llm_request"]
    stays = [[name.partition(" ")[0] for name in ancestors(span_id)[:2]] for span_id in requests]
    assert ["hotswap.hop", "text_completion"] in stays, (stays, sorted(names.values()))
    starts = [span_id for name, span_id, _ in spans if name == "AsyncMPClient init"]
    assert starts, sorted(names.values())
    assert ancestors(starts[0])[-2:] == ["hotswap.load", "hotswap.swap"], ancestors(starts[0])
