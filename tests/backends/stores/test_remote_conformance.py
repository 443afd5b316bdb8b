"""The remote store behaves as every store must, alone, and below the host tier."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hotswap import ModelId, WeightStore
from hotswap.backends.stores import PinnedStore, RemoteStore, TieredStore
from hotswap.testing import WeightStoreConformance
from tests.backends.stores.bad_server import BadServer
from tests.backends.stores.models import UNIT, put

MODELS = (ModelId("a"), ModelId("b"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of several chunks a shard, several shards a rank, and two ranks."""
    directory = tmp_path_factory.mktemp("root")
    for model in MODELS:
        put(directory, model, size=9 * UNIT, world_size=2, file_bytes=6 * UNIT)
    return directory


class Remote(WeightStoreConformance):
    models = MODELS

    @pytest.fixture(autouse=True)
    def _root(self, root: Path) -> None:
        self.root = root


class TestOverHttp(Remote):
    @asynccontextmanager
    async def make_store(self) -> AsyncGenerator[WeightStore]:
        async with (
            BadServer(self.root).run() as server,
            RemoteStore(server.url, part_bytes=2 * UNIT, concurrency=2) as store,
        ):
            yield store


class TestOverFiles(Remote):
    def make_store(self) -> RemoteStore:
        return RemoteStore(self.root.as_uri(), part_bytes=UNIT)


class TestBelowTheHostTier(Remote):
    @asynccontextmanager
    async def make_store(self) -> AsyncGenerator[WeightStore]:
        async with BadServer(self.root).run() as server:
            remote = RemoteStore(server.url, part_bytes=2 * UNIT, concurrency=2)
            async with TieredStore(PinnedStore("1 MiB", chunk_bytes=UNIT), remote) as store:
                for model in MODELS:  # a remote store knows of a model what it was asked about
                    await store.manifest(model)
                yield store
