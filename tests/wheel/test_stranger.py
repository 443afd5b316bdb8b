"""A stranger's engine, store and policies against the public suites: only what the wheel installs is used."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

import anyio
from anyio.lowlevel import checkpoint

from hotswap.abc import (
    Action,
    Engine,
    FleetView,
    HostChunk,
    InstanceId,
    InstanceState,
    Manifest,
    Model,
    ModelCard,
    ModelId,
    Request,
    Residency,
    Router,
    Scheduler,
    Shard,
    StoreView,
    Swap,
    TierView,
    TokenStream,
    WeightStore,
    WrapperEngine,
)
from hotswap.backends.sim import DeviceProfile, SimEngine
from hotswap.errors import ShardMissing
from hotswap.offline import Arrival, play, workload
from hotswap.offline.virtual_time import virtual_time
from hotswap.testing import (
    EngineConformance,
    RouterConformance,
    SchedulerConformance,
    WeightStoreConformance,
)

WEIGHTS = {ModelId("a"): b"\x01\x02\x03" * 10_000, ModelId("b"): b"\x04\x05" * 10_000}
PROFILE = DeviceProfile(memory_bytes=1 << 20)


class DictStore(WeightStore):
    """Keeps weights in a dictionary and lends them in chunks of 8 KiB."""

    async def manifest(self, model: ModelId) -> Manifest:
        if model not in WEIGHTS:
            raise ShardMissing(f"No model {model!r} in this dictionary.")
        shard = Shard(
            model=model,
            rank=0,
            file="weights",
            file_offset_bytes=0,
            buffer_offset_bytes=0,
            size_bytes=len(WEIGHTS[model]),
            checksum="",
        )
        return Manifest(model=model, shards=(shard,), buffer_bytes=shard.size_bytes)

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        if shard not in (await self.manifest(shard.model)).shards:
            raise ShardMissing(f"No shard {shard.file!r} in this dictionary.")
        async with aclosing(self._chunks(memoryview(WEIGHTS[shard.model]))) as chunks:
            yield chunks

    async def _chunks(self, data: memoryview) -> AsyncGenerator[HostChunk]:
        for at in range(0, len(data), 8192):
            await checkpoint()
            yield HostChunk(offset_bytes=at, data=data[at : at + 8192], tier="dictionary")

    def view(self) -> StoreView:
        held = tuple(Residency(model=m, tier="dictionary", size_bytes=len(w)) for m, w in WEIGHTS.items())
        used = sum(entry.size_bytes for entry in held)
        return StoreView(tiers=(TierView(name="dictionary", used_bytes=used),), residency=held)


class CountingEngine(WrapperEngine):
    """Counts the streams it is asked for, and leaves the rest to another engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.num_streams = 0

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[TokenStream]:
        self.num_streams += 1
        async with self.wrapped.stream(request) as tokens:
            yield tokens


class FewestWaiting(Router):
    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        able = sorted(fleet.serving(request.model), key=lambda instance: (instance.num_requests, instance.id))
        return able[0].id if able else None


class FillTheEmpty(Scheduler):
    """Gives each empty instance the model that most requests wait for."""

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        wanted = max(fleet.models, key=lambda model: model.num_waiting)
        empty = [i for i in fleet.instances if i.free and i.state is InstanceState.EMPTY]
        return [Swap(instance=instance.id, model=wanted.id) for instance in empty if wanted.num_waiting]


class TestCountingEngine(EngineConformance):
    virtual = True
    limit_s = 20.0
    step_s = 0.02
    can_lose = True
    models = (Model("a"), Model("b"))

    def make_engine(self) -> CountingEngine:
        return CountingEngine(SimEngine("e0", PROFILE, kv_blocks=160, kv_block_tokens=4, max_requests=16))

    def make_store(self) -> DictStore:
        return DictStore()

    def lose(self, engine: Engine) -> None:
        assert isinstance(engine, CountingEngine)
        assert isinstance(engine.wrapped, SimEngine)
        engine.wrapped.lose()


class TestDictStore(WeightStoreConformance):
    models = (ModelId("a"), ModelId("b"))

    def make_store(self) -> DictStore:
        return DictStore()


class TestFewestWaiting(RouterConformance):
    def make_router(self) -> FewestWaiting:
        return FewestWaiting()


class TestFillTheEmpty(SchedulerConformance):
    def make_scheduler(self) -> FillTheEmpty:
        return FillTheEmpty()


@virtual_time
async def test_an_hour_of_arrivals_is_counted() -> None:
    store = DictStore()
    card = ModelCard.of(Model("a"), await store.manifest(ModelId("a")))
    arrivals = workload(1, models={"a": 1.0}, rate_per_s=0.05, seconds=3600, prompt_tokens=lambda _: 10)
    async with CountingEngine(SimEngine("e0", PROFILE)) as engine:
        await engine.load(card, store)

        async def serve(arrival: Arrival) -> None:
            async with engine.stream(arrival.request("r")) as tokens:
                assert len(await tokens.collect()) == arrival.sampling.max_tokens

        await play(arrivals, serve)
        assert engine.num_streams == len(arrivals) > 100
    assert anyio.current_time() >= arrivals[-1].arrive_s


def test_torch_is_not_needed() -> None:
    code = "import sys, hotswap.backends.sim, hotswap.testing.conformance; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
