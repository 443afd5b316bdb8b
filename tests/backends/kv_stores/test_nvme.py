"""What a store on a disk promises beside what every KV store does: a file without a name, and its faults."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest

from hotswap.abc import KVPrefix
from hotswap.backends.kv_stores import NvmeKVStore
from hotswap.backends.kv_stores.pages import PAGE_BYTES
from hotswap.errors import ConfigError, StoreError
from tests.backends.kv_stores.blocks import layout, pages, save
from tests.backends.kv_stores.disks import file_below, files_of_at_most


@pytest.mark.parametrize("has_such_files", [True, False])
async def test_what_users_wrote_has_no_name_on_the_disk_and_one_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_such_files: bool
) -> None:
    if not has_such_files:  # as on some file systems
        monkeypatch.setattr(os, "O_TMPFILE", os.O_CREAT | os.O_EXCL)
    prefix = KVPrefix(layout(PAGE_BYTES), range(16))
    async with NvmeKVStore(tmp_path, "1 MiB") as store:
        await save(store, prefix)
        assert os.listdir(tmp_path) == []
        status = os.stat(file_below(tmp_path))
        assert (status.st_nlink, status.st_mode & 0o777) == (0, 0o600)
    with pytest.raises(ValueError, match="unpack"):
        file_below(tmp_path)


async def test_blocks_of_any_size_share_the_budget_whatever_was_there_before(tmp_path: Path) -> None:
    """Pages of evicted blocks serve others at once, however scattered they are."""
    random = Random(1)
    async with NvmeKVStore(tmp_path, 64 * PAGE_BYTES) as store:
        for number in range(60):
            size = random.choice([100, PAGE_BYTES, 3 * PAGE_BYTES, 5 * PAGE_BYTES + 17])
            first = 1000 * number
            prefix = KVPrefix(layout(size, f"w{number}"), range(first, first + 4 * random.randrange(1, 10)))
            assert await save(store, prefix) == len(prefix.tokens)
            with store.lease(prefix) as lease:
                read = await lease.read(0, lease.num_tokens)
                assert bytes(read.data) == bytes(pages(0, prefix.num_full, size).data)
        assert os.stat(file_below(tmp_path)).st_size <= 64 * PAGE_BYTES


async def test_a_block_that_the_disk_has_changed_is_not_given_out_but_written_again(
    tmp_path: Path,
) -> None:
    """Else a request would go on with other keys and values, and nothing would tell."""
    prefix = KVPrefix(layout(PAGE_BYTES), range(16))
    async with NvmeKVStore(tmp_path, "1 MiB") as store:
        await save(store, prefix)
        file = os.open(file_below(tmp_path), os.O_WRONLY)
        os.pwrite(file, b"?", 2 * PAGE_BYTES + 5)
        os.close(file)
        with store.lease(prefix) as lease:
            read = await lease.read(0, 8)
            assert bytes(read.data) == bytes(pages(0, 2, PAGE_BYTES).data)
            with pytest.raises(StoreError, match="reads otherwise"):
                await lease.read(0, 16)
        assert store.lookup(prefix) == 8
        assert store.view().used_bytes == 3 * PAGE_BYTES
        assert await save(store, prefix) == 16
        with store.lease(prefix) as lease:
            assert bytes((await lease.read(0, 16)).data) == bytes(pages(0, 4, PAGE_BYTES).data)
        assert store.view().used_bytes == 4 * PAGE_BYTES
        store.clear()
        assert store.view().used_bytes == 0


async def test_a_block_that_the_disk_has_lost_is_not_given_out(tmp_path: Path) -> None:
    prefix = KVPrefix(layout(PAGE_BYTES), range(16))
    async with NvmeKVStore(tmp_path, "1 MiB") as store:
        await save(store, prefix)
        os.truncate(file_below(tmp_path), PAGE_BYTES)
        with store.lease(prefix) as lease, pytest.raises(StoreError, match="ends before"):
            await lease.read(0, 16)


async def test_a_full_disk_keeps_what_it_has_and_takes_more_once_there_is_room(tmp_path: Path) -> None:
    first, second = KVPrefix(layout(PAGE_BYTES), range(8)), KVPrefix(layout(PAGE_BYTES), range(100, 116))
    async with NvmeKVStore(tmp_path, "1 MiB") as store:
        await save(store, first)
        with files_of_at_most(4 * PAGE_BYTES), pytest.raises(StoreError, match="cannot be written"):
            await save(store, second)
        assert (store.lookup(first), store.lookup(second)) == (8, 0)
        assert store.view().used_bytes == 2 * PAGE_BYTES
        assert await save(store, second) == 16
        with store.lease(first) as one, store.lease(second) as other:
            assert bytes((await one.read(0, 8)).data) == bytes(pages(0, 2, PAGE_BYTES).data)
            assert bytes((await other.read(0, 16)).data) == bytes(pages(0, 4, PAGE_BYTES).data)


async def test_a_store_that_was_left_is_empty_and_can_be_entered_again(tmp_path: Path) -> None:
    prefix, store = KVPrefix(layout(PAGE_BYTES), range(8)), NvmeKVStore(tmp_path, "1 MiB")
    for _ in range(2):
        async with store:
            assert store.lookup(prefix) == 0
            await save(store, prefix)
            assert store.lookup(prefix) == 8
    assert store.view().used_bytes == 0


async def test_a_directory_that_takes_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*No such file"):
        async with NvmeKVStore(tmp_path / "nowhere", "1 MiB"):
            raise AssertionError
