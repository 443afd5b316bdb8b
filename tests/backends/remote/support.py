"""Remote engines and their hosts in one process, over links of every kind."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import anyio

from hotswap import InstanceState, Model, ModelId, Request, RequestId, Sampling
from hotswap.abc import Channel, Engine, Frame, ModelCard, WeightStore, WrapperStore
from hotswap.backends.remote import EngineHost, RemoteEngine
from hotswap.backends.sim import DeviceProfile, SimEngine, SimStore, expected_tokens
from hotswap.backends.transports import LinkOpener, connect_tcp, memory_channels, serve_tcp

__all__ = [
    "HandingEngine",
    "HostStore",
    "MemoryLinks",
    "Plan",
    "Rig",
    "TamperedChannel",
    "expected",
    "over_memory",
    "over_tcp",
    "request",
    "rig",
]

Plan: TypeAlias = dict[int, list[tuple[bytes, bytes]]]
"""By the number of a frame, the frames that are sent in its place."""
Plans: TypeAlias = tuple[Plan, Plan]

PROFILE = DeviceProfile(memory_bytes=1 << 20, floor_s=0.05)  # 20 tokens a second


class HostStore(WrapperStore):
    """The store of a host; a test says what it wraps, so that loads can fail or wait."""

    def __init__(self, store: WeightStore | None = None) -> None:
        if store is not None:
            super().__init__(store)


class HandingEngine(RemoteEngine):
    """Hands the stores that it is given to its host, which is in the same process here.

    Attributes:
        engine: The host's engine.
    """

    def __init__(self, open_link: LinkOpener, engine: Engine, store: HostStore, **options: Any) -> None:
        super().__init__(engine.id, open_link, **options)
        self.engine, self._host_store = engine, store

    async def load(self, model: ModelCard, store: WeightStore) -> None:
        self._host_store.wrapped = store
        await super().load(model, store)

    async def preload(self, model: ModelCard, store: WeightStore) -> None:
        self._host_store.wrapped = store
        ability: Any = super()
        await ability.preload(model, store)


@asynccontextmanager
async def over_memory(engine: Engine, **options: Any) -> AsyncGenerator[HandingEngine]:
    """A remote engine whose links are in memory, so that it can run in virtual time."""
    store = HostStore()
    async with (
        engine,
        MemoryLinks(EngineHost(engine, store)) as links,
        HandingEngine(links.open, engine, store, **options) as remote,
    ):
        yield remote


@asynccontextmanager
async def over_tcp(engine: Engine, **options: Any) -> AsyncGenerator[HandingEngine]:
    """A remote engine over TCP."""
    store = HostStore()
    async with engine, anyio.create_task_group() as tasks:
        port = await tasks.start(serve_tcp, EngineHost(engine, store).serve, "127.0.0.1")
        async with HandingEngine(partial(connect_tcp, "127.0.0.1", port), engine, store, **options) as remote:
            yield remote
        tasks.cancel_scope.cancel()


class TamperedChannel(Channel):
    """A channel whose frames a test can hold back, and change on their way out.

    Attributes:
        frames: All that were given to it.
        is_frozen: Whether it swallows frames.
        plan: What is sent in the place of some.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.max_message_bytes, self.max_payload_bytes = channel.max_message_bytes, channel.max_payload_bytes
        self.frames: list[tuple[bytes, bytes]] = []
        self.is_frozen = False
        self.plan: Plan = {}

    async def send(self, message: bytes, payload: memoryview | None = None) -> None:
        frame = (message, bytes(payload or b""))
        self.frames.append(frame)
        if not self.is_frozen:
            for told, data in self.plan.get(len(self.frames) - 1, [frame]):
                await self.channel.send(told, memoryview(data))

    async def receive(
        self, *, max_message_bytes: int | None = None, max_payload_bytes: int | None = None
    ) -> Frame:
        return await self.channel.receive(
            max_message_bytes=max_message_bytes, max_payload_bytes=max_payload_bytes
        )

    async def aclose(self) -> None:
        await self.channel.aclose()


