"""What a store in host memory promises beside what every KV store does: memory, threads, its index."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Container, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from random import Random

import anyio
import numpy as np
import pytest

from hotswap import ModelId
from hotswap.abc import KVPrefix
from hotswap.backends.kv_index import KVIndex, StoredBlock
from hotswap.backends.kv_stores import HostKVStore, arena, staging
from hotswap.backends.kv_stores.arena import Arena
from hotswap.backends.kv_stores.pages import PAGE_BYTES, Pages
from hotswap.errors import ConfigError
from tests.backends.kv_stores.blocks import layout, pages, save


@pytest.mark.parametrize(("block_bytes", "state_bytes"), [(9 * PAGE_BYTES, 0), (100, 9 * PAGE_BYTES)])
async def test_a_model_whose_blocks_are_larger_than_the_store_is_told_once(
    block_bytes: int, state_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    large = replace(layout(block_bytes), state_bytes=state_bytes)
    async with HostKVStore(8 * PAGE_BYTES) as store, HostKVStore(0) as off:
        for number in range(3):
            for each in (store, off):
                assert await save(each, KVPrefix(large, range(number, number + 8))) == 0
        assert await save(store, KVPrefix(layout(100), range(8))) == 8
    assert caplog.text.count("keeps nothing of 'w'") == 1
    what = "recurrent states" if state_bytes else "a KV block"
    takes, keeps = f"{9 * PAGE_BYTES:,}", f"{8 * PAGE_BYTES:,}"
    assert f"{what} of it takes {takes} bytes, and the store keeps {keeps} at most" in caplog.text


async def test_blocks_of_any_size_share_the_budget_whatever_was_there_before() -> None:
    """Pages of evicted blocks serve others at once, however scattered they are."""
    random = Random(1)
    async with HostKVStore(64 * PAGE_BYTES) as store:
        for number in range(60):
            size = random.choice([100, PAGE_BYTES, 3 * PAGE_BYTES, 5 * PAGE_BYTES + 17])
            first = 1000 * number
            prefix = KVPrefix(layout(size, f"w{number}"), range(first, first + 4 * random.randrange(1, 10)))
            assert await save(store, prefix) == len(prefix.tokens)
            with store.lease(prefix) as lease:
                read = await lease.read(0, lease.num_tokens)
                assert bytes(read.data) == bytes(pages(0, prefix.num_full, size).data)
            assert store.view().used_bytes <= 64 * PAGE_BYTES


async def test_large_copies_are_made_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    write, read = Arena.write, Arena.read

    def note_write(self: Arena, blocks: Sequence[Pages], data: memoryview) -> None:
        threads.append(threading.get_ident())
        write(self, blocks, data)

    def note_read(self: Arena, blocks: Sequence[Pages], out: memoryview, block_bytes: int) -> None:
        threads.append(threading.get_ident())
        read(self, blocks, out, block_bytes)

    monkeypatch.setattr(Arena, "write", note_write)
    monkeypatch.setattr(Arena, "read", note_read)
    prefix = KVPrefix(layout((1 << 20) + 1), range(8))
    async with HostKVStore("16 MiB") as store:
        await save(store, prefix)
        with store.lease(prefix) as lease:
            await lease.read(0, 8)
    assert len(threads) == 2
    assert threading.get_ident() not in threads


async def test_memory_for_copies_to_a_device_is_pinned_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a stand-in for CUDA. It is pinned once for many copies, and unpinned in the end."""
    pinned, threads = dict[int, memoryview](), list[int]()

    def pin(memory: memoryview) -> bool:
        threads.append(threading.get_ident())
        pinned[id(memory)] = memory
        return True

    monkeypatch.setattr(arena, "can_pin", lambda: True)
    monkeypatch.setattr(staging, "can_pin", lambda: True)
    monkeypatch.setattr(staging, "pin", pin)
    monkeypatch.setattr(staging, "unpin", lambda memory: pinned.pop(id(memory)))
    prefix = KVPrefix(layout(64 << 10), range(16))

    async def restore(store: HostKVStore) -> None:
        with store.lease(prefix) as lease:
            for _ in range(3):
                read = await lease.read(0, 16)
                assert bytes(read.data) == bytes(pages(0, 4, 64 << 10).data)

    async with HostKVStore("4 MiB") as store:
        await save(store, prefix)
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(restore, store)
        assert 1 <= len(threads) <= 3
        assert threading.get_ident() not in threads
        with anyio.CancelScope() as scope:
            scope.cancel()
            await restore(store)
    assert not pinned


