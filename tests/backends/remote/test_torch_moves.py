"""Requests move between hosts of torch engines over TCP, with their KV blocks, and go on token for token."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import anyio
import pytest

from hotswap import Fleet, MigrationRecord, Model, Request, RequestId, Sampling
from hotswap import telemetry as tm
from hotswap.abc import Channel, Engine, KVStore
from hotswap.backends.kv_stores import HostKVStore, NodeKVStore
from hotswap.backends.remote import EngineHost, RemoteEngine, TcpPeers
from hotswap.backends.torch import SkeletonCache, TorchEngine
from hotswap.backends.transports import LinkSecret, connect_tcp, serve_tcp
from hotswap.policies import LeastLoadedRouter
from hotswap.testing import SpanRecorder
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import make_model
from tests.runtime.support import Idle

KIND = "llama"
SECRET, OTHER = LinkSecret(b"the secret of these hosts, long enough"), LinkSecret(b"another one, long enough")
PROMPT = tuple(range(2, 302))
SAMPLING = Sampling(max_tokens=80, ignore_eos=True, temperature=0.8, top_k=40, seed=5)


@pytest.fixture(scope="module")
def store() -> DictStore:
    store = DictStore()
    store.add(KIND, make_model(KIND))
    return store


@pytest.fixture(scope="module")
def skeletons() -> SkeletonCache:
    return SkeletonCache()


def make_engine(name: str, skeletons: SkeletonCache) -> TorchEngine:
    return TorchEngine(
        name, kv_tokens=2048, memory_bytes="64 MiB", threads=1, max_requests=8, skeletons=skeletons
    )


@dataclass
class Counted:
    """Opens links, and counts the bytes of payloads that this process sends and receives over them."""

    port: int
    num_bytes: int = 0

    async def open(self) -> Channel:
        channel = await connect_tcp("127.0.0.1", self.port, secret=SECRET)
        send, receive = channel.send, channel.receive

        async def counted_send(message: bytes, payload: memoryview | None = None) -> None:
            self.num_bytes += len(payload or b"")
            await send(message, payload)

        async def counted_receive(**limits: int | None) -> object:
            frame = await receive(**limits)
            self.num_bytes += len(frame.payload)
            return frame

        vars(channel).update(send=counted_send, receive=counted_receive)
        return channel


@asynccontextmanager
async def fleet_of_hosts(
    store: DictStore,
    skeletons: SkeletonCache,
    *,
    num_remote: int = 2,
    peer_secret: LinkSecret = SECRET,
    spans: SpanRecorder | None = None,
    kv_store: KVStore | None = None,
) -> AsyncGenerator[tuple[Fleet, list[Counted]]]:
    """A fleet of two engines, of which some are remote, all serving the model."""
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        engines, links = list[Engine](), list[Counted]()
        for name in ("e0", "e1"):
            engine = make_engine(name, skeletons)
            if len(engines) < num_remote:
                host = EngineHost(await stack.enter_async_context(engine), store)
                port = await tasks.start(partial(serve_tcp, secret=SECRET), host.serve, "127.0.0.1")
                host.peers = TcpPeers("127.0.0.1", port, secret=peer_secret)
                links.append(Counted(port))
                engines.append(RemoteEngine(name, links[-1].open, node=f"node of {name}"))
            else:
                engines.append(engine)
        fleet = await stack.enter_async_context(
            Fleet(
                engines=engines,
                store=store,
                models=[Model(KIND)],
                router=LeastLoadedRouter(),
                scheduler=Idle(),
                tracer_provider=None if spans is None else spans.tracer_provider,
                kv_store=kv_store,
            )
        )
        for name in ("e0", "e1"):
            await fleet.swap(name, to=KIND)
        yield fleet, links


async def undisturbed(store: DictStore, skeletons: SkeletonCache) -> list[int]:
    request = Request(id=RequestId("r"), model=store.card(KIND).id, prompt=PROMPT, sampling=SAMPLING)
    async with make_engine("oracle", skeletons) as engine:
        await engine.load(store.card(KIND), store)
        async with engine.stream(request) as tokens:
            return [token.id for token in await tokens.collect()]


@pytest.mark.parametrize("num_remote", [1, 2])
async def test_a_request_moves_there_and_back_and_nothing_is_computed_again(
    store: DictStore, skeletons: SkeletonCache, num_remote: int
) -> None:
    read, records, spans = list[int](), list[MigrationRecord](), SpanRecorder()
    async with (
        fleet_of_hosts(store, skeletons, num_remote=num_remote, spans=spans) as (fleet, links),
        fleet.stream(KIND, PROMPT, SAMPLING) as stream,
    ):
        async for token in stream:
            read.append(token.id)
            if len(read) in (5, 30):
                to = "e1" if stream.hops[-1].instance == "e0" else "e0"
                records.append(await fleet.migrate(stream.request.id, to=to, method="kv"))
    hops = spans.named("hotswap.hop")
    assert read == await undisturbed(store, skeletons)
    assert [record.outcome for record in records] == ["done", "done"]
    for record, hop in zip(records, hops[1:], strict=True):
        assert hop.attributes[tm.REUSED_TOKENS] == record.num_tokens - 1, "something was computed again"
        assert record.copied_bytes > 0
    if num_remote == 2:
        copied = sum(record.copied_bytes for record in records)
        assert sum(link.num_bytes for link in links) < copied / 4, "blocks passed through the controller"


async def test_hosts_of_different_secrets_move_a_request_as_tokens(
    store: DictStore, skeletons: SkeletonCache
) -> None:
    async with (
        fleet_of_hosts(store, skeletons, peer_secret=OTHER) as (fleet, _),
        fleet.stream(KIND, PROMPT, SAMPLING) as stream,
    ):
        read = [(await anext(stream)).id for _ in range(5)]
        to = "e1" if stream.hops[-1].instance == "e0" else "e0"
        aborted = await fleet.migrate(stream.request.id, to=to, method="kv")
        assert (aborted.outcome, "secret" in aborted.error) == ("aborted", True)
        assert (await fleet.migrate(stream.request.id, to=to)).outcome == "done"
        read += [token.id for token in await stream.collect()]
    assert read == await undisturbed(store, skeletons)


async def test_blocks_are_saved_from_a_host_and_restored_on_another(
    store: DictStore, skeletons: SkeletonCache
) -> None:
    """Through the controller, whose memory keeps them."""
    async with fleet_of_hosts(store, skeletons, kv_store=HostKVStore("16 MiB")) as (fleet, _):
        async with fleet.stream(KIND, PROMPT, SAMPLING) as stream:
            read = [(await anext(stream)).id for _ in range(5)]
            record = await fleet.unload(stream.hops[0].instance)
            read += [token.id for token in await stream.collect()]
        assert record.num_saved == 1
        assert stream.hops[1].restored_tokens >= len(PROMPT)
    assert read == await undisturbed(store, skeletons)


@pytest.mark.parametrize("comes_back", [True, False], ids=["on its host", "on another host"])
async def test_blocks_stay_with_hosts_and_go_from_one_to_the_other(
    store: DictStore, skeletons: SkeletonCache, comes_back: bool
) -> None:
    async with fleet_of_hosts(store, skeletons, kv_store=NodeKVStore("16 MiB")) as (fleet, links):
        async with fleet.stream(KIND, PROMPT, SAMPLING) as stream:
            read = [(await anext(stream)).id for _ in range(5)]
            was_on = stream.hops[0].instance
            other = "e1" if was_on == "e0" else "e0"
            before = sum(link.num_bytes for link in links)
            if comes_back:
                await fleet.unload(other)
            record = await fleet.unload(was_on)
            if comes_back:
                (waiting,) = fleet.view().waiting
                assert waiting.stored_tokens >= len(PROMPT)
                assert waiting.stored_node == f"node of {was_on}"
                await fleet.swap(was_on, to=KIND)
            read += [token.id for token in await stream.collect()]
            passed = sum(link.num_bytes for link in links) - before
        assert stream.hops[1].instance == (was_on if comes_back else other)
        assert record.num_saved == 1
        assert stream.hops[1].restored_tokens >= len(PROMPT)
        view = fleet.view().kv_store
        assert view is not None
        assert view.num_leases == 0
    assert read == await undisturbed(store, skeletons)
    assert passed < record.saved_bytes / 4, "blocks passed through the fleet's process"
