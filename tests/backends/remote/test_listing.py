"""What the engine of a host keeps of ended requests is listed, read over links of its own, and saved."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from hotswap import Fleet, Model, Sampling
from hotswap.abc import CachedKV, KVLayout, KVPages, KVStore, SupportsKVListing
from hotswap.backends.kv_stores import HostKVStore, NodeKVStore
from hotswap.backends.remote import EngineHost, RemoteEngine, listing
from hotswap.backends.remote.listing import listed
from hotswap.backends.remote.pages import PageLink
from hotswap.backends.sim import SimEngine
from hotswap.backends.torch import TorchEngine
from hotswap.backends.transports import connect_tcp, serve_tcp
from hotswap.errors import InstanceLost, MigrationAborted
from hotswap.policies import LeastLoadedRouter
from tests.backends.remote.support import PROFILE, HostStore, MemoryLinks, over_memory
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import make_model
from tests.backends.transports.recording import LAYOUT
from tests.runtime.support import Idle, until

BLOCK = LAYOUT.block_tokens


@dataclass(eq=False)
class Kept(CachedKV):
    """Blocks whose bytes are the numbers of the block and of the prefix."""

    number: int
    tokens: tuple[int, ...]
    layout: KVLayout = LAYOUT

    async def read(self, first_block: int, num_tokens: int) -> KVPages:
        await checkpoint()
        if self.number < 0:
            raise MigrationAborted("Its blocks were used for others.", stage="copy")
        blocks = range(first_block, first_block + -(-num_tokens // BLOCK))
        data = b"".join(bytes([block, self.number]) * (LAYOUT.block_bytes // 2) for block in blocks)
        return KVPages(first_block, num_tokens, memoryview(bytearray(data)))


class KeepingEngine(SimEngine):
    kept: Sequence[Kept] = ()

    async def cached_kv(self) -> Sequence[CachedKV]:
        await checkpoint()
        return self.kept


def kept(*lengths: int) -> list[Kept]:
    return [Kept(number, tuple(range(number, number + length))) for number, length in enumerate(lengths)]


@asynccontextmanager
async def remote(entries: Sequence[Kept], **options: Any) -> AsyncGenerator[Any]:
    engine = KeepingEngine("e0", PROFILE)
    engine.kept = entries
    async with over_memory(engine, **options) as remote:
        assert isinstance(remote, SupportsKVListing)
        yield remote


async def test_entries_are_told_and_read_one_after_another() -> None:
    entries = kept(2 * BLOCK, 5 * BLOCK)
    async with remote(entries) as engine:
        told = await engine.cached_kv()
        assert [(one.layout, one.tokens) for one in told] == [(one.layout, one.tokens) for one in entries]
        for number in (1, 0, 1):
            for first, count in ((0, 2), (1, 1)):
                pages = await told[number].read(first, count * BLOCK)
                expected = await entries[number].read(first, count * BLOCK)
                assert (pages.first_block, pages.num_tokens) == (first, count * BLOCK)
                assert pages.data == expected.data


async def test_a_host_forgets_a_listing_when_its_controller_leaves() -> None:
    engine = KeepingEngine("e0", PROFILE)
    engine.kept = kept(BLOCK)
    host = EngineHost(engine, HostStore())
    async with engine, MemoryLinks(host) as links:
        async with RemoteEngine("e0", links.open) as remote:
            assert isinstance(remote, SupportsKVListing)
            await remote.cached_kv()
            assert host._verbs.lent._by_key
        await links.ended[0].wait()
        assert not host._verbs.lent._by_key


async def test_what_is_not_there_any_more_is_an_abort_and_the_rest_is_read() -> None:
    entries = kept(BLOCK, BLOCK)
    entries[0].number = -1
    async with remote(entries) as engine:
        gone, there = await engine.cached_kv()
        with pytest.raises(MigrationAborted, match="used for others"):
            await gone.read(0, BLOCK)
        assert (await there.read(0, BLOCK)).data == (await entries[1].read(0, BLOCK)).data


async def test_the_latest_are_told_up_to_a_limit() -> None:
    most = listing._MOST_TOKENS
    told, fields, tokens = listed(kept(most // 2, most // 2, BLOCK))
    assert [len(one.tokens) for one in told] == [most // 2, most // 2]
    assert fields["layout"] == [0, 0]
    assert len(tokens) == most * 8
    layouts = [replace(one, layout=replace(LAYOUT, weights=str(one.number))) for one in kept(*[BLOCK] * 40)]
    assert len(listed(layouts)[0]) == listing._MOST_LAYOUTS
    assert len(listed(kept(*[BLOCK] * (listing._MOST_ENTRIES + 5)))[0]) == listing._MOST_ENTRIES
    assert listed([])[0] == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"layout": [0, 7]},
        {"layout": [0]},
        {"num_tokens": [BLOCK, BLOCK + 1]},
        {"num_tokens": [BLOCK, -1]},
        {"layouts": [{}]},
        {"key": 3},
    ],
    ids=str,
)
async def test_a_listing_that_does_not_agree_with_itself_loses_the_engine(
    wrong: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(cached: Sequence[CachedKV]) -> Any:
        entries, fields, tokens = listed(cached)
        return entries, fields | wrong, tokens

    monkeypatch.setattr("hotswap.backends.remote.verbs.listed", told)
    if "key" in wrong:
        monkeypatch.setattr("hotswap.backends.remote.lent.Lent.list", lambda lent, cached: 3)
        wrong = {}
    async with remote(kept(BLOCK, BLOCK)) as engine:
        with pytest.raises(InstanceLost):
            await engine.cached_kv()


async def test_a_link_that_is_not_used_is_closed_and_the_next_read_opens_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened, closed = list[PageLink](), list[PageLink]()
    open_link, close_link = PageLink.open, PageLink.aclose

    async def opening(link: PageLink, key: str) -> None:
        opened.append(link)
        await open_link(link, key)

    async def closing(link: PageLink) -> None:
        await close_link(link)
        closed.append(link)

    monkeypatch.setattr(PageLink, "open", opening)
    monkeypatch.setattr(PageLink, "aclose", closing)
    monkeypatch.setattr(listing, "_IDLE_S", 0.001)
    entries = kept(BLOCK)
    async with remote(entries) as engine:
        (entry,) = await engine.cached_kv()
        for number in (1, 2):
            assert (await entry.read(0, BLOCK)).data == (await entries[0].read(0, BLOCK)).data
            assert len(opened) == number
            await until(lambda: len(closed) == len(opened))
    monkeypatch.setattr(listing, "_IDLE_S", 1000.0)
    async with remote(entries) as engine:
        (entry,) = await engine.cached_kv()
        await entry.read(0, BLOCK)
        await entry.read(0, BLOCK)
        assert (len(opened), len(closed)) == (3, 2)
    assert len(closed) == 3, "with the engine"


async def test_a_read_while_an_idle_link_says_goodbye_goes_over_another() -> None:
    entries = kept(BLOCK)
    async with remote(entries) as engine:
        (entry,) = await engine.cached_kv()
        await entry.read(0, BLOCK)
        link = entry._listing._pages
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(link.leave)
            await checkpoint()
            assert (await entry.read(0, BLOCK)).data == (await entries[0].read(0, BLOCK)).data
        assert entry._listing._pages is not link


@pytest.mark.parametrize("make_kv_store", [HostKVStore, NodeKVStore])
async def test_a_chat_finds_its_history_after_its_model_was_away(
    make_kv_store: Callable[[str], KVStore],
) -> None:
    """From the second turn on at most one block of it is computed again."""
    store = DictStore()
    store.add("a", make_model("llama"))
    store.add("b", make_model("gemma2"))  # whose blocks have another format, so that none stay on the device
    engine = TorchEngine("e0", kv_tokens=2048, memory_bytes="64 MiB", threads=1, max_requests=4)
    async with engine, anyio.create_task_group() as tasks:
        port = await tasks.start(serve_tcp, EngineHost(engine, store).serve, "127.0.0.1")
        async with Fleet(
            engines=[RemoteEngine("e0", partial(connect_tcp, "127.0.0.1", port))],
            store=store,
            models=[Model("a"), Model("b")],
            router=LeastLoadedRouter(),
            scheduler=Idle(),
            kv_store=make_kv_store("64 MiB"),
        ) as fleet:
            await chat(fleet)
        tasks.cancel_scope.cancel()


async def chat(fleet: Fleet) -> None:
    history, num_before = tuple(range(2, 80)), 0
    await fleet.swap("e0", to="a")
    for turn in range(4):
        answer = await fleet.generate("a", history, Sampling(max_tokens=20, ignore_eos=True))
        assert num_before - answer.usage.reused_tokens <= 32
        history += tuple(token.id for token in answer.tokens)
        num_before = len(history)
        history += tuple(range(10 + turn, 25 + turn))
        await fleet.swap("e0", to="b")
        await fleet.swap("e0", to="a")


async def test_a_cancelled_read_leaves_the_listing_as_it_was() -> None:
    class Slow(Kept):
        async def read(self, first_block: int, num_tokens: int) -> KVPages:
            reading.set()
            await going_on.wait()
            return await super().read(first_block, num_tokens)

    reading, going_on = anyio.Event(), anyio.Event()
    entries = [Slow(0, tuple(range(BLOCK)))]
    async with remote(entries) as engine:
        (entry,) = await engine.cached_kv()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(entry.read, 0, BLOCK)
            await reading.wait()
            tasks.cancel_scope.cancel()
        going_on.set()
        assert (await entry.read(0, BLOCK)).data == (await entries[0].read(0, BLOCK)).data
