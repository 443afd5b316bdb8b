"""What a store that processes share promises beside what all KV stores do: its keys, its log, its files."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import anyio
import pytest

from hotswap.abc import KVPages, KVPrefix
from hotswap.backends.kv_stores import SharedKVStore, shared_log
from hotswap.errors import ConfigError, StoreBusy, StoreError, TierFull
from tests.backends.kv_stores.disks import files_of_at_most
from tests.backends.kv_stores.sharing import BLOCK, LAYOUT, SIZE, play, prefix_of, read_of, save_of


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@asynccontextmanager
async def two(directory: Path, num_blocks: int = 8) -> AsyncGenerator[tuple[SharedKVStore, SharedKVStore]]:
    """Two stores of one directory, which are to each other as those of two processes."""
    async with (
        SharedKVStore(directory, num_blocks * SIZE) as one,
        SharedKVStore(directory, num_blocks * SIZE) as other,
    ):
        yield one, other


def files(directory: Path) -> list[Path]:
    """The files of blocks."""
    return sorted(path for path in directory.iterdir() if path.name not in ("lock", "log"))


def change(path: Path, at: int) -> None:
    """Change one bit."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# ---------------------------------------------------------------------- what names a block


async def test_blocks_are_found_elsewhere_if_they_are_computed_in_the_same_way(directory: Path) -> None:
    async with two(directory) as (one, other):
        for computed_by, num_found in (("torch 2", 8), ("torch 3", 8), ("", 0)):
            prefix = KVPrefix(replace(LAYOUT, computed_by=computed_by), range(8))
            for asking in (one, other):
                assert asking.lookup(prefix) == 0, "others are computed otherwise"
            await save_of(one, prefix)
            assert (one.lookup(prefix), other.lookup(prefix)) == (8, num_found)


async def test_other_tokens_are_not_found_under_any_root() -> None:
    prefix = prefix_of(1, 3)
    keys = {prefix.under(root).key(at) for root in ("a", "b") for at in range(3)}
    assert len(keys | {prefix.key(at) for at in range(3)}) == 9
    assert prefix.under("a").key(2) == prefix_of(1, 3).under("a").key(2)
    assert prefix.under("a").parent(0) != prefix.parent(0)


# ---------------------------------------------------------------------- the log


def state(store: SharedKVStore) -> object:
    """All that decides what is found and what goes first."""
    index = store._shared
    with index.locked():
        blocks = {
            block.key: (block.parent, block.tokens, block.place.number, block.worth, block.rank)
            for block in index
        }
        siblings = {key: list(found) for key, found in index._children.items()}
        counts = index.used_bytes, index._counts(), index._num_members, index._reserved
        return blocks, siblings, counts, index.models()


