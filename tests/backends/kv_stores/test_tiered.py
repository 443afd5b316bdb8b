"""What a store of memory and a disk promises beside what every KV store does: where blocks are, and when."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest

from hotswap.abc import KVPrefix
from hotswap.backends.kv_stores import HostKVStore, NvmeKVStore, SharedKVStore, TieredKVStore
from hotswap.backends.kv_stores.pages import PAGE_BYTES
from hotswap.errors import ConfigError, StoreError
from tests.backends.kv_stores.blocks import layout, pages, save
from tests.backends.kv_stores.disks import file_below, files_of_at_most

BLOCK = 64 * PAGE_BYTES


def make_store(directory: Path, *, memory: int = 8, disk: int = 24, headroom: int = 2) -> TieredKVStore:
    """A store of so many blocks."""
    tiers = HostKVStore(memory * BLOCK), NvmeKVStore(directory, disk * BLOCK)
    return TieredKVStore(*tiers, headroom=headroom * BLOCK)


def prefix_of(number: int, num_blocks: int) -> KVPrefix:
    return KVPrefix(layout(BLOCK), range(1000 * number, 1000 * number + 4 * num_blocks))


async def assert_stored(store: TieredKVStore, prefix: KVPrefix) -> None:
    with store.lease(prefix) as lease:
        assert lease.num_tokens == len(prefix.tokens)
        read = await lease.read(0, lease.num_tokens)
        assert bytes(read.data) == bytes(pages(0, prefix.num_full, BLOCK).data)


async def written(directory: Path, num_blocks: int) -> None:
    """Wait until so many blocks are on the disk."""
    with anyio.fail_after(30):
        while os.stat(file_below(directory)).st_size < num_blocks * BLOCK:  # noqa: ASYNC110
            await anyio.sleep(0.001)


async def could_save(store: TieredKVStore, prefix: KVPrefix) -> bool:
    """Whether a prefix was saved, as it is not where a full disk has to take it."""
    try:
        await save(store, prefix)
    except StoreError:
        return False
    return True


async def test_what_memory_has_no_room_for_is_on_the_disk_and_read_from_both(tmp_path: Path) -> None:
    prefixes = [prefix_of(number, 10) for number in range(3)]
    async with make_store(tmp_path) as store:
        for prefix in prefixes:
            assert await save(store, prefix) == 40
        for prefix in prefixes:
            await assert_stored(store, prefix)
        assert store.view().used_bytes == 30 * BLOCK == store.view().capacity_bytes
        await save(store, prefix_of(3, 4))
        assert store.lookup(prefixes[0]) == 24, "what was used longest ago makes room, its end first"
        await assert_stored(store, prefix_of(3, 4))


async def test_memory_is_free_for_the_next_save(tmp_path: Path) -> None:
    """Even if the disk takes nothing any more."""
    async with make_store(tmp_path) as store:
        await save(store, prefix_of(0, 8))
        await written(tmp_path, 2)
        with files_of_at_most(2 * BLOCK), anyio.fail_after(30):
            while not await could_save(store, prefix_of(1, 2)):  # noqa: ASYNC110
                await anyio.sleep(0.001)
        await assert_stored(store, prefix_of(0, 8))
        await assert_stored(store, prefix_of(1, 2))


async def test_blocks_stay_in_memory_while_the_disk_takes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_store(tmp_path) as store:
        with files_of_at_most(0):
            await save(store, prefix_of(0, 8))
            with anyio.fail_after(30):
                while "KV blocks stay in memory" not in caplog.text:  # noqa: ASYNC110
                    await anyio.sleep(0.001)
        await assert_stored(store, prefix_of(0, 8))
        assert store.view().used_bytes == 8 * BLOCK
        await save(store, prefix_of(1, 2))
        await assert_stored(store, prefix_of(1, 2))
    assert "File too large" in caplog.text


async def test_what_is_read_stays_where_it_is(tmp_path: Path) -> None:
    """Else its memory would be written to by the next save while it is copied to a device."""
    async with make_store(tmp_path) as store:
        prefix = prefix_of(0, 6)
        await save(store, prefix)
        with store.lease(prefix) as lease:
            read = await lease.read(0, 24)
            for number in range(1, 6):
                await save(store, prefix_of(number, 4))
            await written(tmp_path, 4)
            assert bytes(read.data) == bytes(pages(0, 6, BLOCK).data)
        await assert_stored(store, prefix)


async def test_blocks_of_any_size_are_kept_up_to_half_the_headroom(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_store(tmp_path) as store:
        for number, size in enumerate((100, PAGE_BYTES, BLOCK // 3, BLOCK, BLOCK + 1) * 8):
            prefix = KVPrefix(layout(size, f"w{number}"), range(16))
            assert await save(store, prefix) == (16 if size <= BLOCK else 0)
    assert caplog.text.count("keeps nothing of") == 1


async def test_a_store_that_was_left_is_empty_and_can_be_entered_again(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for _ in range(2):
        async with store:
            assert store.lookup(prefix_of(0, 20)) == 0
            await save(store, prefix_of(0, 20))
            await assert_stored(store, prefix_of(0, 20))
        assert os.listdir(tmp_path) == []
    assert store.view().used_bytes == 0


async def test_an_error_passes_as_it_is_while_blocks_are_written(tmp_path: Path) -> None:
    async def fail() -> None:
        async with make_store(tmp_path) as store:
            await save(store, prefix_of(0, 8))
            raise KeyError("of the program")

    with pytest.raises(KeyError, match="of the program"):
        await fail()


def test_other_stores_are_refused_as_its_tiers(tmp_path: Path) -> None:
    memory, disk = HostKVStore("1 MiB"), NvmeKVStore(tmp_path, "1 MiB")
    with pytest.raises(ConfigError, match=r"memory is .*; give a HostKVStore"):
        TieredKVStore(SharedKVStore(tmp_path / "shared", "1 MiB"), disk)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"disk is .*; give an NvmeKVStore"):
        TieredKVStore(memory, memory)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"memory is '1 MiB'; give a HostKVStore"):
        TieredKVStore("1 MiB", disk)  # type: ignore[arg-type]


def test_a_headroom_of_more_than_the_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="headroom"):
        make_store(tmp_path, headroom=9)
