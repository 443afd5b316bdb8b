"""A fleet over the nodes of a Ray cluster: tokens are exact while engines swap, move and are lost."""

from __future__ import annotations

import signal
from contextlib import suppress

import anyio
import psutil
import pytest

from hotswap import Fleet, InstanceId, InstanceState, RequestId, Sampling
from hotswap.backends.ray import RayEngines
from hotswap.errors import HotswapError, SwapFailed, SwapRefused
from tests.backends.ray.local_cluster import LocalCluster
from tests.backends.ray.support import LONG, PROMPT, kill, pair, settled, sim_engine, sim_store, until
from tests.runtime.support import expected, read, sim_fleet


async def test_tokens_are_exact_while_engines_of_three_nodes_swap(cluster: LocalCluster) -> None:
    engines = RayEngines.per_node(sim_engine, sim_store)
    async with engines, sim_fleet("a", "b", engines=engines.engines) as fleet:
        assert {view.node for view in fleet.view().instances} == await cluster.alive()
        async with anyio.create_task_group() as clients:
            for number in range(12):
                sampling = Sampling(max_tokens=60, ignore_eos=True)
                clients.start_soon(read, fleet, "ab"[number % 2], (*PROMPT, number), sampling)
            for _ in range(4):
                for view in fleet.view().instances:
                    with suppress(SwapRefused, SwapFailed):  # the scheduler has the instance
                        await fleet.swap(view.id, to="b" if view.model == "a" else "a")
        assert len({(record.instance, record.model_after) for record in fleet.swaps}) > 3
        await settled(fleet)


async def test_a_request_moves_between_nodes_with_its_blocks_and_not_through_the_controller(
    cluster: LocalCluster,
) -> None:
    async with pair("a") as (fleet, e0, e1):
        await fleet.drain("e1")
        e0.num_links = e1.num_links = 0
        async with fleet.stream("a", PROMPT, LONG) as stream:
            tokens = [await anext(stream) for _ in range(10)]
            fleet.reopen("e1")
            record = await fleet.migrate(stream.request.id, to="e1", method="kv")
            tokens += await stream.collect()
            assert [hop.instance for hop in stream.hops] == ["e0", "e1"]
            assert [token.id for token in tokens] == expected(stream.request)
        assert record.outcome == "done"
        assert record.num_tokens > len(PROMPT)
        assert (e0.num_links, e1.num_links) == (0, 0)
        await settled(fleet)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_requests_of_a_worker_that_is_killed_or_frozen_go_on_and_its_engine_comes_back(
    cluster: LocalCluster, how: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair("a", silence_s=3.0) as (fleet, e0, _):
        await fleet.drain("e1")
        async with fleet.stream("a", PROMPT, LONG) as stream:
            tokens = [await anext(stream) for _ in range(10)]
            fleet.reopen("e1")
            pid = kill(e0, how)
            tokens += await stream.collect()
            assert [hop.instance for hop in stream.hops] == ["e0", "e1"]
            assert [token.id for token in tokens] == expected(stream.request)
        reasons = {signal.SIGKILL: "its worker process has died", signal.SIGSTOP: "silent for 3 s"}
        assert reasons[how] in caplog.text
        await until(lambda: _is_free(fleet, "e0"))
        assert e0.pid != pid
        await until(lambda: not psutil.pid_exists(pid))
        await fleet.swap("e0", to="a")
        await settled(fleet)


async def test_requests_of_a_node_that_is_lost_go_on_and_its_engine_can_be_removed(
    cluster: LocalCluster,
) -> None:
    async with pair("a", silence_s=3.0) as (fleet, e0, _):
        await fleet.drain("e1")
        async with anyio.create_task_group() as tasks, fleet.stream("a", PROMPT, LONG) as stream:
            tokens = [await anext(stream) for _ in range(10)]
            fleet.reopen("e1")
            tasks.start_soon(cluster.lose, "127.0.0.4")
            tokens += await stream.collect()
            assert [hop.instance for hop in stream.hops] == ["e0", "e1"]
            assert [token.id for token in tokens] == expected(stream.request)
        await fleet.remove("e0")
        assert [view.id for view in fleet.view().instances] == ["e1"]
        await settled(fleet)
        assert e0.status().state is InstanceState.LOST


async def test_requests_that_are_moving_when_a_node_is_lost_go_on(cluster: LocalCluster) -> None:
    async with pair("a", silence_s=3.0) as (fleet, e0, _):
        async with anyio.create_task_group() as tasks:
            for number in range(4):
                prompt = (*PROMPT * 10, number)
                tasks.start_soon(read, fleet, "a", prompt, Sampling(max_tokens=400, ignore_eos=True))
            await until(lambda: len(_running(fleet)) == 4)
            tasks.start_soon(_move_to_and_fro, fleet)
            await until(lambda: len(fleet.migrations) > 4)
            await cluster.lose("127.0.0.4")
        assert e0.status().state is InstanceState.LOST
        assert {record.outcome for record in fleet.migrations} >= {"done"}
        await fleet.remove("e0")
        await settled(fleet)


def _is_free(fleet: Fleet, instance: str) -> bool:
    view = fleet.view().instance(InstanceId(instance))
    return view.state is InstanceState.EMPTY and not view.swapping


def _running(fleet: Fleet) -> list[RequestId]:
    return [running.id for running in fleet.view().running]


async def _move_to_and_fro(fleet: Fleet) -> None:
    """Move all requests between both engines, for as long as both serve and there are any."""
    while requests := _running(fleet):
        for request in requests:
            for instance in ("e0", "e1"):
                with suppress(HotswapError):  # it has ended, or an engine is lost
                    await fleet.migrate(request, to=instance, method="kv")
        if any(view.state is InstanceState.LOST for view in fleet.view().instances):
            return
        await anyio.sleep(0.01)