def resident_bytes() -> int:
    """The memory that the system has given to this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


async def test_memory_is_there_before_a_save_needs_it() -> None:
    """New pages take many times as long to be written, and a swap would wait for them."""
    before = resident_bytes()
    async with HostKVStore("1 GiB"):
        with anyio.fail_after(30):
            while resident_bytes() < before + (120 << 20):  # noqa: ASYNC110
                await anyio.sleep(0.001)
        await anyio.sleep(0.02)
        assert resident_bytes() < before + (200 << 20), "no more than an eighth is taken ahead"


async def test_memory_that_is_taken_ahead_keeps_what_is_written_to_it_meanwhile() -> None:
    memory = Arena(1000 * PAGE_BYTES)
    ahead = memory.lacking(100 * PAGE_BYTES)
    blocks = [memory.allocate(PAGE_BYTES) for _ in range(50)]
    data = memoryview(bytearray(pages(0, 50, PAGE_BYTES).data))
    memory.write(blocks, data)
    memory.populate(ahead)
    out = memoryview(bytearray(len(data)))
    memory.read(blocks, out, PAGE_BYTES)
    assert out == data
    assert memory.lacking(100 * PAGE_BYTES) == range(100, 150)


async def test_pages_that_were_written_are_taken_before_new_ones() -> None:
    """New pages take longer to be written."""
    memory = Arena(1000 * PAGE_BYTES)
    for _ in range(50):
        blocks = [memory.allocate(3 * PAGE_BYTES) for _ in range(10)]
        assert max(int(block.max()) for block in blocks) < 30
        for block in blocks:
            memory.free(block)


async def test_a_read_of_neighbouring_pages_copies_nothing() -> None:
    prefix = KVPrefix(layout(2 * PAGE_BYTES), range(16))
    async with HostKVStore("1 MiB") as store:
        await save(store, prefix)
        with store.lease(prefix) as one, store.lease(prefix) as other:
            first, second = await one.read(0, 16), await other.read(0, 16)
            assert np.shares_memory(np.frombuffer(first.data, np.uint8), np.frombuffer(second.data, np.uint8))


async def test_a_store_that_was_left_is_empty_and_can_be_entered_again() -> None:
    prefix = KVPrefix(layout(PAGE_BYTES), range(8))
    store = HostKVStore("1 MiB")
    for _ in range(2):
        async with store:
            assert store.lookup(prefix) == 0
            await save(store, prefix)
            assert store.lookup(prefix) == 8
    assert store.view().used_bytes == 0


async def test_a_store_that_is_cleared_keeps_what_is_leased() -> None:
    kept, gone = KVPrefix(layout(PAGE_BYTES), range(8)), KVPrefix(layout(PAGE_BYTES), range(100, 116))
    async with HostKVStore("1 MiB") as store:
        await save(store, kept)
        await save(store, gone)
        with store.lease(kept) as lease:
            store.clear()
            assert (store.lookup(kept), store.lookup(gone)) == (8, 0)
            assert bytes((await lease.read(0, 8)).data) == bytes(pages(0, 2, PAGE_BYTES).data)
        store.clear()
        assert store.view().used_bytes == 0


def test_a_capacity_that_is_no_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="capacity"):
        HostKVStore("much")


async def test_a_put_that_is_cancelled_while_a_thread_copies_waits_for_the_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the pages would go to another block while they are still written."""
    began, go_on = threading.Event(), threading.Event()
    write = Arena.write

    def slow(self: Arena, blocks: Sequence[Pages], data: memoryview) -> None:
        began.set()
        go_on.wait()
        write(self, blocks, data)

    prefix = KVPrefix(layout(1 << 20), range(8))
    ended = anyio.Event()
    async with HostKVStore("2 MiB") as store:

        async def put() -> None:
            with anyio.CancelScope() as scope:
                scopes.append(scope)
                await save(store, prefix)
            ended.set()

        scopes: list[anyio.CancelScope] = []
        monkeypatch.setattr(Arena, "write", slow)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(put)
            await anyio.to_thread.run_sync(began.wait)
            scopes[0].cancel()
            await anyio.wait_all_tasks_blocked()
            assert not ended.is_set()
            assert store.view().used_bytes == 2 << 20
            go_on.set()
        assert store.lookup(prefix) == 0
        assert store.view().used_bytes == 0


