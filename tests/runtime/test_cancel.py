"""Cancelled at any turn of the loop, the fleet's operations release all resources and leave a valid state."""

from __future__ import annotations

import anyio
import pytest

from hotswap import Fleet, InstanceId, InstanceState, Sampling
from hotswap.abc import Engine
from hotswap.errors import SwapRefused
from hotswap.offline.virtual_time import virtual_time
from hotswap.testing.cancel import cancel_everywhere
from tests.runtime.support import Idle, engine_of, idle, read, sim_fleet, store_of
from tests.runtime.test_swap import NoPreload

SOME = Sampling(max_tokens=25, ignore_eos=True)


async def settle(fleet: Fleet) -> None:
    """Let shielded work end, and check that all resources are released."""
    await anyio.sleep(5)
    idle(fleet)


@pytest.mark.parametrize("preload", [True, False])
@virtual_time
async def test_a_swap_cancelled_at_every_turn(preload: bool) -> None:
    e0: Engine = engine_of("e0") if preload else NoPreload(engine_of("e0"))
    async with sim_fleet("a", "b", engines=[e0, engine_of("e1")], scheduler=Idle()) as fleet:
        await fleet.swap("e1", to="a")

        async def scenario() -> None:
            await fleet.swap("e0", to="a")
            async with anyio.create_task_group() as clients:
                for n in range(3):
                    clients.start_soon(read, fleet, "a", (n,), SOME)
                await anyio.sleep(0.05)
                await fleet.swap("e0", to="b", deadline_s=0.05)

        async def check() -> None:
            await settle(fleet)
            view = fleet.view().instances[0]
            assert view.state in (InstanceState.EMPTY, InstanceState.SERVING)
            assert view.preloaded is None
            assert view.weight_bytes == (1 << 20 if view.model else 0)
            if view.model == "a":
                await fleet.unload("e0")

        assert await cancel_everywhere(scenario, check, every="turn") > 50


@virtual_time
async def test_samples_cancelled_at_every_turn_of_their_life() -> None:
    """While they wait for the first of them, for room, and for another engine after a swap."""
    engines = [engine_of(f"e{n}", prefix_reuse=True, max_requests=3) for n in range(2)]
    async with sim_fleet("a", "b", engines=engines, scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        await fleet.swap("e1", to="a")

        async def scenario() -> None:
            asked = Sampling(n=7, temperature=1.0, max_tokens=25, ignore_eos=True)
            async with fleet.samples("a", range(1, 600), asked) as streams:
                await anext(streams[1])
                for name in ("e0", "e1"):
                    await fleet.unload(name)
                    await fleet.swap(name, to="a")
                for stream in streams:
                    await stream.collect()

        async def check() -> None:
            await settle(fleet)
            for name in ("e0", "e1"):
                if fleet.view().instance(InstanceId(name)).model is None:
                    await fleet.swap(name, to="a")

        assert await cancel_everywhere(scenario, check, every="turn") > 50


@virtual_time
async def test_a_stream_cancelled_at_every_turn_of_its_life() -> None:
    async with sim_fleet("a", "b", scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        await fleet.swap("e1", to="a")

        async def scenario() -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read, fleet, "a", (1, 2, 3), SOME)
                await anyio.sleep(0.05)
                for name in ("e0", "e1"):
                    try:
                        await fleet.swap(name, to="a")
                    except SwapRefused:
                        await fleet.swap(name, to="b")
                        await fleet.swap(name, to="a")

        async def check() -> None:
            await settle(fleet)
            for name, view in zip(("e0", "e1"), fleet.view().instances, strict=True):
                if view.model != "a":
                    await fleet.swap(name, to="a")

        assert await cancel_everywhere(scenario, check, every="turn") > 50


@virtual_time
async def test_a_fleet_cancelled_at_every_turn_gives_everything_back() -> None:
    engines = [engine_of("e0"), engine_of("e1")]
    store = store_of("a", "b")

    async def scenario() -> None:
        async with (
            sim_fleet("a", "b", engines=engines, store=store) as fleet,
            anyio.create_task_group() as clients,
        ):
            for n in range(4):
                clients.start_soon(read, fleet, "ab"[n % 2], (n,), SOME)

    async def check() -> None:
        for engine in engines:
            view = engine.status()
            assert view.state is InstanceState.EMPTY
            assert view.weight_bytes == view.num_running == view.num_waiting == 0
        assert store.num_lent == 0

    assert await cancel_everywhere(scenario, check, every="turn") > 50
