"""Every example does what it says."""

import http.client
import json
import random
import re
import tempfile
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType

import anyio
import pytest
from anyio import to_thread
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

import examples
from examples import (
    embed_in_a_service,
    serve_adapters,
    trace_a_swap,
    trace_to_otlp,
    write_a_router,
    write_a_scheduler,
    write_a_store,
)
from hotswap import (
    Fleet,
    FleetView,
    InstanceId,
    InstanceState,
    InstanceView,
    Model,
    ModelId,
    Request,
    RequestId,
    Sampling,
    WaitingView,
)
from hotswap.abc import ModelCard, Swap
from hotswap.backends.sim import SimEngine, SimStore
from hotswap.errors import ShardCorrupt, ShardMissing
from hotswap.offline.virtual_time import run
from hotswap.policies import LeastLoadedRouter, RestoreMinReplicas
from hotswap.testing.conformance import WeightStoreConformance

MODEL = ModelId("smollm-135m")
SWAP_PHASES = ["hotswap.preflight", "hotswap.evict", "hotswap.unload", "hotswap.load", "hotswap.first_token"]


def test_every_example_is_imported_here() -> None:
    here = {module.__name__ for module in globals().values() if isinstance(module, ModuleType)}
    # Those of vLLM and Ray are tested in the environments that have these, others beside this file.
    elsewhere = {
        "__init__",
        "call_by_url",
        "chat",
        "keep_chats",
        "mount_in_fastapi",
        "ray_cluster",
        "vllm_fleet",
    }
    files = {path.stem for path in Path(*examples.__path__).glob("*.py")} - elsewhere
    assert files
    assert {f"examples.{file}" for file in files} - here == set()


def _serving(id: str, num_requests: int = 0, model: str = MODEL) -> InstanceView:
    return InstanceView(
        id=InstanceId(id), state=InstanceState.SERVING, model=ModelId(model), num_requests=num_requests
    )


# ---------------------------------------------------------------- a router


def _routes(*instances: InstanceView) -> list[InstanceId | None]:
    view, router = FleetView(now_s=0.0, instances=instances), write_a_router.ConversationRouter()
    prompts = [(number,) * 9 for number in range(100)]
    return [router.route(Request(id=RequestId("r"), model=MODEL, prompt=p), view) for p in prompts]


def test_a_conversation_stays_where_it_began() -> None:
    went = run(write_a_router.main)
    assert [instances.total() for instances in went.values()] == [4] * 12
    assert all(len(instances) == 1 for instances in went.values())
    assert {instance for instances in went.values() for instance in instances} == {"e0", "e1", "e2"}


def test_only_the_conversations_of_a_lost_replica_move() -> None:
    before = _routes(_serving("e0"), _serving("e1"), _serving("e2"))
    after = _routes(_serving("e0"), _serving("e2"))
    assert {"e0", "e1", "e2"} == set(before)
    assert [new for old, new in zip(before, after, strict=True) if old != "e1"] == [
        old for old in before if old != "e1"
    ]


def test_a_much_busier_replica_is_passed_over() -> None:
    assert set(_routes(_serving("e0", num_requests=17), _serving("e1"))) == {"e1"}
    assert _routes() == [None] * 100


# ---------------------------------------------------------------- adapters


def test_every_adapter_answers_in_its_own_way(capsys: pytest.CaptureFixture[str]) -> None:
    answers = run(serve_adapters.main)
    assert set(answers) == {None, "sql", "law", "poems"}
    assert len(set(map(tuple, answers.values()))) == 4
    assert "held now: " in (said := capsys.readouterr().out)
    assert "has no adapter 'chess'" in said


# ---------------------------------------------------------------- a scheduler


def test_one_engine_serves_every_model_in_the_order_of_their_waits() -> None:
    swaps = run(write_a_scheduler.main)
    assert [swap.model for swap in swaps] == list(write_a_scheduler.SIZES)
    assert [swap.num_evicted for swap in swaps] == [0, 0, 0]
    assert {swap.outcome for swap in swaps} == {"done"}


