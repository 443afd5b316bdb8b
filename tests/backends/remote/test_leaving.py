"""A controller that leaves, or leaves a stream: its host hears of it, whatever either has to say then."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import anyio
import pytest
from anyio.lowlevel import checkpoint

from hotswap import Model, ModelId, Request
from hotswap.abc import Channel, ModelCard
from hotswap.backends.remote import EngineHost, RemoteEngine
from hotswap.backends.sim import SimEngine
from hotswap.backends.transports import connect_tcp, serve_tcp
from hotswap.offline.virtual_time import virtual_time
from hotswap.stream import TokenStream
from tests.backends.process.support import checked_store, sim_engine
from tests.backends.remote.support import PROFILE, over_memory, request
from tests.backends.test_sim import TestSimEngineConforms as Sim


@pytest.mark.parametrize("num_streams", [0, 1, 3])
async def test_a_controller_that_leaves_with_streams_open_is_one_that_left(
    num_streams: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with checked_store() as store, sim_engine() as behind, anyio.create_task_group() as tasks:
        await behind.load(ModelCard.of(Model("a"), await store.manifest(ModelId("a"))), store)
        port = await tasks.start(serve_tcp, EngineHost(behind, store).serve, "127.0.0.1")
        engine = RemoteEngine("e0", partial(connect_tcp, "127.0.0.1", port))
        async with engine, AsyncExitStack() as streams:
            for number in range(num_streams):
                stream = await streams.enter_async_context(engine.stream(request(number, max_tokens=400)))
                for _ in range(3):
                    await anext(stream)
        while len(caplog.records) < 1:
            await checkpoint()
        assert [record.getMessage() for record in caplog.records] == ["A link to engine 'e0' was left."]
        tasks.cancel_scope.cancel()


async def test_a_controller_that_leaves_takes_what_its_host_says_until_the_host_ends_the_link() -> None:
    ended = anyio.Event()

    async def host(channel: Channel) -> None:
        await channel.receive()
        welcome = {"abilities": [], "status": {"state": "EMPTY"}, "silence_s": 8}
        await channel.send(json.dumps([0, ["welcome", 0, welcome, 0]]).encode())
        while b"goodbye" not in (await channel.receive()).message:
            pass
        for number in range(1, 100):  # each may be refused at the earliest after another was sent
            await channel.send(json.dumps([number]).encode())
            await checkpoint()
        ended.set()

    async with anyio.create_task_group() as tasks:
        port = await tasks.start(serve_tcp, host, "127.0.0.1")
        async with RemoteEngine("e0", partial(connect_tcp, "127.0.0.1", port)):
            pass
        assert ended.is_set(), "the link was ended by the host, which could send to its end"
        tasks.cancel_scope.cancel()


class Slow(SimEngine):
    """Lets go of a request a while after its stream was left, as an engine in the middle of a step does.

    Attributes:
        num_left: How many requests there were at each call to `evict`.
    """

    def __init__(self) -> None:
        super().__init__("e0", PROFILE)
        self.num_left: list[int] = []

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[TokenStream]:
        async with super().stream(request) as tokens:
            try:
                yield tokens
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(0.05)

    async def evict(self, *, deadline_s: float) -> int:
        self.num_left.append(self.status().num_running)
        return await super().evict(deadline_s=deadline_s)


@virtual_time
async def test_what_is_asked_after_a_stream_was_left_finds_an_engine_that_has_let_it_go() -> None:
    behind, store = Slow(), Sim().make_store()
    async with store, over_memory(behind) as engine:
        await engine.load(ModelCard.of(Model("a"), await store.manifest(ModelId("a"))), store)
        async with engine.stream(request(max_tokens=400)) as tokens:
            await anext(tokens)
        await engine.evict(deadline_s=0.0)
        assert behind.num_left == [0]
        await engine.unload()
