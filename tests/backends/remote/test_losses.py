"""What is left of a link that ends: nothing at the host, an engine that is LOST at the controller."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Literal

import anyio
import pytest
from anyio.lowlevel import checkpoint

from hotswap import InstanceState, RequestId
from hotswap.abc import Channel, SupportsKVLimit, SupportsMigration, SupportsPreload
from hotswap.backends.remote import RemoteEngine
from hotswap.backends.transports import memory_channels
from hotswap.errors import (
    InstanceLost,
)
from hotswap.offline.virtual_time import virtual_time
from hotswap.testing import cancel_everywhere
from hotswap.testing.conformance.engine_suite import Reader
from hotswap.testing.conformance.engine_weights import GatedStore
from tests.backends.remote.support import Rig, expected, request, rig

SILENCE_S = 8.0


async def read_some(made: Rig, num_tokens: int = 5) -> list[int]:
    """Read the first tokens of a request, and leave its stream."""
    async with made.engine.stream(request()) as tokens:
        return [(await anext(tokens)).id for _ in range(num_tokens)]


@virtual_time
async def test_a_cut_link_ends_streams_after_their_tokens_and_leaves_the_model_at_the_host() -> None:
    async with rig() as made:
        await made.engine.load(made.card, made.store)
        readers = [Reader(request(number, max_tokens=400)) for number in range(3)]
        async with anyio.create_task_group() as tasks:
            for reader in readers:
                tasks.start_soon(reader.read, made.engine)
            for reader in readers:
                await reader.began.wait()
            await made.links.opened[0][0].aclose()
        for reader in readers:
            assert isinstance(reader.error, InstanceLost)
            assert reader.ids == expected(reader.request, made.card)[: len(reader.ids)]
        assert made.engine.status().state is InstanceState.LOST
        await made.links.ended[0].wait()
        made.assert_released()
        assert made.behind.status().model == "a", "the host keeps its model"


@virtual_time
async def test_unload_opens_a_new_link_and_empties_the_engine() -> None:
    async with rig() as made:
        await made.engine.load(made.card, made.store)
        await made.links.opened[0][0].aclose()
        await made.links.ended[0].wait()
        with pytest.raises(InstanceLost):
            await read_some(made)
        with pytest.raises(InstanceLost):
            await made.engine.load(made.card, made.store)
        await made.engine.unload()
        assert made.engine.status().state is made.behind.status().state is InstanceState.EMPTY
        await made.engine.load(made.card, made.store)
        assert await read_some(made) == expected(request(), made.card)[:5]


@virtual_time
async def test_a_host_that_cannot_be_reached_again_leaves_the_engine_lost_and_unload_says_so() -> None:
    async with rig() as made:
        await made.links.opened[0][0].aclose()
        made.links.is_down = True
        await made.links.ended[0].wait()
        for _ in range(2):
            with pytest.raises(InstanceLost, match="the host is down"):
                await made.engine.unload()
            assert made.engine.status().state is InstanceState.LOST
        made.links.is_down = False
        await made.engine.unload()
        assert made.engine.status().state is InstanceState.EMPTY


@virtual_time
async def test_a_host_that_falls_silent_is_lost_after_the_silence_with_its_reason() -> None:
    async with rig(silence_s=SILENCE_S) as made:
        await made.engine.load(made.card, made.store)
        reader = Reader(request(max_tokens=400))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reader.read, made.engine)
            await reader.began.wait()
            made.links.opened[0][1].is_frozen = True
            with anyio.fail_after(SILENCE_S + 0.1):
                await reader.ended.wait()
        assert isinstance(reader.error, InstanceLost)
        assert "silent for 8 s" in str(reader.error)
        assert made.engine.status().lost_because == "the other end was silent for 8 s"
        await made.links.ended[0].wait()
        made.assert_released()


@virtual_time
async def test_a_controller_that_falls_silent_leaves_no_request_at_the_host() -> None:
    async with rig() as made:
        await made.engine.load(made.card, made.store)
        reader = Reader(request(max_tokens=400))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reader.read, made.engine)
            await reader.began.wait()
            made.links.opened[0][0].is_frozen = True
            with anyio.fail_after(SILENCE_S + 1):
                await made.links.ended[0].wait()
        made.assert_released()


@virtual_time
async def test_two_ends_that_have_nothing_to_say_stay_connected() -> None:
    async with rig() as made:
        await anyio.sleep(1000)
        assert made.engine.status().state is InstanceState.EMPTY
        assert len(made.links.opened) == 1


@pytest.mark.parametrize(("silence_s", "of_host_s"), [(1.0, 60.0), (60.0, 1.0), (math.inf, 8.0)])
@virtual_time
async def test_two_ends_that_wait_for_different_times_keep_each_others_silence(
    silence_s: float, of_host_s: float
) -> None:
    async with rig(silence_s=silence_s, host_silence_s=of_host_s) as made:
        await anyio.sleep(1000)
        assert made.engine.status().state is InstanceState.EMPTY
        assert len(made.links.opened) == 1


@pytest.mark.parametrize(
    "welcome", [{}, {"silence_s": 0}, {"silence_s": 0.001}, {"silence_s": 1e12}, {"silence_s": "8"}]
)
@virtual_time
async def test_a_host_that_tells_no_silence_that_can_be_kept_is_refused(welcome: dict[str, object]) -> None:
    near, far = memory_channels()

    async def host() -> None:
        await far.receive()
        await far.send(json.dumps([0, ["welcome", 0, {"abilities": [], "status": {}} | welcome, 0]]).encode())

    async def open_link() -> Channel:
        return near

    async with anyio.create_task_group() as tasks, far:
        tasks.start_soon(host)
        with pytest.raises(InstanceLost, match="silence"):
            async with RemoteEngine("e0", open_link):
                pass


@virtual_time
async def test_a_link_that_is_lost_takes_back_a_load() -> None:
    async with rig() as made:
        gated = GatedStore(made.store)
        made.host_store.wrapped = gated
        async with anyio.create_task_group() as tasks:

            async def load() -> None:
                with pytest.raises(InstanceLost):
                    await made.engine.load(made.card, made.store)

            tasks.start_soon(load)
            await gated.reached.wait()
            assert made.engine.status().state is InstanceState.LOADING
            await made.links.opened[0][0].aclose()
        await made.links.ended[0].wait()
        assert made.behind.status().state is InstanceState.EMPTY


async def serve_a_little(made: Rig) -> None:
    """Load, stream, stage, hold an adapter, move to itself, evict, unload."""
    engine = made.engine
    await engine.load(made.card, made.store)
    async with engine.stream(request()) as tokens:
        await anext(tokens)
        assert isinstance(engine, SupportsMigration)
        async with engine.export_kv(RequestId("r0")) as source, engine.import_kv(request(1)) as sink:
            await sink.reserve(8)
            await source.copy_to(sink, 0, 4)  # which the host does by itself
            await sink.write(await source.read(0, 4))
            await source.stop()
        await anext(tokens)
    assert isinstance(engine, SupportsPreload)
    await engine.preload(made.other_card, made.store)
    await engine.drop_preload()
    assert await engine.evict(deadline_s=1.0) == 0
    await engine.unload()


@pytest.mark.parametrize("every", ["checkpoint", "turn"])
def test_a_cancellation_anywhere_leaves_both_ends_in_the_same_state(
    every: Literal["checkpoint", "turn"],
) -> None:
    @virtual_time
    async def test() -> None:
        async with rig() as made:

            async def look() -> None:
                await anyio.sleep(0.5)  # for the load to be told
                there, here = made.behind.status(), made.engine.status()
                assert there == here, "the controller sees what is"
                made.assert_released()
                await made.engine.unload()
                assert made.behind.status().state is made.engine.status().state is InstanceState.EMPTY

            num = await cancel_everywhere(lambda: serve_a_little(made), look, every=every)
            assert num > 20
            assert len(made.links.ended) - sum(ended.is_set() for ended in made.links.ended) == 1

    test()


@virtual_time
async def test_a_link_that_ends_before_a_question_about_a_model_is_sent_loses_the_engine_alone() -> None:
    async with rig() as made:
        engine = made.engine
        assert isinstance(engine, SupportsKVLimit)
        await made.links.opened[0][0].aclose()
        turn = 0
        while engine.status().state is not InstanceState.LOST:  # in one of these turns the link ends
            turn += 1
            engine.most_kv_tokens(replace(made.card, weight=turn))
            await checkpoint()
        await made.links.ended[0].wait()
        await engine.unload()
        assert engine.status().state is InstanceState.EMPTY
