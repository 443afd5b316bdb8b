"""The remote store behaves as every store must, alone, and below the host tier."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hotswap import ModelId
from hotswap.abc import WeightStore
from hotswap.backends.stores import PinnedStore, RemoteStore, TieredStore
from hotswap.testing import WeightStoreConformance
from tests.backends.stores.bad_server import BadServer
from tests.backends.stores.models import UNIT, put_all

MODELS = (ModelId("a"), ModelId("b"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models on a disk."""
    return put_all(tmp_path_factory.mktemp("root"), MODELS)


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
    has_disk = False

    @asynccontextmanager
    async def make_store(self) -> AsyncGenerator[WeightStore]:
        async with BadServer(self.root).run() as server:
            remote = RemoteStore(server.url, part_bytes=2 * UNIT, concurrency=2)
            async with TieredStore(PinnedStore("1 MiB", chunk_bytes=UNIT), remote) as store:
                for model in MODELS:  # a remote store shows the models whose manifests were read
                    await store.manifest(model)
                yield store
