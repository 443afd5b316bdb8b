"""A store whose blocks are in the memory of hosts behaves as every store does."""

from __future__ import annotations

import gc
import json
import logging
import weakref
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint

from hotswap.abc import CachedKV, Channel, KVPages, KVPrefix, KVStore, WrapperEngine
from hotswap.backends.fields import Fields
from hotswap.backends.kv_stores import HostKVStore, NodeKVStore, SharedKVStore
from hotswap.backends.kv_stores.arena import Arena
from hotswap.backends.kv_stores.pages import PAGE_BYTES, packed_pages, whole_pages
from hotswap.backends.remote import EngineHost, RemoteEngine, host_memory, moves, reach
from hotswap.backends.remote.kv_memory import KVMemory, MemorySink, MemorySource
from hotswap.backends.sim import SimEngine
from hotswap.backends.transports import wire
from hotswap.backends.transports.link_errors import ProtocolError, no_link
from hotswap.errors import ConfigError, HotswapError, InstanceLost, MigrationAborted, TierFull
from hotswap.testing.conformance import KVStoreConformance
from hotswap.testing.conformance.kv_store_suite import LAYOUT
from tests.backends.remote.support import PROFILE, HostStore, MemoryLinks
from tests.runtime.support import until

BLOCK = LAYOUT.block_bytes
SUITE = KVStoreConformance()


class Hosts:
    """Hosts of simulated engines, the engines as a fleet has them, and a store of their blocks."""

    def __init__(self) -> None:
        self.links: list[MemoryLinks] = []
        self.engines: list[RemoteEngine] = []
        self.store = NodeKVStore(0)

    def memory(self, at: int = 0) -> KVMemory | None:
        return self.links[at].host._verbs.kv_memory

    async def lose(self, at: int = 0) -> None:
        """Break the links of an engine, and have its fleet notice."""
        for near, _ in self.links[at].opened:
            await near.aclose()
        for ended in self.links[at].ended:
            await ended.wait()
        with pytest.raises(InstanceLost):
            await self.engines[at].evict(deadline_s=0.0)

    async def come_back(self, at: int = 0) -> None:
        """Have a new link be made, as a fleet does."""
        await self.engines[at].unload()


@asynccontextmanager
async def hosts(count: int = 1, *, blocks: int = 16, **options: Any) -> AsyncGenerator[Hosts]:
    made = Hosts()
    async with anyio.create_task_group() as tasks:
        for number in range(count):
            engine = await _entered(tasks, KeepingEngine(f"e{number}", PROFILE, node=f"n{number}"))
            made.links.append(await _entered(tasks, MemoryLinks(EngineHost(engine, HostStore()))))
            made.engines.append(await _entered(tasks, RemoteEngine(engine.id, made.links[-1].open)))
        async with NodeKVStore(blocks * BLOCK, **options) as made.store:
            yield made
        tasks.cancel_scope.cancel()


async def _entered(tasks: Any, context: Any) -> Any:
    """Enter a context in a task of its own, which leaves it when it is cancelled."""

    async def have(*, task_status: Any) -> None:
        async with context as entered:
            task_status.started(entered)
            await anyio.sleep_forever()

    return await tasks.start(have)


class Kept(CachedKV):
    """What an engine keeps of a request that has ended."""

    layout = LAYOUT

    def __init__(self, prefix: KVPrefix) -> None:
        self.prefix, self.tokens = prefix, prefix.tokens

    async def read(self, first_block: int, num_tokens: int) -> KVPages:
        await checkpoint()
        return SUITE.pages(self.prefix, first_block, num_tokens)


class KeepingEngine(SimEngine):
    kept: Sequence[Kept] = ()

    async def cached_kv(self) -> Sequence[CachedKV]:
        await checkpoint()
        return self.kept


class TestNodeKVStore(KVStoreConformance):
    """As it is used for an engine whose host has the memory."""

    @asynccontextmanager
    async def make_store(self, capacity_bytes: int) -> AsyncGenerator[KVStore]:
        async with hosts(blocks=0) as made, NodeKVStore(capacity_bytes) as store:
            yield store.near(made.engines[0])


