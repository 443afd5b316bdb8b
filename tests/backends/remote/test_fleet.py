"""A fleet of remote engines serves as one of engines of its own process does."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import pytest
from opentelemetry import trace

from hotswap import Adapter, Fleet, MigrationRecord, Sampling, SwapRecord
from hotswap.abc import Channel, Engine, ModelCard, WeightStore, WrapperEngine
from hotswap.backends.remote import EngineHost, RemoteEngine
from hotswap.backends.sim import SimEngine
from hotswap.errors import InstanceError, PromptTooLong, SwapFailed, UnsupportedModel
from hotswap.offline.virtual_time import virtual_time
from hotswap.policies import CostSwap, KeepAliveSwap
from hotswap.testing import SpanRecorder
from tests.backends.remote.support import PROFILE, MemoryLinks, request, rig
from tests.runtime.support import Idle, engine_of, expected, idle, sim_fleet, store_of, until
from tests.runtime.test_stray_cancellation import Stray

LONG = Sampling(max_tokens=200, ignore_eos=True)
PROMPT = tuple(range(1, 101))


class MemoryPeers:
    """Hosts that reach each other over links in memory."""

    def __init__(self, address: str, hosts: dict[str, MemoryLinks]) -> None:
        self.address, self._hosts = address, hosts

    async def connect(self, address: str) -> Channel:
        return await self._hosts[address].open()


@asynccontextmanager
async def remote_fleet(
    engines: Sequence[Engine], *, num_remote: int | None = None, peers: bool = True, **options: Any
) -> AsyncGenerator[tuple[Fleet, dict[str, MemoryLinks]]]:
    """A fleet, of whose engines the first `num_remote`, or all, are remote, each with a store of its own."""
    hosts: dict[str, MemoryLinks] = {}
    async with AsyncExitStack() as stack:
        chosen = list[Engine]()
        for engine in engines[:num_remote]:
            store = await stack.enter_async_context(store_of("a", "b"))
            host = EngineHost(await stack.enter_async_context(engine), store)
            hosts[engine.id] = links = await stack.enter_async_context(MemoryLinks(host))
            host.peers = MemoryPeers(engine.id, hosts) if peers else None
            chosen.append(RemoteEngine(engine.id, links.open))
        if num_remote is not None:
            chosen += engines[num_remote:]
        async with sim_fleet("a", "b", engines=chosen, scheduler=Idle(), **options) as fleet:
            yield fleet, hosts


@virtual_time
async def test_the_record_of_a_swap_is_that_of_an_engine_of_this_process() -> None:
    records = dict[int, SwapRecord]()
    for num_remote in (0, 1):
        async with remote_fleet([engine_of("e0")], num_remote=num_remote) as (fleet, _):
            record = await fleet.swap("e0", to="a")
            assert record.model_after == "a"
            records[num_remote] = record
    assert records[1].loaded_bytes == records[0].loaded_bytes > 0
    assert records[1].tier == records[0].tier != ""
    assert [phase.name for phase in records[1].phases] == [phase.name for phase in records[0].phases]


@virtual_time
async def test_requests_of_a_host_that_is_lost_go_on_elsewhere_and_its_engine_comes_back() -> None:
    async with remote_fleet([engine_of("e0"), engine_of("e1")]) as (fleet, hosts):
        for instance in ("e0", "e1"):
            await fleet.swap(instance, to="a")
        read = dict[int, list[int]]()

        async def client(number: int) -> None:
            async with fleet.stream("a", (*PROMPT, number), LONG) as stream:
                read[number] = [token.id for token in await stream.collect()]
                assert read[number] == expected(stream.request)

        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(client, number)
            await until(lambda: all(e.num_requests for e in fleet.view().instances))
            await anyio.sleep(0.2)
            await hosts["e0"].opened[0][0].aclose()
        assert all(len(tokens) == 200 for tokens in read.values())
        await until(lambda: fleet.view().instances[0].state == "EMPTY")
        await fleet.swap("e0", to="b")
        idle(fleet)


@pytest.mark.parametrize("route", ["to a host", "from a host", "host to host", "through here"])
@virtual_time
async def test_a_request_moves_with_its_blocks_and_every_token_comes_once(
    route: str, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [engine_of("e0"), engine_of("e1")]
    num_remote = 1 if route in ("to a host", "from a host") else 2
    async with remote_fleet(engines, num_remote=num_remote, peers=route == "host to host") as (fleet, hosts):
        for instance in ("e0", "e1"):
            await fleet.swap(instance, to="a")
        for source, destination in (("e0", "e1"), ("e1", "e0")):
            await fleet.drain(destination)
            async with fleet.stream("a", PROMPT, LONG) as stream:
                tokens = [await anext(stream) for _ in range(10)]
                fleet.reopen(destination)
                record = await fleet.migrate(stream.request.id, to=destination, method="kv")
                tokens += await stream.collect()
                assert [hop.instance for hop in stream.hops] == [source, destination]
            assert record.outcome == "done"
            assert record.num_tokens > 100
            assert [token.id for token in tokens] == expected(stream.request)
            assert [token.index for token in tokens] == list(range(200))
        # One for control, and one for the blocks of each move that come in or go out another way.
        num_links = {"host to host": [2, 2], "through here": [3, 3]}.get(route, [3])
        assert [len(links.opened) for links in hosts.values()] == num_links
        idle(fleet)
    assert caplog.records == [], "nothing went wrong"


class TracedEngine(WrapperEngine):
    """Makes a span for each load and each stream."""

    def __init__(self, engine: Engine, tracer: trace.Tracer) -> None:
        super().__init__(engine)
        self._tracer = tracer

    async def load(self, model: ModelCard, store: WeightStore) -> None:
        with self._tracer.start_as_current_span("read"):
            await super().load(model, store)

    @asynccontextmanager
    async def stream(self, request: Any) -> AsyncGenerator[Any]:
        with self._tracer.start_as_current_span("decode"):
            async with super().stream(request) as tokens:
                yield tokens


@virtual_time
async def test_spans_of_a_host_are_children_of_those_of_the_fleet() -> None:
    spans = SpanRecorder()
    tracer = spans.tracer_provider.get_tracer("a host")
    behind = TracedEngine(engine_of("e0"), tracer)
    async with remote_fleet([behind], tracer_provider=spans.tracer_provider) as (fleet, _):
        await fleet.swap("e0", to="a")
        async with fleet.stream("a", PROMPT, LONG) as stream:
            await stream.collect()
    parents = {
        child.name: parent.name
        for root in spans.tree()
        for parent in root.walk()
        for child in parent.children
    }
    assert parents["read"] == "hotswap.load"
    assert parents["decode"] == "hotswap.hop"


class Choosy(SimEngine):
    """Serves no model of a name."""

    def check_model(self, model: ModelCard) -> None:
        if model.id == "b":
            raise UnsupportedModel("Model 'b' has a layer that this engine does not know.")


class Trying(SimEngine):
    """Finds out by trying that it cannot serve a model of a name."""

    async def try_model(self, model: ModelCard, store: WeightStore) -> None:
        await store.manifest(model.id)
        if model.id == "b":
            raise UnsupportedModel("Model 'b' has a layer that this engine does not know.")


@pytest.mark.parametrize("kind", [Choosy, Trying])
@virtual_time
async def test_a_model_that_the_host_will_never_serve_is_refused_while_the_old_one_serves(
    kind: type[SimEngine],
) -> None:
    async with remote_fleet([kind("e0")]) as (fleet, _):
        await fleet.swap("e0", to="a")
        with pytest.raises(SwapFailed, match="does not know") as refused:
            await fleet.swap("e0", to="b")
        assert refused.value.phase == "preflight"
        assert fleet.view().instances[0].model == "a"


@virtual_time
async def test_a_request_that_no_host_could_hold_causes_no_swap() -> None:
    async with remote_fleet([engine_of("e0", kv_blocks=4), engine_of("e1", kv_blocks=8)]) as (fleet, _):
        await anyio.sleep(1.0)  # the hosts have been asked when the models were read
        with pytest.raises(PromptTooLong, match="no engine has those of more than 128"):
            await fleet.generate("a", PROMPT, Sampling(max_tokens=200))
        assert fleet.swaps == ()


@virtual_time
async def test_a_fleet_of_engines_elsewhere_alone_opens_with_adapters() -> None:
    """They tell only once they have started that they can hold some."""
    engine = SimEngine("e0", PROFILE, max_adapters=2)
    async with remote_fleet([engine], adapters=[Adapter("sql", "a")]) as (fleet, _):
        await fleet.swap("e0", to="a")
        answer = await fleet.generate("a", PROMPT, Sampling(max_tokens=5, ignore_eos=True), adapter="sql")
        assert len(answer.tokens) == 5


@virtual_time
async def test_all_tokens_of_a_turn_are_one_frame() -> None:
    async with rig() as made:
        await made.engine.load(made.card, made.store)
        host = made.links.opened[0][1]
        before_s = anyio.current_time()
        num_before = len(host.frames)

        async def client(number: int) -> None:
            async with made.engine.stream(request(number, max_tokens=100)) as tokens:
                assert len(await tokens.collect()) == 100

        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(client, number)
        num_steps = (anyio.current_time() - before_s) / 0.05
        assert len(host.frames) - num_before <= 2.2 * num_steps, "600 tokens"
        await made.engine.unload()


@pytest.mark.parametrize("lost", ["source", "destination"])
@virtual_time
async def test_a_host_that_is_lost_in_a_move_costs_no_token(lost: str) -> None:
    engines = [engine_of("e0"), engine_of("e1")]
    async with remote_fleet(engines) as (fleet, hosts):
        for instance in ("e0", "e1"):
            await fleet.swap(instance, to="a")
        await fleet.drain("e1")
        async with fleet.stream("a", PROMPT, LONG) as stream:
            outcomes, tokens = list[str](), [await anext(stream) for _ in range(10)]
            fleet.reopen("e1")

            async def move() -> None:
                record = await fleet.migrate(stream.request.id, to="e1", method="kv")
                outcomes.append(record.outcome)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(move)
                await until(lambda: len(hosts["e1"].opened) > 1)  # for the blocks
                await hosts["e0" if lost == "source" else "e1"].opened[0][0].aclose()
            tokens += await stream.collect()
        assert [token.id for token in tokens] == expected(stream.request)
        assert [token.index for token in tokens] == list(range(200))
        assert outcomes == ["aborted"]
        await until(lambda: all(e.state != "LOST" for e in fleet.view().instances))
        for links in hosts.values():
            status = links.host.engine.status()
            assert status.num_free_kv_blocks == status.num_kv_blocks, "blocks are left over"


@virtual_time
async def test_a_host_that_freezes_in_a_move_holds_its_request_up_for_no_longer_than_its_silence() -> None:
    async with remote_fleet([engine_of("e0"), engine_of("e1")]) as (fleet, hosts):
        for instance in ("e0", "e1"):
            await fleet.swap(instance, to="a")
        await fleet.drain("e1")
        async with fleet.stream("a", PROMPT, LONG) as stream:
            records, tokens = list[MigrationRecord](), [await anext(stream) for _ in range(10)]
            fleet.reopen("e1")

            async def freeze() -> None:
                await until(lambda: len(hosts["e1"].opened) > 1)  # for the blocks
                for _, far in hosts["e1"].opened:
                    far.is_frozen = True

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(freeze)
                records.append(await fleet.migrate(stream.request.id, to="e1", method="kv"))
            assert records[0].outcome == "aborted"
            assert records[0].seconds < 9.0, "the silence is 8 s"
            tokens += await stream.collect()
        assert [token.id for token in tokens] == expected(stream.request)
        for _, far in hosts["e1"].opened:
            far.is_frozen = False
        await until(lambda: all(e.state != "LOST" for e in fleet.view().instances))
        for links in hosts.values():
            status = links.host.engine.status()
            assert status.num_free_kv_blocks == status.num_kv_blocks, "blocks are left over"


@virtual_time
async def test_a_model_that_a_host_has_kept_gives_way_in_a_fleet_that_has_it_not() -> None:
    few = Sampling(max_tokens=3, ignore_eos=True)
    async with (
        store_of("a", "b") as store,
        engine_of("e0") as engine,
        MemoryLinks(EngineHost(engine, store)) as links,
    ):
        for scheduler in (None, CostSwap(), KeepAliveSwap()):
            for model in ("a", "b"):
                remote = RemoteEngine("e0", links.open)
                async with sim_fleet(model, engines=[remote], scheduler=scheduler) as fleet:
                    done = await fleet.generate(model, PROMPT, few)
                    assert len(done.tokens) == 3
                assert engine.status().model == model


@pytest.mark.parametrize("verb", ["stream", "load", "unload"])
@virtual_time
async def test_an_engine_that_awaits_a_cancelled_future_fails_in_that_call_and_keeps_its_link(
    verb: str,
) -> None:
    engine = Stray("e0")
    async with remote_fleet([engine]) as (fleet, _):
        await fleet.swap("e0", to="a")
        engine.stray, engine.times = verb, 3
        async with fleet.stream("a", PROMPT, LONG) as stream:
            if verb == "stream":
                with pytest.raises(InstanceError, match="not asked for"):
                    await stream.collect()
            else:
                await anext(stream)
                with pytest.raises(SwapFailed, match="not asked for"):
                    await fleet.swap("e0", to="b")
                engine.stray = ""
                await until(lambda: fleet.view().instances[0].free)
                await fleet.swap("e0", to="a")
                await stream.collect()
        kinds = list[str]()
        with anyio.move_on_after(1.0):
            async for event in fleet.events(after=0):
                kinds.append(event.kind)
        assert "swap_ended" in kinds
        assert "instance_lost" not in kinds