def test_an_instance_with_work_keeps_its_model() -> None:
    waiting = WaitingView(id=RequestId("r"), model=ModelId("llama-1b"))
    scheduler = write_a_scheduler.LongestWaitFirst()
    busy, idle = _serving("e0", num_requests=1), _serving("e1")
    assert scheduler.plan(FleetView(now_s=0.0, instances=(busy,), waiting=(waiting,))) == []
    plan = scheduler.plan(FleetView(now_s=0.0, instances=(busy, idle), waiting=(waiting, waiting)))
    assert [(swap.instance, swap.model) for swap in plan if isinstance(swap, Swap)] == [("e1", "llama-1b")]


# ---------------------------------------------------------------- a store


async def test_an_archive_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    await write_a_store.main()
    assert "e0 SERVING smollm " in capsys.readouterr().out


async def test_a_damaged_archive_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "smollm.zip"
    write_a_store.pack(path, bytes(range(256)) * 4096)
    store = write_a_store.ZipStore(tmp_path)
    card = ModelCard.of(Model("smollm"), await store.manifest(ModelId("smollm")))
    intact = path.read_bytes()
    path.write_bytes(intact[:200] + b"?" + intact[201:])
    async with store, SimEngine("e0") as engine:
        with pytest.raises(ShardCorrupt, match=re.escape(str(path))):
            await engine.load(card, store)
        assert engine.status().state is InstanceState.EMPTY
        path.write_bytes(intact[:-100])
        with pytest.raises(ShardCorrupt, match=re.escape(str(path))):
            await engine.load(card, store)
    with pytest.raises(ShardMissing, match=r"other\.zip"):
        await store.manifest(ModelId("other"))


class TestZipStore(WeightStoreConformance):
    """The suite that the example names."""

    models = (ModelId("large"), ModelId("small"))

    @asynccontextmanager
    async def make_store(self) -> AsyncGenerator[write_a_store.ZipStore]:
        with tempfile.TemporaryDirectory() as folder:
            write_a_store.pack(Path(folder, "large.zip"), random.Random(0).randbytes(100_000))
            write_a_store.pack(Path(folder, "small.zip"), b"weights")
            async with write_a_store.ZipStore(Path(folder), chunk_bytes=4096) as store:
                yield store


# ---------------------------------------------------------------- a service


def _fleet(*, max_waiting: int = 1024, min_replicas: int = 1) -> Fleet:
    return Fleet(
        engines=[SimEngine("e0")],
        store=SimStore({MODEL: "1 MB"}),
        models=[Model(MODEL, min_replicas=min_replicas)],
        router=LeastLoadedRouter(),
        scheduler=RestoreMinReplicas(),
        max_waiting=max_waiting,
    )