async def test_its_local_store_alone_may_outlive_fleets(tmp_path: Path) -> None:
    async with (
        hosts(local=SharedKVStore(tmp_path / "kv", "1 MiB")) as made,
        SimEngine("here", PROFILE) as here,
    ):
        assert made.store.near(here).outlives_fleets
        assert not made.store.near(made.engines[0]).outlives_fleets


class TestPagesInSeveralMessages(TestNodeKVStore):
    @pytest.fixture(autouse=True)
    def _few_pages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host_memory, "MAX_PAYLOAD_BYTES", 24)


class TestLocalStore(KVStoreConformance):
    """As it is used for an engine that is in this process."""

    @asynccontextmanager
    async def make_store(self, capacity_bytes: int) -> AsyncGenerator[KVStore]:
        async with NodeKVStore(0, local=HostKVStore(capacity_bytes)) as store:
            yield store.near(WrapperEngine(SimEngine("e0", PROFILE)))


def test_a_local_store_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"local is '16 GiB'; give an object of type KVStore"):
        NodeKVStore("64 GiB", local="16 GiB")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- hosts that come and go


async def test_a_link_that_breaks_loses_nothing_that_was_saved() -> None:
    prefix = SUITE.prefix(18)
    async with hosts() as made:
        near = made.store.near(made.engines[0])
        await SUITE.save(near, prefix)
        await made.lose()
        assert near.lookup(prefix) == 0, "nothing of it can be had"
        with near.lease(prefix) as lease:
            assert lease.num_tokens == 0
        await made.come_back()
        await until(lambda: near.lookup(prefix) == 18)
        await SUITE.assert_content(near, prefix)


async def test_a_host_that_was_started_anew_has_nothing_and_takes_new_blocks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prefix = SUITE.prefix(18)
    async with hosts() as made:
        near = made.store.near(made.engines[0])
        await SUITE.save(near, prefix)
        lease = near.lease(prefix)
        await made.lose()
        links = made.links[0]
        links.host = EngineHost(links.host.engine, HostStore())
        await made.come_back()
        assert near.lookup(prefix) == 0
        with caplog.at_level(logging.WARNING, "hotswap.stores"):
            await until(lambda: "started anew" in caplog.text)
        with pytest.raises(HotswapError, match="lost what it kept"):
            await lease.read(0, 4)
        lease.release()
        again = made.store.near(made.engines[0])
        assert again.lookup(prefix) == 0
        await SUITE.save(again, prefix)
        await SUITE.assert_content(again, prefix)
        view = made.store.view()
        assert (view.num_leases, view.used_bytes) == (0, 5 * BLOCK)


async def test_a_host_gives_the_memory_back_when_the_engine_is_left() -> None:
    async with anyio.create_task_group() as tasks:
        engine = await _entered(tasks, SimEngine("e0", PROFILE))
        links = await _entered(tasks, MemoryLinks(EngineHost(engine, HostStore())))
        async with NodeKVStore(16 * BLOCK) as store:
            async with RemoteEngine("e0", links.open) as remote:
                await SUITE.save(store.near(remote), SUITE.prefix(18))
                memory = links.host._verbs.kv_memory
                assert memory is not None
                assert memory._arena._memory is not None
            for ended in links.ended:
                await ended.wait()
            assert links.host._verbs.kv_memory is None
            assert memory._arena._memory is None, "and what was pinned for it"
            assert store.lookup(SUITE.prefix(18)) == 0
            async with RemoteEngine("e0", links.open) as remote:
                assert store.near(remote).lookup(SUITE.prefix(18)) == 0
                assert store.view().models == ()
        tasks.cancel_scope.cancel()


async def test_another_controller_has_the_memory_given_back_though_it_has_no_store() -> None:
    async with hosts() as made:
        await SUITE.save(made.store.near(made.engines[0]), SUITE.prefix(18))
        assert made.memory() is not None
        async with RemoteEngine("e0", made.links[0].open):
            assert made.memory() is None