class MemoryLinks:
    """Links in memory to a host, which serves them while the block runs.

    Attributes:
        opened: Both ends of each: the controller's and the host's.
        ended: Of each, set once the host has served it to its end.
        plans: What to tamper with on the links to come: plans of the controller's end and the host's.
        is_down: Whether no link can be opened.
    """

    def __init__(self, host: EngineHost) -> None:
        self.host = host
        self.opened: list[tuple[TamperedChannel, TamperedChannel]] = []
        self.ended: list[anyio.Event] = []
        self.plans: list[Plans] = []
        self.is_down = False

    async def __aenter__(self) -> MemoryLinks:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._tasks.__aexit__(*error)

    async def open(self) -> Channel:
        """Open a link."""
        if self.is_down:
            raise OSError("the host is down")
        near, far = map(TamperedChannel, memory_channels())
        if self.plans:
            near.plan, far.plan = self.plans.pop(0)
        self.opened.append((near, far))
        self.ended.append(ended := anyio.Event())
        self._tasks.start_soon(self._serve, far, ended)
        return near

    async def _serve(self, channel: Channel, ended: anyio.Event) -> None:
        await self.host.serve(channel)
        ended.set()


class Rig:
    """A simulated engine, its host, and a controller of it.

    Attributes:
        engine: The controller's.
        behind: The host's.
        links: All links.
        store: Of the controller.
        host_store: Of the host, which wraps it.
        card: The model "a" of the store.
        other_card: The model "b".
    """

    def __init__(
        self,
        engine: RemoteEngine,
        behind: SimEngine,
        links: MemoryLinks,
        store: SimStore,
        host_store: HostStore,
        cards: tuple[ModelCard, ModelCard],
    ) -> None:
        self.engine, self.behind, self.links = engine, behind, links
        self.store, self.host_store = store, host_store
        self.card, self.other_card = cards

    def assert_released(self) -> None:
        """Raise if the host's engine has requests, or KV blocks of any."""
        status = self.behind.status()
        assert status.num_running == status.num_waiting == 0, f"requests are left over: {status}"
        assert status.num_free_kv_blocks == status.num_kv_blocks, f"KV blocks are left over: {status}"


@asynccontextmanager
async def rig(plans: Plans = ({}, {}), *, host_silence_s: float = 8.0, **options: Any) -> AsyncGenerator[Rig]:
    """A rig in virtual time, whose engine is EMPTY; `plans` are for its first link."""
    store = SimStore({"a": 100_000, "b": 60_000}, chunk_bytes=30_000)
    behind = SimEngine("e0", PROFILE, kv_blocks=160, kv_block_tokens=4, max_requests=64, vocabulary=500)
    host_store = HostStore(store)
    host = EngineHost(behind, host_store, silence_s=host_silence_s)
    async with store, behind, MemoryLinks(host) as links:
        links.plans.append(plans)
        models = [ModelCard.of(Model(id), await store.manifest(ModelId(id))) for id in ("a", "b")]
        async with RemoteEngine("e0", links.open, epoch=1, **options) as engine:
            yield Rig(engine, behind, links, store, host_store, (models[0], models[1]))
        for ended in links.ended:
            await ended.wait()
    assert behind.status().state is InstanceState.EMPTY


def request(number: int = 0, *, max_tokens: int = 50, **sampling: Any) -> Request:
    """A request of the model "a"."""
    return Request(
        id=RequestId(f"r{number}"),
        model=ModelId("a"),
        prompt=(1, 2, 3, number + 1),
        sampling=Sampling(max_tokens=max_tokens, ignore_eos=True, **sampling),
    )


def expected(of: Request, card: ModelCard) -> list[int]:
    """What the engine of a rig generates for a request that nothing disturbs."""
    return expected_tokens(of, card, vocabulary=500)