@pytest.mark.parametrize("short_bytes", [0, 1 << 14, 1 << 30])
async def test_all_processes_have_one_index(
    directory: Path, short_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the log is made shorter, and whether each of these was noticed."""
    monkeypatch.setattr(shared_log, "_SHORT_BYTES", short_bytes)
    random, num_shorter = Random(2), 0
    replaced = shared_log.SharedLog.replace

    def count(self: shared_log.SharedLog, ops: list[str]) -> None:
        nonlocal num_shorter
        num_shorter += 1
        replaced(self, ops)

    monkeypatch.setattr(shared_log.SharedLog, "replace", count)
    async with two(directory, 10) as (one, other), SharedKVStore(directory, 10 * SIZE) as third:
        with other.put(prefix_of(8, 3)) as put, third.lease(prefix_of(1, 1)):
            assert put.num_tokens == 12
            for turn in range(25):
                await play(random.choice([one, other]), random, 4)
                await anyio.sleep(0.002)
                assert state(one) == state(other)
                if turn % 5 == 4:
                    assert state(third) == state(one)
                async with SharedKVStore(directory, 10 * SIZE) as new:
                    assert state(new) == state(one)
            await save_of(third, prefix_of(7, 2))
            assert state(third) == state(one) == state(other)
    assert (num_shorter > 0) == (short_bytes < 1 << 30)


async def test_leases_stay_while_the_log_is_made_shorter_twice(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_log, "_SHORT_BYTES", 0)
    async with two(directory) as (one, other):
        await save_of(one, prefix_of(1, 4))
        with other.lease(prefix_of(1, 4)) as lease, other.put(prefix_of(2, 2)) as put:
            for turn in range(30):
                await save_of(one, prefix_of(3 + turn, 4))
                await anyio.sleep(0.002)
            assert put.num_tokens == 8
            await read_of(lease, prefix_of(1, 4))
            assert other.view().used_bytes == 8 * SIZE
            await save_of(other, prefix_of(99, 2))
            await read_of(lease, prefix_of(1, 4))
        await save_of(one, prefix_of(100, 8))
        assert one.lookup(prefix_of(100, 8)) == 32, "and end"


# ---------------------------------------------------------------------- damage


@pytest.mark.parametrize("number", [0, 1])
async def test_a_block_that_was_changed_or_cut_off_is_lost(directory: Path, number: int) -> None:
    async with two(directory) as (one, other):
        await save_of(one, prefix_of(1, 3))
        path = files(directory)[1]
        if number:
            os.truncate(path, BLOCK - 1)
        else:
            path.write_bytes(b"x" * BLOCK)
        with (
            other.lease(prefix_of(1, 3)) as lease,
            pytest.raises(StoreError, match="otherwise than it was written"),
        ):
            await lease.read(0, 12)
        assert (one.lookup(prefix_of(1, 3)), other.lookup(prefix_of(1, 3))) == (4, 4)
        assert await save_of(one, prefix_of(1, 3)) == 12
        with other.lease(prefix_of(1, 3)) as lease:
            await read_of(lease, prefix_of(1, 3))


async def test_a_block_whose_file_is_gone_is_lost(directory: Path) -> None:
    async with SharedKVStore(directory, 8 * SIZE) as store:
        await save_of(store, prefix_of(1, 3))
        files(directory)[0].unlink()
        with store.lease(prefix_of(1, 3)) as lease, pytest.raises(StoreError, match="No such file"):
            await lease.read(0, 12)
        assert store.lookup(prefix_of(1, 3)) == 0
        assert await save_of(store, prefix_of(1, 3)) == 12


@pytest.mark.parametrize("at", [20, 4096 + 4, 4096 + 40, 4096 + 300])
async def test_a_damaged_log_is_refused(directory: Path, at: int) -> None:
    async with SharedKVStore(directory, 8 * SIZE) as store:
        await save_of(store, prefix_of(1, 3))
    change(directory / "log", at)
    with pytest.raises(StoreError, match=r"log' is damaged\. Remove the directory"):
        async with SharedKVStore(directory, 8 * SIZE):
            raise AssertionError


async def test_a_log_that_is_damaged_or_cut_off_under_a_store_is_refused(directory: Path) -> None:
    async with two(directory) as (one, other):
        await save_of(one, prefix_of(1, 3))
        assert other.lookup(prefix_of(1, 3)) == 12
        await save_of(one, prefix_of(2, 3))
        os.truncate(directory / "log", 4096)
        for _ in range(2):
            with pytest.raises(StoreError, match="damaged"):
                other.lookup(prefix_of(2, 3))
        os.truncate(directory / "log", 3)
        with pytest.raises((StoreError, ConfigError)):
            other.lease(prefix_of(2, 3))


def fill(directory: Path, name: str) -> None:
    """Make a directory of something else."""
    directory.mkdir(mode=0o700)
    (directory / name).write_text("something else")
    if name == "log":
        (directory / "lock").touch()


@pytest.mark.parametrize("name", ["log", "photo.jpg"])
async def test_a_directory_of_something_else_is_refused_and_left_as_it_is(directory: Path, name: str) -> None:
    fill(directory, name)
    with pytest.raises(ConfigError, match=r"no log of a KV store|no KV store's"):
        async with SharedKVStore(directory, 8 * SIZE):
            raise AssertionError
    with pytest.raises(ConfigError):
        SharedKVStore(directory, 8 * SIZE).unlink()
    assert (directory / name).read_text() == "something else"


async def test_a_directory_that_others_can_enter_is_refused(directory: Path) -> None:
    os.mkdir(directory, 0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        async with SharedKVStore(directory, 8 * SIZE):
            raise AssertionError


async def test_a_directory_that_is_a_file_is_refused(directory: Path) -> None:
    os.mknod(directory)
    with pytest.raises(ConfigError, match="is a file"):
        async with SharedKVStore(directory, 8 * SIZE):
            raise AssertionError


async def test_a_directory_that_is_removed_under_a_store_is_told(directory: Path) -> None:
    async with SharedKVStore(directory, 8 * SIZE) as store:
        shutil.rmtree(directory)
        with pytest.raises(StoreError, match="was removed; enter the KV store again"):
            store.lookup(prefix_of(1, 1))
    async with store:
        assert await save_of(store, prefix_of(1, 1)) == 4


# ---------------------------------------------------------------------- room


async def test_memory_that_is_full_is_an_error_and_keeps_what_there_was(directory: Path) -> None:
    async with two(directory) as (one, other):
        await save_of(one, prefix_of(1, 2))
        with files_of_at_most(BLOCK - 1), pytest.raises(TierFull, match="is full"):
            await save_of(one, prefix_of(2, 4))
        assert other.lookup(prefix_of(2, 4)) == 0
        assert one.view().used_bytes == other.view().used_bytes == 2 * SIZE
        assert await save_of(other, prefix_of(2, 6)) == 24
        with one.lease(prefix_of(1, 2)) as lease:
            await read_of(lease, prefix_of(1, 2))


async def test_a_log_without_room_is_an_error_and_keeps_what_there_was(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two(directory) as (one, other):
        await save_of(one, prefix_of(1, 2))
        monkeypatch.setattr(shared_log, "_SPARE_BYTES", 4 << 20)
        with files_of_at_most(3 << 20), pytest.raises(TierFull, match="is full"):
            await save_of(one, prefix_of(2, 4))
        assert one.view().used_bytes == other.view().used_bytes == 2 * SIZE
        assert other.lookup(prefix_of(2, 4)) == 0
        assert await save_of(one, prefix_of(2, 6)) == 24
        assert other.lookup(prefix_of(2, 6)) == 24


async def test_uses_are_not_counted_where_the_log_has_no_room_for_them(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two(directory) as (one, other):
        await save_of(one, prefix_of(1, 2))
        before = state(one)
        monkeypatch.setattr(shared_log, "_SPARE_BYTES", 4 << 20)
        with files_of_at_most(3 << 20):
            with one.lease(prefix_of(1, 2)) as lease:
                await read_of(lease, prefix_of(1, 2))
            assert state(one) == state(other) == before


async def test_what_the_log_does_not_take_is_not_so(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with two(directory) as (one, other):
        await save_of(one, prefix_of(1, 2))
        with one.put(prefix_of(2, 3)) as put:
            monkeypatch.setattr(shared_log, "_write", fail)
            data = memoryview(bytearray(2 * BLOCK))
            with pytest.raises(TierFull):
                await put.write(KVPages(0, 8, data))
            monkeypatch.undo()
            assert (one.lookup(prefix_of(2, 3)), other.lookup(prefix_of(2, 3))) == (0, 0)
        assert await save_of(other, prefix_of(3, 3)) == 12
        assert state(one) == state(other)
        with one.lease(prefix_of(3, 3)) as lease:
            await read_of(lease, prefix_of(3, 3))
    async with SharedKVStore(directory, 8 * SIZE) as store:
        assert store.view().used_bytes == 5 * SIZE


async def test_no_room_for_a_log_is_an_error(directory: Path) -> None:
    with files_of_at_most(1 << 16), pytest.raises(TierFull, match="is full"):
        async with SharedKVStore(directory, 8 * SIZE):
            raise AssertionError
    async with SharedKVStore(directory, 8 * SIZE) as store:
        assert await save_of(store, prefix_of(1, 8)) == 32


# ---------------------------------------------------------------------- life


async def test_a_store_is_cleared_in_all_processes_but_for_what_is_leased(directory: Path) -> None:
    async with two(directory) as (one, other):
        await save_of(one, prefix_of(1, 2))
        await save_of(one, prefix_of(2, 2))
        with other.lease(prefix_of(1, 2)) as lease:
            one.clear()
            assert (other.lookup(prefix_of(1, 2)), other.lookup(prefix_of(2, 2))) == (8, 0)
            await read_of(lease, prefix_of(1, 2))
        one.clear()
        assert other.view().used_bytes == 0


async def test_a_store_that_was_left_can_be_entered_again_and_has_its_blocks(directory: Path) -> None:
    store = SharedKVStore(directory, 8 * SIZE)
    assert store.lookup(prefix_of(1, 2)) == 0
    async with store:
        assert await save_of(store, prefix_of(1, 2)) == 8
        put = store.put(prefix_of(2, 4))
    put.release()
    assert store.lookup(prefix_of(1, 2)) == 0
    assert store.put(prefix_of(1, 2)).num_tokens == 0
    async with store:
        assert store.lookup(prefix_of(1, 2)) == 8
        assert store.view().used_bytes == 2 * SIZE
        assert repr(store) == "<SharedKVStore shared <KVIndex [2 blocks, 24,576 of 98,304 bytes]>>"
        with pytest.raises(StoreBusy):
            store.unlink()
    store.unlink()
    assert os.listdir(directory.parent) == []


async def test_descriptors_are_closed(directory: Path) -> None:
    def opened() -> list[str]:
        paths = list[str]()
        for file in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # of another thread
                paths.append(os.readlink(file))
        return [path for path in paths if path.startswith(str(directory))]

    async with AsyncExitStack() as stack:
        for _ in range(3):
            store = await stack.enter_async_context(SharedKVStore(directory, 8 * SIZE))
            await save_of(store, prefix_of(1, 8))
        assert opened()
    with pytest.raises(ConfigError):
        async with SharedKVStore(directory, 9 * SIZE):
            raise AssertionError
    assert not opened()