async def test_memory_that_makes_way_for_other_memory_is_not_held_by_loans() -> None:
    """Nor taken ahead any more; else a host would have memory for each name that it was told."""
    async with hosts() as made:
        engine: Any = made.engines[0]
        arenas = list[weakref.ref[Arena]]()
        async with anyio.create_task_group() as tasks:

            async def hold(name: str) -> None:
                async with engine.lend_memory(
                    name,
                    LAYOUT,
                    memoryview(b""),
                    is_sink=True,
                    first_block=0,
                    num_tokens=0,
                    has_states=False,
                ):
                    await anyio.sleep_forever()

            for number in range(4):
                assert not await engine.open_memory(f"m{number}", 4 * BLOCK)
                memory = made.memory()
                assert memory is not None
                arenas.append(weakref.ref(memory._arena))
                del memory
                tasks.start_soon(hold, f"m{number}")
                await until(lambda: len(made.links[0].host._verbs.lent._by_key) == 1)
            gc.collect()
            await until(lambda: [arena() is None for arena in arenas] == [True, True, True, False])
            tasks.cancel_scope.cancel()


async def test_a_host_without_so_much_memory_is_asked_once_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_memory(memory: KVMemory, id: str, capacity_bytes: int) -> None:
        raise TierFull("The host has no 64 bytes of memory.")

    prefix = SUITE.prefix(18)
    async with hosts(2) as made:
        one, other = map(made.store.near, made.engines)
        await SUITE.save(other, prefix)
        monkeypatch.setattr(KVMemory, "__init__", open_memory)
        with one.put(prefix) as put, one.put(prefix) as another:
            for each in (put, another):
                with pytest.raises(TierFull):
                    await each.write(SUITE.pages(prefix, 0, 8))
        assert one.put(prefix).num_tokens == 0
        assert caplog.text.count("are not saved") == 1
        await SUITE.assert_content(one, prefix)
        await SUITE.assert_content(other, prefix)


async def test_more_memory_than_a_machine_has_is_refused() -> None:
    with pytest.raises(TierFull, match="smaller capacity"):
        KVMemory("m", 1 << 61)


# ---------------------------------------------------------------------- several hosts


async def test_the_longest_beginning_is_leased_and_of_equal_ones_the_near_one() -> None:
    short, long = SUITE.prefix(8), SUITE.prefix(18)
    async with hosts(2, local=HostKVStore(16 * BLOCK)) as made:
        one, other = map(made.store.near, made.engines)
        here = made.store.near(SimEngine("here", PROFILE))
        await SUITE.save(one, short)
        await SUITE.save(other, long)
        await SUITE.save(here, short)
        for near in (one, other, here):
            assert near.lookup(long) == 18
            await SUITE.assert_content(near, long)
        assert {(stored.node, stored.num_blocks) for stored in made.store.view().models} == {
            ("n0", 2),
            ("n1", 5),
            ("", 2),
        }
        await made.lose(1)
        for near in (one, here):
            assert near.lookup(long) == 8
        with one.lease(short), here.lease(short):
            opened = {engine.id: store.view().num_leases for engine, store in made.store._hosts.items()}
            assert opened == {"e0": 1, "e1": 0}, "each its own"


async def test_what_an_engine_kept_is_copied_at_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = SUITE.prefix(18)
    async with hosts() as made:
        behind: Any = made.links[0].host.engine
        behind.kept = [Kept(prefix)]
        remote: Any = made.engines[0]
        near = made.store.near(remote)
        (cached,) = await remote.cached_kv()
        with near.put(prefix) as put:
            async with put.copying_from(cached) as copy:
                assert await copy(0, 8) == 2 * BLOCK
                assert near.lookup(prefix) == 8, "it is found at once"
                with pytest.raises(ValueError, match="do not follow"):
                    await copy(4, 2)
                assert await copy(2, 10) == 3 * BLOCK
        assert len(made.links[0].opened) == 1, "a link for blocks was opened"
        await SUITE.assert_content(near, prefix)


class Unreached:
    """Has a host that others do not reach."""

    def __init__(self, number: int, links: Sequence[MemoryLinks]) -> None:
        self.address, self.num_tried, self.is_mended = f"n{number}", 0, False
        self._links = {f"n{at}": each for at, each in enumerate(links)}

    async def connect(self, address: str) -> Channel:
        self.num_tried += 1
        if self.is_mended:
            return await self._links[address].open()
        await checkpoint()
        raise no_link(address, "it has another secret")


