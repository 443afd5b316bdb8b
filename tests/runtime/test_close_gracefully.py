"""A fleet that closes gracefully admits no request, finishes those under way, and ends the rest in time."""

from __future__ import annotations

import math
from itertools import count
from typing import Any

import anyio
import pytest

from hotswap import Fleet, Sampling
from hotswap.errors import ConfigError, FleetClosed
from hotswap.offline.virtual_time import virtual_time
from hotswap.testing.cancel import cancel_at
from tests.runtime.support import Idle, engine_of, expected, idle, read, sim_fleet

SOME = Sampling(max_tokens=5, ignore_eos=True)
LONG = Sampling(max_tokens=300, ignore_eos=True)
ENDLESS = Sampling(max_tokens=4000, ignore_eos=True)


async def refused(fleet: Fleet) -> None:
    with pytest.raises(FleetClosed, match="takes no new requests"):
        await fleet.generate("a", (1,), SOME)


@virtual_time
async def test_requests_that_run_or_wait_finish_and_new_ones_are_refused() -> None:
    engine = engine_of("e0", max_requests=2)
    async with (
        sim_fleet("a", engines=[engine], scheduler=Idle()) as fleet,
        anyio.create_task_group() as tasks,
    ):
        await fleet.swap("e0", to="a")
        for number in range(6):
            tasks.start_soon(read, fleet, "a", (1, number), LONG)
        await anyio.sleep(0.5)
        assert fleet.view().waiting
        tasks.start_soon(fleet.close_gracefully)
        await anyio.sleep(0.1)
        await refused(fleet)
        assert await fleet.close_gracefully() == 0
        await refused(fleet)
        idle(fleet)
        await fleet.unload("e0")  # by hand everything else goes on


@virtual_time
async def test_a_request_for_a_model_that_is_yet_to_be_loaded_is_finished() -> None:
    async with sim_fleet("a", "b") as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(read, fleet, "a", (1,), SOME)
        tasks.start_soon(read, fleet, "b", (1,), SOME)
        await anyio.sleep(0.01)
        assert await fleet.close_gracefully(60.0) == 0


@virtual_time
async def test_at_the_deadline_the_rest_is_told_with_what_it_has() -> None:
    async with sim_fleet("a", engines=1, scheduler=Idle()) as fleet, anyio.create_task_group() as tasks:
        await fleet.swap("e0", to="a")
        ended: list[str] = []

        async def client(model: str) -> None:
            async with fleet.stream(model, (1, 2), ENDLESS) as stream:
                first = await anext(stream)
                assert first.id == expected(stream.request)[0]
                with pytest.raises(FleetClosed, match=f"{stream.request.id}.*tokens were given"):
                    await stream.collect()
                ended.append(model)

        for _ in range(3):
            tasks.start_soon(client, "a")
        await anyio.sleep(1.0)
        before_s = anyio.current_time()
        assert await fleet.close_gracefully(2.0) == 3
        assert anyio.current_time() - before_s == pytest.approx(2.0, abs=0.1)
        await anyio.sleep(0.01)
        assert ended == ["a"] * 3
        idle(fleet)


@virtual_time
async def test_a_waiting_request_is_told_at_the_deadline() -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet, anyio.create_task_group() as tasks:

        async def client() -> None:
            with pytest.raises(FleetClosed, match="0 tokens"):
                await fleet.generate("a", (1,), SOME)

        tasks.start_soon(client)
        await anyio.sleep(0.01)
        assert await fleet.close_gracefully(1.0) == 1
        assert await fleet.close_gracefully(0.0) == 0


@virtual_time
async def test_a_cancelled_close_admits_requests_again_unless_another_one_waits() -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet, anyio.create_task_group() as tasks:
        await fleet.swap("e0", to="a")
        tasks.start_soon(read, fleet, "a", (1,), ENDLESS)
        await anyio.sleep(0.1)
        other = anyio.CancelScope()

        async def close() -> None:
            with other:
                await fleet.close_gracefully()

        tasks.start_soon(close)
        await anyio.sleep(0.1)
        with anyio.move_on_after(0.5):
            await fleet.close_gracefully()
        await refused(fleet)
        other.cancel()
        await anyio.sleep(0.1)
        await read(fleet, "a", (1,), SOME)
        assert await fleet.close_gracefully() == 0


async def test_a_close_cancelled_anywhere_leaves_a_fleet_that_serves() -> None:
    for number in count(1):
        async with sim_fleet("a", scheduler=Idle()) as fleet, anyio.create_task_group() as tasks:
            await fleet.swap("e0", to="a")
            async with fleet.stream("a", (1,), SOME) as stream:
                tasks.start_soon(stream.collect)
                if not await cancel_at(number, fleet.close_gracefully):
                    break
                await read(fleet, "a", (1,), SOME)
                await fleet.close_gracefully()
    assert number > 1


@virtual_time
async def test_leaving_the_block_ends_a_close_that_waits() -> None:
    async with anyio.create_task_group() as tasks, sim_fleet("a", scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")

        async def client() -> None:
            with pytest.raises(FleetClosed):
                await fleet.generate("a", (1,), ENDLESS)

        async def close() -> None:
            with pytest.raises(FleetClosed):
                await fleet.close_gracefully()

        tasks.start_soon(client)
        await anyio.sleep(0.1)
        tasks.start_soon(close)
        await anyio.sleep(0.1)


@pytest.mark.parametrize("deadline_s", [math.nan, -1.0, "soon"])
@virtual_time
async def test_a_deadline_that_is_no_number_of_seconds_closes_nothing(deadline_s: Any) -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        with pytest.raises(ConfigError, match="deadline_s"):
            await fleet.close_gracefully(deadline_s)
        await read(fleet, "a", (1,), SOME)


async def test_a_fleet_that_is_not_open_cannot_be_closed() -> None:
    with pytest.raises(FleetClosed):
        await sim_fleet("a").close_gracefully()
