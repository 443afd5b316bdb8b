"""Torch engines of hosts keep KV blocks there: under chaos requests get the tokens of an undisturbed run."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from random import Random

import anyio
import pytest

from hotswap import Fleet
from hotswap.abc import Engine
from hotswap.backends.kv_stores import HostKVStore, NodeKVStore
from hotswap.backends.remote import EngineHost, RemoteEngine, TcpPeers
from hotswap.backends.torch import TorchEngine
from hotswap.backends.transports import LinkSecret, connect_tcp, serve_tcp
from tests.backends.transports.certificates import contexts
from tests.runtime.offloaded import (
    BLOCK_BYTES,
    PROMPTS,
    Client,
    disturb,
    ensure,
    make_engine,
    make_fleet,
    make_store,
    settle,
    undisturbed,
)

STORE = make_store()
SECRET = LinkSecret(b"the secret of these tests, 32 bytes and more")


@asynccontextmanager
async def fleet_of(
    engines: Sequence[TorchEngine], kv_store: NodeKVStore, *, num_remote: int
) -> AsyncGenerator[Fleet]:
    """A fleet of engines; the first are behind hosts that reach each other, over TLS with a secret."""
    server, client = contexts()
    connect = partial(connect_tcp, secret=SECRET, ssl_context=client)
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        used = list[Engine]()
        for engine in engines[:num_remote]:
            host = EngineHost(await stack.enter_async_context(engine), STORE)
            serve = partial(serve_tcp, secret=SECRET, ssl_context=server)
            port = await tasks.start(serve, host.serve, "127.0.0.1")
            host.peers = TcpPeers("127.0.0.1", port, secret=SECRET, ssl_context=client)
            used.append(RemoteEngine(engine.id, partial(connect, "127.0.0.1", port)))
        used += engines[num_remote:]
        yield await stack.enter_async_context(make_fleet(STORE, kv_store, used))


def all_given_back(fleet: Fleet) -> None:
    view = fleet.view().kv_store
    assert view is not None
    assert view.num_leases == 0
    assert view.used_bytes == sum(model.size_bytes for model in view.models)


@pytest.mark.parametrize("budget", [1 << 24, 20 * BLOCK_BYTES, 0], ids=["roomy", "20 blocks", "nothing"])
async def test_tokens_are_those_of_an_undisturbed_run(budget: int) -> None:
    engine = make_engine("e0")
    clients = [Client(number) for number in range(len(PROMPTS))]
    async with fleet_of([engine], NodeKVStore(budget), num_remote=1) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as tasks:
            for client in clients:
                tasks.start_soon(client.run, fleet)
            for turn in range(3):
                for client in clients:
                    await client.has(1 if not turn else 9 * turn)
                await fleet.swap("e0", to="b", deadline_s=0.01 * turn)
                await fleet.swap("e0", to="a")
        await settle([engine])
        all_given_back(fleet)
    assert [client.tokens for client in clients] == await undisturbed(STORE)
    num_restored = sum(client.num_restored for client in clients)
    if budget == 1 << 24:
        assert num_restored > 500
    if not budget:
        assert num_restored == 0


@pytest.mark.slow
@pytest.mark.parametrize("num_remote", [2, 1], ids=["two hosts", "one host"])
async def test_random_swaps_losses_and_budgets_lose_no_token(
    num_remote: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Two engines save and restore at once, each with memory for 1.2 times one request."""
    random, seen = Random(1), Counter[str]()
    engines = [make_engine("e0", 1024), make_engine("e1", 1024)]
    clients = [Client(number % len(PROMPTS)) for number in range(24)]
    size_bytes = round(1.2 * 9 * BLOCK_BYTES)
    kv_store = NodeKVStore(size_bytes, local=HostKVStore(size_bytes))
    async with fleet_of(engines, kv_store, num_remote=num_remote) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as tasks:
            for client in clients:
                tasks.start_soon(client.run, fleet)
            async with anyio.create_task_group() as others:
                for engine in engines:
                    others.start_soon(disturb, fleet, engine, Random(random.random()), clients, seen)
            await ensure(fleet, engines[0])
        await settle(engines)
        all_given_back(fleet)
    whole = await undisturbed(STORE)
    assert [client.tokens for client in clients] == [whole[number % len(PROMPTS)] for number in range(24)]
    assert seen["swaps"] > 5
    assert any(client.num_restored for client in clients)
    assert "does not reach" not in caplog.text