async def test_blocks_go_through_the_fleet_where_hosts_that_should_reach_each_other_do_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    later_s = 0.0
    monkeypatch.setattr(reach, "current_time", lambda: anyio.current_time() + later_s)
    prefix = SUITE.prefix(18)
    async with hosts(2) as made:
        peers = [Unreached(number, made.links) for number in range(2)]
        for links, each in zip(made.links, peers, strict=True):
            links.host.peers = each
        await SUITE.save(made.store.near(made.engines[0]), prefix)
        far: Any = made.engines[1]
        await far.open_memory("m", 16 * BLOCK)
        pages = packed_pages([np.arange(5 * whole_pages(BLOCK) // PAGE_BYTES)])
        where: dict[str, Any] = {"first_block": 0, "num_tokens": 18, "has_states": False}

        async def copied() -> int:
            """Copy blocks to the other host; return how often its own one has tried to reach it."""
            async with far.lend_memory("m", LAYOUT, pages, is_sink=True, **where) as lent:
                with made.store.lease(prefix) as lease:
                    async with lease.copying_to(lent.sink) as copy:
                        assert await copy(0, 8) == 2 * BLOCK
                        assert await copy(2, 10) == 3 * BLOCK
            async with far.lend_memory("m", LAYOUT, pages, is_sink=False, **where) as lent:
                assert (await lent.source.read(0, 18)).data == SUITE.pages(prefix, 0, 18).data
            return peers[0].num_tried

        assert [await copied(), await copied()] == [1, 1]
        later_s = 61.0
        assert [await copied(), await copied()] == [2, 2]
        later_s = 2 * 61.0  # it waits for twice as long now
        assert await copied() == 2
        later_s, peers[0].is_mended = 3 * 61.0, True
        assert await copied() == 3
        peers[0].is_mended = False
        assert await copied() == 4, "it was not tried, though it had worked"
        later_s += 61.0
        assert await copied() == 5, "its earlier failures counted"
        assert peers[1].num_tried == 0
        assert caplog.text.count("another secret") == 4


# ---------------------------------------------------------------------- copies that do not end


class SlowArena:
    """Has copies to the memory of hosts wait for a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on, self.num_ended = anyio.Event(), anyio.Event(), 0
        fill = Arena.fill

        async def slowly(arena: Arena, blocks: Any, data: memoryview) -> None:
            self.begun.set()
            with anyio.CancelScope(shield=True):  # as a thread that copies
                await self.go_on.wait()
                await fill(arena, blocks, data)
            self.num_ended += 1

        monkeypatch.setattr(Arena, "fill", slowly)


async def test_a_cancelled_save_ends_once_the_host_copies_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or pages that others have by then would be overwritten, and requests get wrong tokens."""
    prefix, other = SUITE.prefix(8), SUITE.prefix(0, then=range(500, 516))
    async with hosts(blocks=4) as made:
        near = made.store.near(made.engines[0])
        await SUITE.save(near, SUITE.prefix(4))
        slow = SlowArena(monkeypatch)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(SUITE.save, near, prefix)
            await slow.begun.wait()
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                for _ in range(50):
                    await checkpoint()
                with near.put(other) as put:
                    assert put.num_tokens < 16, "its pages are given to others"
                slow.go_on.set()
        assert slow.num_ended == 1
        await SUITE.save(near, other)
        await SUITE.assert_content(near, other)


async def test_a_host_that_does_not_say_that_it_copies_nothing_more_gets_new_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefix, other = SUITE.prefix(8), SUITE.prefix(0, then=range(500, 516))
    async with hosts(blocks=4) as made:
        near, old = made.store.near(made.engines[0]), made.memory()
        await SUITE.save(near, SUITE.prefix(4))
        monkeypatch.setattr(moves, "_LEAVE_S", 0.001)
        slow = SlowArena(monkeypatch)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(SUITE.save, near, prefix)
            await slow.begun.wait()
            tasks.cancel_scope.cancel()
        assert "copies nothing more" in caplog.text
        assert near.lookup(SUITE.prefix(4)) == 0
        monkeypatch.undo()
        near = made.store.near(made.engines[0])
        slow.go_on.set()
        await SUITE.save(near, other)
        await SUITE.assert_content(near, other)
        assert made.memory() is not old


# ---------------------------------------------------------------------- what a controller may send


def lent(pages: Sequence[int], *, is_sink: bool, cut: int = 0, **wrong: object) -> MemorySink | MemorySource:
    """What memory of ten pages lends for blocks 2 and 3, of a page each, and states of a page."""
    layout = wire.layout_fields(LAYOUT) | {"block_bytes": 4000, "state_bytes": 100}
    layout |= {name: wrong.pop(name) for name in ("block_bytes", "state_bytes") if name in wrong}
    told = {"first_block": 2, "num_tokens": 15, "has_states": True, "is_sink": is_sink, "layout": layout}
    fields = Fields(json.loads(wire.encoded(told | wrong)), "a message")
    payload = bytes(wire.pack_tokens(pages))
    return KVMemory("m", 10 * PAGE_BYTES).lend(fields, payload[: len(payload) - cut])


@pytest.mark.parametrize(
    ("pages", "wrong"),
    [
        ((3, 4, 10), {}),
        ((-1, 4, 5), {}),
        ((3, 4, 5, 6), {}),
        ((3, 4, 5), {"cut": 3}),
        ((3, 4, 5), {"has_states": 1}),
        ((3, 4, 5), {"first_block": -1}),
        ((3, 4, 5), {"layout": {}}),
        ((3, 4, 5), {"first_block": 3}),
        ((3, 4, 5), {"num_tokens": 1 << 61}),
        ((), {"first_block": 9, "block_bytes": 1 << 60}),
        ((), {"has_states": False, "state_bytes": 1 << 60}),
    ],
)
def test_pages_that_are_not_there_or_too_many_break_the_link(pages: Sequence[int], wrong: Any) -> None:
    with pytest.raises(ProtocolError):
        lent(pages, is_sink=True, **wrong)


async def test_pages_are_written_and_read_where_they_were_named() -> None:
    memory, data = (
        lent((8, 3, 5), is_sink=True),
        memoryview(bytearray(b"a" * 4000 + b"b" * 4000 + b"s" * 100)),
    )
    await _fill(memory, 2, 7, data)
    arena = memory.blocks._arena
    assert {page: bytes(arena._pages[page][:1]) for page in range(10) if arena._pages[page].any()} == {
        8: b"a",
        3: b"b",
        5: b"s",
    }
    source = MemorySource(memory.blocks)
    assert (await source.read(2, 7)).data == data
    assert (await source.read(3, 3)).data == data[4000:]
    assert (await source.read(2, 4)).data == data[:4000]


async def test_blocks_without_bytes_take_no_memory_however_many_they_are() -> None:
    memory = lent((5,), is_sink=True, block_bytes=0, first_block=0, num_tokens=1 << 61)
    await _fill(memory, 0, 1 << 61, memoryview(bytearray(b"s" * 100)))
    assert (await MemorySource(memory.blocks).read(0, 1 << 61)).data == b"s" * 100
    assert not (await MemorySource(memory.blocks).read(0, 1 << 60)).data


@pytest.mark.parametrize(
    ("named", "first_block", "num_tokens", "size"),
    [
        (3, 1, 4, 4000),
        (3, 0, 4, 4000),
        (3, 4, 1, 4000),
        (3, 2, 9, 12_000),
        (1, 2, 7, 8000),
        (2, 2, 7, 8100),
        (3, 2, 4, 4001),
        (3, 2, 4, 4100),
        (3, 2, 7, 8099),
        (3, 2, 7, 0),
    ],
)
async def test_a_copy_of_what_was_not_lent_is_refused_and_copies_nothing(
    named: int, first_block: int, num_tokens: int, size: int
) -> None:
    memory = lent((8, 3, 5)[:named], is_sink=True)
    with pytest.raises(MigrationAborted):
        await _fill(memory, first_block, num_tokens, memoryview(bytearray(b"x" * size)))
    assert not memory.blocks._arena._pages.any()
    if size in (4000, 8000, 8100, 12_000):
        with pytest.raises(MigrationAborted):
            await MemorySource(memory.blocks).read(first_block, num_tokens)


async def _fill(end: MemorySink | MemorySource, first_block: int, num_tokens: int, data: memoryview) -> None:
    assert isinstance(end, MemorySink)
    await end.write(KVPages(first_block, num_tokens, data))
