"""A cluster of its own whose head is lost: `python -m ...` ends with 0 if what is promised then holds."""

from __future__ import annotations

import os
import signal

import anyio
import pytest

from hotswap import Fleet, InstanceState, Sampling
from hotswap.abc import Engine
from hotswap.backends.ray import RayEngine
from hotswap.errors import InstanceLost, MigrationAborted
from tests.backends.ray.local_cluster import LocalCluster, local_cluster
from tests.backends.ray.support import LONG, PROMPT, engine_on, kill, sim_store, until
from tests.backends.ray.support import sim_engine as make_engine
from tests.runtime.support import Idle, expected, sim_fleet

NODES = ("127.0.0.21", "127.0.0.22", "127.0.0.23")


async def main(cluster: LocalCluster) -> None:
    e0, e1 = engine_on(NODES[1], "e0"), engine_on(NODES[2], "e1", silence_s=3.0)
    async with sim_fleet("a", "b", engines=[e0, e1], scheduler=Idle()) as fleet:
        for engine in (e0, e1):
            await fleet.swap(engine.id, to="a")
        kept = e0.pid
        await stream(fleet, "e0", "e1", outcome="done")
        await stream(fleet, "e0", "e1", outcome="done", cluster=cluster)
        with anyio.fail_after(30):  # of which a host waits 5 s for Ray
            await stream(fleet, "e1", "e0", outcome="aborted", num_tokens=900)
        for model in ("b", "a"):
            assert (await fleet.swap("e0", to=model)).model_after == model
        late = RayEngine("late", make_late, sim_store, start_s=3.0)
        with pytest.raises(InstanceLost, match="within 3 s"), anyio.fail_after(30):
            await fleet.add(late)
        await lose(fleet, e1)
        await until(lambda: fleet.view().running == ())
    assert kept is not None
    os.kill(kept, signal.SIGKILL)  # as Ray does with all workers after a minute


def make_late() -> Engine:
    return make_engine("late")


async def stream(
    fleet: Fleet,
    source: str,
    to: str,
    *,
    outcome: str,
    num_tokens: int = 200,
    cluster: LocalCluster | None = None,
) -> None:
    """Stream from one engine, and move the request to the other; its tokens must be exact."""
    await fleet.drain(to)
    async with fleet.stream("a", PROMPT, Sampling(max_tokens=num_tokens, ignore_eos=True)) as tokens:
        read = [await anext(tokens) for _ in range(10)]
        assert tokens.hops[-1].instance == source
        fleet.reopen(to)
        if cluster is not None:
            await cluster.lose_head()
        try:
            record = await fleet.migrate(tokens.request.id, to=to, method="kv")
            assert record.outcome == outcome
        except MigrationAborted:
            assert outcome == "aborted"
        read += await tokens.collect()
        assert [token.id for token in read] == expected(tokens.request)
        assert tokens.hops[-1].instance == (to if outcome == "done" else source)


async def lose(fleet: Fleet, engine: RayEngine) -> None:
    """Kill the process of an engine in the middle of a stream, which goes on at the other one."""
    await fleet.drain("e0")
    async with fleet.stream("a", PROMPT, LONG) as tokens:
        read = [await anext(tokens) for _ in range(10)]
        assert tokens.hops[-1].instance == engine.id
        fleet.reopen("e0")
        kill(engine)
        read += await tokens.collect()
        assert [token.id for token in read] == expected(tokens.request)
    assert engine.status().state is InstanceState.LOST


if __name__ == "__main__":
    with local_cluster(NODES, at=NODES[1]) as made:
        anyio.run(main, made)
