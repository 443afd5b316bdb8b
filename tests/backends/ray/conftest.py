"""These tests need Ray, which has an environment of its own: `make test` runs them there, over a cluster."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from tests.backends.ray.local_cluster import LocalCluster

collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]


@pytest.fixture(scope="session")
def session_cluster() -> Iterator[LocalCluster]:
    """A cluster of three nodes on this machine; nothing of it may be left over at the end."""
    from tests.backends.ray.local_cluster import local_cluster

    with local_cluster() as cluster:
        yield cluster


@pytest_asyncio.fixture
async def cluster(session_cluster: LocalCluster) -> AsyncGenerator[LocalCluster]:
    """The cluster with all of its nodes; a test must leave no actor there."""
    await session_cluster.restore()
    yield session_cluster
    await session_cluster.no_actors()
