"""A request moves between two engines over every link, and its tokens are those of a run without moves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import ClassVar, Self

import anyio
import pytest

from hotswap import Fleet, Model, Request, RequestId, Sampling
from hotswap.abc import Channel, Engine, KVSink, KVSource, WrapperEngine
from hotswap.backends.torch import SkeletonCache, TorchEngine
from hotswap.backends.transports import remote_sink, serve_sink
from hotswap.policies import LeastLoadedRouter
from hotswap.testing.conformance.engine_migration import MigrationChecks
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import make_model
from tests.backends.transports.links import LINKS
from tests.runtime.support import Idle, until

KIND = "llama"
SAMPLING = Sampling(max_tokens=300, ignore_eos=True, temperature=0.8, top_k=40, seed=5)
PROMPT = tuple(range(2, 102))


@pytest.fixture(scope="module")
def store() -> DictStore:
    store = DictStore()
    store.add(KIND, make_model(KIND))
    return store


@pytest.fixture(scope="module")
def skeletons() -> SkeletonCache:
    return SkeletonCache()


def make_engine(name: str, skeletons: SkeletonCache) -> TorchEngine:
    return TorchEngine(
        name, skeletons=skeletons, kv_tokens=2048, memory_bytes="64 MiB", threads=1, max_requests=8
    )


def make_request(store: DictStore) -> Request:
    return Request(id=RequestId("r"), model=store.card(KIND).id, prompt=PROMPT, sampling=SAMPLING)


@asynccontextmanager
async def loaded(store: DictStore, skeletons: SkeletonCache, name: str) -> AsyncGenerator[TorchEngine]:
    async with make_engine(name, skeletons) as engine:
        await engine.load(store.card(KIND), store)
        yield engine


async def undisturbed(store: DictStore, skeletons: SkeletonCache, sampling: Sampling = SAMPLING) -> list[int]:
    request = replace(make_request(store), sampling=sampling)
    async with loaded(store, skeletons, "oracle") as engine, engine.stream(request) as tokens:
        return [token.id for token in await tokens.collect()]


@pytest.mark.parametrize("kind", LINKS)
async def test_a_request_continues_from_the_received_blocks(
    store: DictStore, skeletons: SkeletonCache, kind: str
) -> None:
    request, read = make_request(store), list[int]()
    async with (
        loaded(store, skeletons, "e0") as source,
        loaded(store, skeletons, "e1") as destination,
        LINKS[kind]() as (near, far),
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(serve_sink, destination, far)
        async with source.stream(request) as tokens:
            for _ in range(20):
                read.append((await anext(tokens)).id)
            async with (
                source.export_kv(request.id) as exported,
                remote_sink(near, request.continued(read)) as imported,
            ):
                assert imported.layout == exported.layout
                block_tokens = exported.layout.block_tokens
                num_tokens = await exported.num_tokens() // block_tokens * block_tokens
                await imported.reserve(num_tokens)
                await imported.write(await exported.read(0, num_tokens))
                stopped = await exported.stop()
                await imported.reserve(stopped.num_computed)
                first = num_tokens // block_tokens
                await imported.write(await exported.read(first, stopped.num_computed - num_tokens))
                await imported.commit(stopped.tokens)
                read = list(stopped.tokens[len(PROMPT) :])
                async with destination.stream(request.continued(read)) as rest:
                    read += [token.id for token in await rest.collect()]
                    assert rest.num_reused_tokens == stopped.num_computed
        await near.aclose()
        await until(lambda: destination.status().num_free_kv_blocks == destination.status().num_kv_blocks)
    assert read == await undisturbed(store, skeletons)


class FarEngine(WrapperEngine):
    """An engine that imports KV blocks over a link."""

    def __init__(self, engine: TorchEngine, kind: str) -> None:
        super().__init__(engine)
        self._torch, self._kind = engine, kind
        self._near: Channel

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with (
            super().__asynccontextmanager__(),
            LINKS[self._kind]() as (self._near, far),
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(serve_sink, self._torch, far)
            yield self
            await self._near.aclose()

    async def break_link(self) -> None:
        await self._near.aclose()

    @asynccontextmanager
    async def export_kv(self, request: RequestId) -> AsyncGenerator[KVSource]:
        async with self._torch.export_kv(request) as source:
            yield source

    @asynccontextmanager
    async def import_kv(self, request: Request) -> AsyncGenerator[KVSink]:
        async with remote_sink(self._near, request) as sink:
            yield sink


def fleet_of(engines: Sequence[FarEngine], store: DictStore) -> Fleet:
    return Fleet(
        engines=engines,
        store=store,
        models=[Model(KIND)],
        router=LeastLoadedRouter(),
        scheduler=Idle(),
    )


@pytest.mark.parametrize("kind", LINKS)
async def test_a_fleet_moves_requests_over_a_link(
    store: DictStore, skeletons: SkeletonCache, kind: str
) -> None:
    engines = [FarEngine(make_engine(name, skeletons), kind) for name in ("e0", "e1")]
    async with fleet_of(engines, store) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to=KIND)
        read: list[int] = []
        async with fleet.stream(KIND, PROMPT, SAMPLING) as stream:
            async for token in stream:
                read.append(token.id)
                if len(read) in (10, 30):
                    to = "e1" if stream.hops[-1].instance == "e0" else "e0"
                    record = await fleet.migrate(stream.request.id, to=to, method="kv")
                    assert record.outcome in ("done", "finished"), record
                    assert record.method == "kv"
        assert any(record.outcome == "done" for record in fleet.migrations)
    assert read == await undisturbed(store, skeletons)


async def test_a_request_moves_as_tokens_when_the_link_is_broken(
    store: DictStore, skeletons: SkeletonCache
) -> None:
    engines = [FarEngine(make_engine(name, skeletons), "tcp") for name in ("e0", "e1")]
    async with fleet_of(engines, store) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to=KIND)
            await engine.break_link()
        read: list[int] = []
        async with fleet.stream(KIND, PROMPT, SAMPLING) as stream:
            async for token in stream:
                read.append(token.id)
                if len(read) in (10, 20):
                    to = "e1" if stream.hops[-1].instance == "e0" else "e0"
                    record = await fleet.migrate(
                        stream.request.id, to=to, method="kv" if len(read) == 10 else None
                    )
                    if len(read) == 10:
                        assert (record.outcome, record.method) == ("aborted", "kv")
                        assert "link" in record.error
                    else:
                        assert (record.outcome, record.method) == ("done", "tokens")
    assert read == await undisturbed(store, skeletons)


class FarChecks(MigrationChecks):
    """The conformance suite of migration between engines, over a link."""

    models = (Model("a"), Model("b"))
    can_lose = True
    kind: ClassVar[str]
    skeletons: ClassVar[SkeletonCache]
    store: ClassVar[DictStore]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _models(cls) -> None:
        cls.skeletons, cls.store = SkeletonCache(), DictStore()
        cls.store.add("a", make_model("llama", seed=1))
        cls.store.add("b", make_model("qwen3", seed=2))

    def make_engine(self) -> FarEngine:
        return FarEngine(make_engine("e0", self.skeletons), self.kind)

    def make_store(self) -> DictStore:
        return DictStore(self.store.manifests, self.store.buffers)

    def lose(self, engine: Engine) -> None:
        assert isinstance(engine, FarEngine)
        assert isinstance(engine.wrapped, TorchEngine)
        engine.wrapped.lose()


class TestOverMemory(FarChecks):
    kind = "memory"


class TestOverShared(FarChecks):
    kind = "shared"


class TestOverTcp(FarChecks):
    kind = "tcp"
