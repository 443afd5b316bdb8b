"""Chaos injects what it says and when it says, hides no ability, and without faults is not there at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from random import Random
from typing import Any, ClassVar

import anyio
import pytest

from hotswap import Adapter, InstanceState, Model, ModelId, Request, RequestId, Sampling
from hotswap.abc import (
    Engine,
    ModelCard,
    SupportsAdapters,
    SupportsImport,
    SupportsLend,
    SupportsLendFiles,
    SupportsMigration,
    SupportsModelCheck,
    SupportsPrefetch,
    SupportsPreload,
    SupportsReadInto,
    SupportsSideFiles,
    SupportsTextSettings,
    SupportsTokenizer,
    WrapperEngine,
    WrapperStore,
)
from hotswap.backends.sim import DeviceProfile, SimEngine, SimStore, expected_tokens, sim_manifest
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.errors import (
    ConfigError,
    InstanceLost,
    MigrationAborted,
    OutOfMemory,
    ShardCorrupt,
    ShardMissing,
    StoreError,
)
from hotswap.offline.virtual_time import run, virtual_time
from hotswap.testing import EngineFaults, StoreFaults, chaotic_engine, chaotic_store
from hotswap.testing.chaos import ChaosEngine, ChaosStore
from hotswap.testing.conformance import EngineConformance, WeightStoreConformance

PROFILE = DeviceProfile(memory_bytes=1 << 20)
CARD = ModelCard(id=ModelId("a"), weight_bytes=100_000, max_context_tokens=4096)
ENGINE_ABILITIES = (SupportsPreload, SupportsAdapters, SupportsMigration, SupportsModelCheck)
STORE_ABILITIES = (
    SupportsPrefetch,
    SupportsLend,
    SupportsLendFiles,
    SupportsReadInto,
    SupportsSideFiles,
    SupportsImport,
    SupportsTextSettings,
    SupportsTokenizer,
)


def make_engine(**options: Any) -> SimEngine:
    given = {"kv_blocks": 160, "kv_block_tokens": 4, "max_requests": 16, "token_budget": 24, **options}
    return SimEngine("e0", PROFILE, **given)


def make_store() -> SimStore:
    return SimStore([sim_manifest("a", 100_000, num_shards=2), sim_manifest("b", 60_001)], chunk_bytes=7_000)


def abilities(thing: object, known: tuple[Any, ...]) -> list[str]:
    return [ability.__name__ for ability in known if isinstance(thing, ability)]


# ------------------------------------------------------------------------------ without faults


class TestAnEngineWithoutFaultsConforms(EngineConformance):
    virtual = True
    limit_s = 20.0
    step_s = 0.02
    can_lose = True
    models = (Model("a"), Model("b"))
    adapters: ClassVar[tuple[Adapter, ...]] = (Adapter("x", "a"), Adapter("y", "a"))

    def make_engine(self) -> ChaosEngine:
        return chaotic_engine(make_engine(vocabulary=500), Random(1))

    def make_store(self) -> SimStore:
        return SimStore({"a": 100_000, "b": 60_000}, chunk_bytes=30_000)

    def lose(self, engine: Engine) -> None:
        assert isinstance(engine, ChaosEngine)
        engine.lose()

    async def expected(self, request: Request, card: ModelCard) -> list[int]:
        return expected_tokens(request, card, vocabulary=500)


class TestALossThatTheWrapperPlaysConforms(TestAnEngineWithoutFaultsConforms):
    adapters = ()

    def make_engine(self) -> ChaosEngine:
        return chaotic_engine(WrapperEngine(make_engine(vocabulary=500)), Random(1))


class TestAStoreWithoutFaultsConforms(WeightStoreConformance):
    virtual = True
    models = (ModelId("a"), ModelId("b"))

    def make_store(self) -> ChaosStore:
        return chaotic_store(make_store(), Random(1))


# ------------------------------------------------------------------------------ abilities


def test_an_engine_keeps_its_abilities_and_gets_no_other() -> None:
    bare = make_engine()
    assert abilities(chaotic_engine(bare, Random(1)), ENGINE_ABILITIES) == abilities(bare, ENGINE_ABILITIES)
    assert "SupportsPreload" in abilities(bare, ENGINE_ABILITIES)
    assert abilities(chaotic_engine(WrapperEngine(bare), Random(1)), ENGINE_ABILITIES) == []


def test_a_store_keeps_its_abilities_and_gets_no_other(tmp_path: Any) -> None:
    tiered = TieredStore(PinnedStore(1 << 20), NvmeStore(tmp_path))
    for bare in (make_store(), tiered, tiered.tiers[1]):
        wrapped = chaotic_store(bare, Random(1))
        assert abilities(wrapped, STORE_ABILITIES) == abilities(bare, STORE_ABILITIES) != []
    assert abilities(chaotic_store(WrapperStore(tiered), Random(1)), STORE_ABILITIES) == []


# ------------------------------------------------------------------------------ faults of engines


@asynccontextmanager
async def serving(seed: int, **faults: Any) -> AsyncGenerator[ChaosEngine]:
    """A chaotic engine that serves; what went wrong until then is forgotten."""
    chaotic = chaotic_engine(make_engine(), Random(seed), EngineFaults(**faults))
    chaotic.injector.armed = False
    async with make_store() as store, chaotic:
        await chaotic.load(CARD, store)
        chaotic.injector.armed = True
        yield chaotic


def ask(number: int = 0, max_tokens: int = 50) -> Request:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    return Request(id=RequestId(f"r{number}"), model=CARD.id, prompt=(1, 2, 3), sampling=sampling)


async def read(engine: Engine, request: Request) -> list[int]:
    async with engine.stream(request) as tokens:
        return [token.id async for token in tokens]


@virtual_time
async def test_losses_come_as_often_as_they_should() -> None:
    async with serving(3, loss_every_s=10.0, stuck=0.5) as engine:
        num_stuck = 0
        for _ in range(1000):
            await anyio.sleep(1)
            if engine.status().state is InstanceState.LOST:
                try:
                    await engine.unload()
                except InstanceLost:
                    num_stuck += 1
    assert 60 < engine.injected["loss"] < 140
    assert engine.injected["stuck"] == num_stuck > 20


@virtual_time
async def test_a_stream_stalls_and_has_the_same_tokens() -> None:
    async with serving(3) as engine:
        began_s = anyio.current_time()
        undisturbed = await read(engine, ask())
        undisturbed_s = anyio.current_time() - began_s
    async with serving(3, stall=0.5, stall_s=1.0, delay=1.0, delay_s=10.0) as engine:
        began_s = anyio.current_time()
        assert await read(engine, ask()) == undisturbed == expected_tokens(ask(), CARD)
        assert anyio.current_time() - began_s > undisturbed_s + 10
    assert engine.injected["delay"] == 1
    assert 10 < engine.injected["stall"] < 40


@virtual_time
async def test_a_load_without_memory_leaves_the_engine_empty() -> None:
    engine = chaotic_engine(make_engine(), Random(1), EngineFaults(no_memory=1.0))
    async with make_store() as store, engine:
        with pytest.raises(OutOfMemory, match="by chance"):
            await engine.load(CARD, store)
        assert engine.status().state is InstanceState.EMPTY
        engine.injector.armed = False
        await engine.load(CARD, store)
        engine.injector.armed = True
        assert isinstance(engine, SupportsPreload)
        assert isinstance(engine, SupportsAdapters)
        with pytest.raises(OutOfMemory):
            await engine.preload(CARD, store)
        await engine.load_adapter(Adapter("x", "a"))
        with pytest.raises(OutOfMemory):
            await engine.load_adapter(Adapter("y", "a"))
    assert engine.injected == {"no_memory": 3}


@virtual_time
async def test_moves_are_given_up_where_the_engine_knows_moves() -> None:
    async with serving(3, abort=1.0) as engine:
        if isinstance(engine, SupportsMigration):
            with pytest.raises(MigrationAborted, match="by chance"):
                async with engine.export_kv(RequestId("r0")):
                    pass
            assert engine.injected == {"abort": 1}


# ------------------------------------------------------------------------------ faults of stores


async def read_all(store: ChaosStore) -> Counter[str]:
    """Read everything, and count how it went; chunks that came were right."""
    outcomes: Counter[str] = Counter()
    for model in (ModelId("a"), ModelId("b")):
        try:
            for shard in (await store.manifest(model)).shards:
                at = 0
                async with store.open(shard) as chunks:
                    async for chunk in chunks:
                        assert chunk.offset_bytes == shard.buffer_offset_bytes + at
                        at += len(chunk.data)
                        outcomes["chunks"] += 1
                assert at == shard.size_bytes
        except (ShardMissing, ShardCorrupt) as exc:
            outcomes[type(exc).__name__] += 1
        except StoreError:
            outcomes["StoreError"] += 1
    return outcomes


@virtual_time
async def test_shards_are_missing_damaged_or_break_off() -> None:
    bare = make_store()
    store = chaotic_store(bare, Random(5), StoreFaults(missing=0.1, error=0.1, corrupt=0.1))
    outcomes: Counter[str] = Counter()
    async with store:
        for _ in range(200):
            outcomes += await read_all(store)
        assert bare.num_lent == 0
    injected = {
        "ShardMissing": store.injected["missing"],
        "ShardCorrupt": store.injected["corrupt"],
        "StoreError": store.injected["error"],
    }
    assert outcomes == {**injected, "chunks": outcomes["chunks"]}
    assert min(injected.values()) > 20


@virtual_time
async def test_a_slow_disk_takes_its_time() -> None:
    store = chaotic_store(make_store(), Random(5), StoreFaults(bytes_per_s=1000.0, delay=0.5, delay_s=10.0))
    async with store:
        began_s = anyio.current_time()
        await read_all(store)
        assert anyio.current_time() - began_s > 160 + 10
    assert store.injected["delay"] > 2


def test_the_same_seed_gives_the_same_faults_at_the_same_moments() -> None:
    def faults(seed: int) -> tuple[Counter[str], list[float]]:
        lost_s: list[float] = []

        async def live() -> Counter[str]:
            async with serving(seed, loss_every_s=2.0, delay=0.2, stall=0.1) as engine:
                async with make_store() as store:
                    for number in range(40):
                        try:
                            await read(engine, ask(number))
                        except InstanceLost:
                            lost_s.append(anyio.current_time())
                            await engine.unload()
                            await engine.load(CARD, store)
                return engine.injected

        return run(live), lost_s

    assert faults(1) == faults(1)
    assert faults(1) != faults(2)
    assert set(faults(1)[0]) == {"loss", "delay", "stall"}


def test_it_tells_what_it_injected() -> None:
    engine = chaotic_engine(make_engine(), Random(1))
    assert "injected: none" in repr(engine)
    engine.injected["loss"] += 2
    assert repr(engine).endswith("<Injector [armed | injected: 2 loss]>>")
    store = chaotic_store(make_store(), Random(1))
    store.injector.armed = False
    assert repr(store).endswith("<Injector [calm | injected: none]>>")


@pytest.mark.parametrize("wrong", [{"delay": 1.5}, {"delay": -0.1}, {"delay_s": 0}, {"loss_every_s": -1.0}])
def test_faults_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        EngineFaults(**wrong)
