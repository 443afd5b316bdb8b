"""The simulated engine and store: the public suites, and what is theirs alone."""

from __future__ import annotations

from typing import Any

from hotswap import Adapter, DeviceBudget, Model, ModelId, Request, TierView
from hotswap.abc import Engine, ModelCard
from hotswap.backends.sim import DeviceProfile, SimEngine, SimNodes, SimStore, sim_manifest
from hotswap.testing.conformance import EngineConformance, WeightStoreConformance
from hotswap.testing.conformance.engine_resize import ResizeChecks

PROFILE = DeviceProfile(memory_bytes=1 << 20)
BLOCK_BYTES = 64
QUICK = DeviceProfile(memory_bytes=1 << 20, floor_s=0.0005, base_s=0.0001, unload_s=0.0, adapter_s=0.001)


class TestSimEngineConforms(EngineConformance):
    virtual = True
    limit_s = 20.0
    step_s = 0.02
    can_lose = True
    models = (Model("a"), Model("b"))
    adapters = (Adapter("x", "a"), Adapter("y", "a"))

    def make_engine(self) -> SimEngine:
        return self.make(SimEngine)

    def make(self, engine: type[SimEngine], profile: DeviceProfile = PROFILE) -> SimEngine:
        return engine(
            "e0", profile, kv_blocks=160, kv_block_tokens=4, max_requests=16, token_budget=24, vocabulary=500
        )

    def make_store(self) -> SimStore:
        return SimStore({"a": 100_000, "b": 60_000}, chunk_bytes=30_000)

    def lose(self, engine: Engine) -> None:
        assert isinstance(engine, SimEngine)
        engine.lose()

    async def expected(self, request: Request, card: ModelCard) -> list[int]:
        return self.make_engine().expected_tokens(request, card)


class TestSimEngineConformsInRealTime(TestSimEngineConforms):
    virtual = False
    limit_s = EngineConformance.limit_s
    step_s = 60.0  # on a machine however busy

    def make_engine(self) -> SimEngine:
        return self.make(SimEngine, QUICK)


class TestSimEngineOfABudgetConforms(ResizeChecks):
    can_resize = True
    virtual = True
    limit_s = 20.0
    models = (Model("a"), Model("b"))

    def make_engine(self) -> Any:
        return SimEngine(
            "e0",
            PROFILE,
            kv_blocks=200,
            kv_block_tokens=4,
            max_requests=16,
            token_budget=24,
            vocabulary=500,
            device_budget=DeviceBudget(160_000 + 180 * BLOCK_BYTES),
            floor_bytes=100_000 + 60 * BLOCK_BYTES,
        )

    def make_store(self) -> SimStore:
        facts = {"kv_bytes_per_token": BLOCK_BYTES // 4}
        return SimStore([sim_manifest("a", 100_000, **facts), sim_manifest("b", 60_000, **facts)])


class TestSimStoreConforms(WeightStoreConformance):
    virtual = True
    models = (ModelId("a"), ModelId("b"))

    def make_store(self) -> SimStore:
        return self.make(SimStore)

    def make(self, store: type[SimStore]) -> SimStore:
        manifests = [sim_manifest("a", 100_000, num_shards=2), sim_manifest("b", 60_001)]
        return store(manifests, cache=TierView(name="host", capacity_bytes=120_000), chunk_bytes=7_000)


class TestSimStoreWithoutACacheConforms(TestSimStoreConforms):
    virtual = False

    def make_store(self) -> SimStore:
        return SimStore({"a": 100_000, "b": 60_001}, cache=None, chunk_bytes=30_000)


class TestASharedSimStoreConforms(TestSimStoreConforms):
    def make_store(self) -> SimStore:
        return SimStore({"a": 100_000, "b": 60_001}, chunk_bytes=7_000, shared=True)


class TestSimNodesConforms(WeightStoreConformance):
    virtual = True
    models = (ModelId("a"), ModelId("b"))

    def make_store(self) -> SimNodes:
        return SimNodes({node: self.store_of(node) for node in ("n0", "n1")})

    def store_of(self, node: str) -> SimStore:
        return SimStore(
            {"a": 100_000, "b": 60_001},
            home=TierView(name="disk", bytes_per_s=5e9, node=node),
            cache=TierView(name="host", bytes_per_s=20e9, node=node),
            chunk_bytes=7_000,
            shared=True,
        )