def stored(index: KVIndex[int], tokens: Sequence[int], size_bytes: int, worth: float = 0.0) -> KVPrefix:
    """Add the block of four tokens, for which there is room."""
    prefix = KVPrefix(layout(size_bytes), tokens)
    assert index.reserve(size_bytes, worth) == []
    index.add(
        StoredBlock(prefix.key(0), prefix.parent(0), prefix.tokens_of(0), ModelId("w"), 0, size_bytes, worth)
    )
    return prefix


def test_room_that_is_not_found_changes_nothing() -> None:
    """Neither what goes first nor what is worth more than what comes."""
    index = KVIndex[int](100)
    old, young = stored(index, range(4), 10, 1.0), stored(index, range(100, 104), 10, 1.0)
    dear = index.get(stored(index, range(200, 204), 80, 9.0).key(0))
    assert dear is not None
    assert index.reserve(50, 5.0) is None
    assert (index.used_bytes, len(index), index.num_evicted) == (100, 3, 0)
    evicted = index.reserve(10, 1.0)
    assert evicted is not None
    assert [block.key for block in evicted] == [old.key(0)]
    assert index.find(young).num_tokens == 4
    assert index.reserve(80, 7.5) is None, "worth 1 and 7.5 are less than 9"


def num_full_stored(stored: Container[bytes], prefix: KVPrefix) -> int:
    """How many of the first blocks of a prefix are stored, looked up one by one."""
    keys = map(prefix.key, range(prefix.num_full))
    return sum(1 for _ in takewhile(stored.__contains__, keys))


def test_an_index_stays_within_its_budget_and_finds_beginnings_whatever_happens() -> None:
    """Ten thousand random steps: every count right, and a block never without those before it."""
    random, one = Random(3), layout(10)
    index = KVIndex[int](400)
    leased: list[StoredBlock[int]] = []
    stored: dict[bytes, StoredBlock[int]] = {}
    num_refused = 0
    for step in range(10_000):
        tokens = [random.randrange(3) for _ in range(random.randrange(1, 30))]
        prefix = KVPrefix(one, tokens)
        found = index.find(prefix)
        num_full = min(len(found.blocks), found.num_tokens // 4)
        assert num_full >= num_full_stored(stored, prefix)
        assert all(stored[block.key] is block for block in found.blocks)
        if random.random() < 0.2 and leased:
            index.release(leased.pop(random.randrange(len(leased))))
        elif random.random() < 0.3 and found.blocks and len(leased) < 3:
            index.lease(found.blocks[-1])
            leased.append(found.blocks[-1])
        elif num_full < prefix.num_blocks and found.num_tokens < len(tokens):
            before = found.blocks[:num_full][-1:]
            for block in before:
                index.lease(block)
            size_bytes, ranks = random.choice((5, 20, 90)), {key: stored[key].rank for key in stored}
            evicted = index.reserve(size_bytes, random.random())
            for block in before:
                index.release(block)
            if evicted is None:
                num_refused += 1
                assert ranks == {key: block.rank for key, block in stored.items()}
            else:
                for gone in evicted:
                    del stored[gone.key]
                block = StoredBlock(
                    prefix.key(num_full),
                    prefix.parent(num_full),
                    prefix.tokens_of(num_full),
                    one.model,
                    step,
                    size_bytes,
                    random.random(),
                )
                stored[block.key] = block
                for covered in index.add(block):
                    del stored[covered.key]
        assert index.used_bytes == sum(block.size_bytes for block in stored.values()) <= 400
        assert len(index) == len(stored)
        assert all(index.get(block.key) is block for block in leased)
        roots = {KVPrefix(one, ()).parent(0)}
        assert all(block.parent in stored or block.parent in roots for block in stored.values())
    assert index.num_evicted > 500
    assert num_refused > 50
