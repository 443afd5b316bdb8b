"""Engines and stores for actors, which import what they make, and fleets of them."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from hotswap import Fleet, ModelId, Sampling, StoreView
from hotswap.abc import Channel, HostChunk, Manifest, Shard, WeightStore
from hotswap.backends.nodes import LinkedStore
from hotswap.backends.ray import RayEngine, RayNode
from hotswap.backends.ray.cluster import alive_nodes, on_node
from hotswap.backends.sim import SimEngine, SimStore, sim_manifest
from hotswap.backends.transports import connect_shared
from tests.backends.process.support import checked, until
from tests.runtime.support import WEIGHT_BYTES, Idle, engine_of, idle, sim_fleet

__all__ = [
    "LONG",
    "PROMPT",
    "CountingEngine",
    "StoreElsewhere",
    "engine_on",
    "hanging_engine",
    "kill",
    "pair",
    "settled",
    "sim_engine",
    "sim_store",
    "until",
]

PROMPT = tuple(range(1, 101))
LONG = Sampling(max_tokens=200, ignore_eos=True)


def sim_engine(id: str) -> SimEngine:
    """An engine of 100 steps a second."""
    return engine_of(id)


def hanging_engine(id: str) -> SimEngine:
    """An engine that is never made."""
    while True:
        signal.pause()


def sim_store() -> SimStore:
    """A store of the models "a" and "b" on a disk, with a cache in memory."""
    facts: dict[str, Any] = {"max_context_tokens": 4096, "eos_token_ids": (0,)}
    return SimStore([checked(sim_manifest(name, WEIGHT_BYTES, **facts)) for name in ("a", "b")])


class StoreElsewhere(WeightStore):
    """A store that is served at a path on this machine, now and then: each call has a link of its own."""

    def __init__(self, path: str) -> None:
        self._path = path

    def _store(self) -> LinkedStore:
        return LinkedStore("test", partial(connect_shared, self._path))

    async def manifest(self, model: ModelId) -> Manifest:
        async with self._store() as store:
            return await store.manifest(model)

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        async with self._store() as store, store.open(shard) as chunks:
            yield chunks

    def view(self) -> StoreView:
        return StoreView()


class CountingEngine(RayEngine):
    """Counts the links to its host beside those of control.

    Attributes:
        num_links: How many were opened for KV blocks.
    """

    num_links = 0

    async def open_channel(self) -> Channel:
        self.num_links += 1
        return await super().open_channel()


def engine_on(node: str | RayNode, id: str, **settings: Any) -> CountingEngine:
    """An engine on a node, or on any that has a label."""
    if isinstance(node, RayNode):
        options: dict[str, Any] = {"scheduling_strategy": on_node(node)}
    else:
        options = {"label_selector": {"at": node}}
    return CountingEngine(id, partial(sim_engine, id), sim_store, options=options, **settings)


@asynccontextmanager
async def pair(*models: str, **settings: Any) -> AsyncGenerator[tuple[Fleet, CountingEngine, CountingEngine]]:
    """A fleet of two engines that serve the first model: "e0" on the third node and "e1" on the second."""
    nodes = {node.name: node for node in await alive_nodes()}
    e0, e1 = engine_on(nodes["127.0.0.4"], "e0", **settings), engine_on(nodes["127.0.0.3"], "e1", **settings)
    async with sim_fleet(*models, engines=[e0, e1], scheduler=Idle()) as fleet:
        for engine in (e0, e1):
            await fleet.swap(engine.id, to=models[0])
        yield fleet, e0, e1


def kill(engine: RayEngine, how: signal.Signals = signal.SIGKILL) -> int:
    """Signal the process of an engine; return its id."""
    assert engine.pid is not None
    os.kill(engine.pid, how)
    return engine.pid


async def settled(fleet: Fleet) -> None:
    """Wait until no engine swaps or has anything of a request, as its host tells."""
    await until(lambda: not any(e.swapping for e in fleet.view().instances))
    await until(lambda: all(e.num_running == 0 for e in fleet.view().instances))
    await until(lambda: all(e.num_free_kv_blocks == e.num_kv_blocks for e in fleet.view().instances))
    idle(fleet)
