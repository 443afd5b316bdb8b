"""An engine in an actor keeps the contract of engines; one actor has it from test to test, and is adopted."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest
import ray

from hotswap import InstanceState
from hotswap.abc import Engine, WeightStore
from hotswap.backends.nodes import StoreHost
from hotswap.backends.ray import RayEngine
from hotswap.backends.sim import SimStore
from hotswap.backends.transports import serve_shared
from hotswap.metered_store import MeteredStore
from tests.backends import test_sim
from tests.backends.process.support import checked_store, sim_engine
from tests.backends.ray.local_cluster import LocalCluster
from tests.backends.ray.support import StoreElsewhere, kill
from tests.backends.remote.support import HostStore


class _HandingEngine(RayEngine):
    """Has its actor read the store that it is given, which is served to it at a path."""

    def __init__(self, id: str, path: str) -> None:
        super().__init__(id, partial(sim_engine, id), partial(StoreElsewhere, path), detached=True)
        self.given = HostStore()

    def _give(self, store: WeightStore) -> None:
        self.given.wrapped = store.wrapped if isinstance(store, MeteredStore) else store


class TestRayEngine(test_sim.TestSimEngineConformsInRealTime):
    directory: Path
    in_use: ClassVar[set[str]] = set()

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def actors(cls, session_cluster: LocalCluster) -> Iterator[None]:
        cls.directory = session_cluster.directory
        yield
        for actor in ray.util.list_named_actors(all_namespaces=True):
            ray.kill(ray.get_actor(**actor))

    def make_engine(self) -> Any:
        return self._adopted()

    @asynccontextmanager
    async def _adopted(self) -> AsyncGenerator[_HandingEngine]:
        id = next(id for id in ("e0", "e1", "e2") if id not in self.in_use)
        self.in_use.add(id)
        path = str(self.directory / id)
        engine = _HandingEngine(id, path)
        try:
            async with anyio.create_task_group() as tasks:
                await tasks.start(serve_shared, StoreHost("test", engine.given).serve, path)
                async with engine:
                    if engine.status().state is not InstanceState.EMPTY:  # as a test has left it
                        await engine.unload()
                    yield engine
                tasks.cancel_scope.cancel()
        finally:
            self.in_use.discard(id)

    def make_store(self) -> SimStore:
        return checked_store()

    def lose(self, engine: Engine) -> None:
        assert isinstance(engine, RayEngine)
        kill(engine)

    async def expected(self, request: Any, card: Any) -> list[int]:
        return sim_engine().expected_tokens(request, card)