def _post(port: int, body: str) -> tuple[int, str | None, list[str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request("POST", "/", body)
        response = connection.getresponse()
        lines = response.read().decode().splitlines()
        return response.status, response.getheader("Retry-After"), lines
    finally:
        connection.close()


async def test_a_service_streams_the_tokens_the_fleet_generates() -> None:
    async with _fleet() as fleet, anyio.create_task_group() as service:
        port = await service.start(embed_in_a_service.serve, fleet)
        body = json.dumps({"model": MODEL, "prompt": [1, 2], "max_tokens": 5})
        status, _, lines = await to_thread.run_sync(_post, port, body)
        right = await fleet.generate(MODEL, [1, 2], Sampling(max_tokens=5))
        service.cancel_scope.cancel()
    assert status == 200
    assert [json.loads(line)["token"] for line in lines] == [token.id for token in right.tokens]
    assert [json.loads(line)["finish"] for line in lines] == [None] * 4 + ["length"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('{"model": "llama-405b", "prompt": [1]}', "'llama-405b' is not registered"),
        ('{"model": "smollm-135m", "prompt": []}', "The prompt is empty"),
        ('{"model": "smollm-135m", "prompt": [1], "max_tokens": 0}', "max_tokens"),
        ('{"model": "smollm-135m"}', "prompt"),
        ("[]", "list"),
        ("what?", "Expecting value"),
    ],
)
async def test_a_service_says_what_was_wrong_and_goes_on(body: str, says: str) -> None:
    async with _fleet() as fleet, anyio.create_task_group() as service:
        port = await service.start(embed_in_a_service.serve, fleet)
        status, _, lines = await to_thread.run_sync(_post, port, body)
        good, _, _ = await to_thread.run_sync(_post, port, '{"model": "smollm-135m", "prompt": [1]}')
        service.cancel_scope.cancel()
    assert (status, good) == (400, 200)
    assert says in lines[0]


async def test_a_full_fleet_says_when_to_come_back() -> None:
    async with _fleet(max_waiting=0, min_replicas=0) as fleet, anyio.create_task_group() as service:
        port = await service.start(embed_in_a_service.serve, fleet)
        answer = await to_thread.run_sync(_post, port, '{"model": "smollm-135m", "prompt": [1]}')
        service.cancel_scope.cancel()
    assert answer[:2] == (503, "1")


async def test_a_client_that_hangs_up_ends_its_request() -> None:
    body = json.dumps({"model": MODEL, "prompt": [1], "max_tokens": 10_000}).encode()
    async with _fleet() as fleet, anyio.create_task_group() as service:
        port = await service.start(embed_in_a_service.serve, fleet)
        async with await anyio.connect_tcp("127.0.0.1", port) as client:
            await client.send(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            assert (await client.receive()).startswith(b"HTTP/1.1 200 OK")
            assert fleet.view().model(MODEL).num_running == 1
        while fleet.view().model(MODEL).num_requests:
            await anyio.lowlevel.checkpoint()
        service.cancel_scope.cancel()


async def test_the_service_example_answers_three_clients(capsys: pytest.CaptureFixture[str]) -> None:
    await embed_in_a_service.main()
    said = capsys.readouterr().out
    assert said.count('"finish": "length"') == 2
    assert "llama-405b: 400 Bad Request" in said


# ---------------------------------------------------------------- traces


def test_a_swap_has_its_phases_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    record, spans = run(trace_a_swap.main)
    by_id = {span.context.span_id: span for span in spans if span.context}
    below = [
        span.name
        for span in sorted(spans, key=lambda span: span.start_time or 0)
        if trace_a_swap.hex_trace_id(span) == record.trace_id
        and span.parent
        and by_id[span.parent.span_id].name == "hotswap.swap"
    ]
    assert below == SWAP_PHASES
    assert record.num_evicted == 1
    said = capsys.readouterr().out
    assert "hotswap.load                 " in said
    assert [line.split()[-1] for line in said.splitlines() if "hotswap.hop" in line] == ["e0", "e1"]


@contextmanager
def _collector() -> Iterator[tuple[str, list[bytes]]]:
    """A server that accepts every POST: its address and the bodies it got."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
        finally:
            server.shutdown()
            thread.join()


async def test_a_collector_is_sent_every_swap_with_its_phases() -> None:
    with _collector() as (endpoint, bodies):
        trace_ids = await trace_to_otlp.main(endpoint)
    spans: list[Span] = [
        span
        for body in bodies
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    swaps = {span.trace_id.hex(): span.span_id for span in spans if span.name == "hotswap.swap"}
    assert set(swaps) == set(trace_ids)
    for trace_id in trace_ids:
        children = {span.name for span in spans if span.parent_span_id == swaps[trace_id]}
        assert {"hotswap.load", "hotswap.first_token"} <= children
    assert sum(span.name.startswith("text_completion ") for span in spans) == 2
