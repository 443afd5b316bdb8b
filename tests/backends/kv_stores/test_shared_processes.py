"""KV blocks that processes share: found by others, kept while one uses them, and no half of a killed one."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import anyio
import pytest

from hotswap.backends.kv_stores import SharedKVStore
from hotswap.backends.kv_stores.shared_directory import SharedDirectory
from hotswap.errors import ConfigError, StoreBusy
from tests.backends.kv_stores.sharing import (
    BLOCK,
    POINTS,
    SIZE,
    play,
    prefix_of,
    process,
    read_of,
    save_of,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "shared"


def sizes(directory: Path) -> list[int]:
    """The sizes of all files of blocks."""
    return [
        path.stat().st_size for path in directory.iterdir() if path.name not in ("lock", "log", "log.new")
    ]


def modes(directory: Path) -> set[int]:
    """Who may read what is in a directory."""
    return {path.stat().st_mode & 0o777 for path in directory.iterdir()}


async def found(store: SharedKVStore, number: int, num_blocks: int) -> None:
    """Raise unless a prefix is stored whole, and as it was put."""
    prefix = prefix_of(number, num_blocks)
    with store.lease(prefix) as lease:
        assert lease.num_tokens == len(prefix.tokens)
        await read_of(lease, prefix)


async def settled(directory: Path, num_files: int) -> None:
    """Wait until files of evicted blocks are deleted, beside which so many are left."""
    with anyio.fail_after(30):
        while len(sizes(directory)) != num_files:  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def test_what_one_process_has_put_others_find(directory: Path) -> None:
    async with SharedKVStore(directory, 8 * SIZE) as store:
        with process(directory, 8) as other:
            assert await other.said() == "open"
            assert await other.ask("save 1 3") == "12"
            await found(store, 1, 3)
            assert await save_of(store, prefix_of(2, 4)) == 16
            assert await other.ask("find 2 4") == "16"
            assert await other.ask("lease 2 4") == "16"
            assert await other.ask("read") == "same"
            view = store.view()
            assert (view.used_bytes, view.num_leases) == (7 * SIZE, 0)
            (stored,) = view.models
            assert (stored.num_blocks, stored.size_bytes) == (7, 7 * SIZE)


async def test_blocks_outlive_the_processes_until_they_are_unlinked(directory: Path) -> None:
    with process(directory, 8) as other:
        await other.said()
        await other.ask("save 1 3")
        assert other.leave() == 0
    with process(directory, 8) as other:
        await other.said()
        assert await other.ask("find 1 3") == "12"
        await other.ask("save 2 4")
    async with SharedKVStore(directory, 8 * SIZE) as store:
        await found(store, 1, 3)
        await found(store, 2, 4)
    assert modes(directory) == {0o600}
    assert modes(directory.parent) == {0o700}
    SharedKVStore(directory, 8 * SIZE).unlink()
    assert os.listdir(directory.parent) == []


async def test_what_a_process_uses_is_not_unlinked(directory: Path) -> None:
    with process(directory, 8) as other:
        await other.said()
        with pytest.raises(StoreBusy, match="used by another process"):
            SharedKVStore(directory, 8 * SIZE).unlink()
        assert await other.ask("save 1 3") == "12"


async def test_all_processes_give_one_budget(directory: Path) -> None:
    with process(directory, 8) as other:
        await other.said()
        with pytest.raises(ConfigError, match=r"98,304 bytes .*here it has 110,592"):
            async with SharedKVStore(directory, 9 * SIZE):
                raise AssertionError


# ---------------------------------------------------------------------- leases


async def keeps_what_others_lease(directory: Path, kind: str) -> None:
    async with SharedKVStore(directory, 8 * SIZE) as store:
        with process(directory, 8, kind) as other:
            await other.said()
            await other.ask("save 1 4")
            assert await other.ask("lease 1 4") == "16"
            assert await save_of(store, prefix_of(2, 8)) == 16, "there is room for what is not leased"
            await save_of(store, prefix_of(3, 8))
            assert await other.ask("read") == "same"
            assert store.lookup(prefix_of(1, 4)) == 16
            await other.ask("release")
            assert await save_of(store, prefix_of(4, 8)) == 32
            assert await other.ask("find 1 4") == "0"


async def test_what_one_process_leases_no_other_evicts(directory: Path) -> None:
    await keeps_what_others_lease(directory, "SharedKVStore")


async def test_leases_that_others_do_not_see_are_noticed(directory: Path) -> None:
    with pytest.raises(AssertionError):
        await keeps_what_others_lease(directory, "LeasesForItself")


async def test_what_one_process_puts_no_other_evicts_before_its_end(directory: Path) -> None:
    async with SharedKVStore(directory, 8 * SIZE) as store:
        with process(directory, 8) as other:
            await other.said()
            await other.ask("stop put")
            other.tell("save 1 6")
            assert await other.said() == "stopped"
            assert store.lookup(prefix_of(1, 6)) == 8, "what is written is found at once"
            assert store.view().used_bytes == 6 * SIZE, "room is reserved among processes"
            assert await save_of(store, prefix_of(2, 4)) == 8
            await found(store, 1, 2)


async def test_leases_of_a_killed_process_are_free(directory: Path) -> None:
    async with SharedKVStore(directory, 8 * SIZE) as store:
        with process(directory, 8) as other:
            await other.said()
            await other.ask("save 1 8")
            await other.ask("lease 1 8")
            assert await save_of(store, prefix_of(2, 8)) == 0
            other.kill()
            assert await save_of(store, prefix_of(2, 8)) == 32
            await found(store, 2, 8)


# ---------------------------------------------------------------------- killed at any point


async def leaves_no_half(directory: Path, kind: str, point: str) -> None:
    async with SharedKVStore(directory, 8 * SIZE) as store:
        assert await save_of(store, prefix_of(1, 8)) == 32
        with process(directory, 8, kind) as other:
            await other.said()
            assert await other.ask(f"stop {point}") == "ready"
            other.tell("save 2 5")
            assert await other.said() == "stopped"
            other.kill()
        num_whole = 2 if point == "put" else 0
        assert store.lookup(prefix_of(2, 5)) == 4 * num_whole
        if num_whole:
            await found(store, 2, num_whole)
        assert await save_of(store, prefix_of(3, 8)) == 32, "its room is free"
        await found(store, 3, 8)
        view = store.view()
        assert view.used_bytes == sum(model.size_bytes for model in view.models) == 8 * SIZE
        await settled(directory, 8)
        assert set(sizes(directory)) == {BLOCK}
    async with SharedKVStore(directory, 8 * SIZE) as store:
        await found(store, 3, 8)


@pytest.mark.parametrize("point", POINTS)
async def test_a_process_that_is_killed_amid_a_put_leaves_no_half_block(directory: Path, point: str) -> None:
    await leaves_no_half(directory, "SharedKVStore", point)


async def test_blocks_that_are_found_before_they_have_their_content_are_noticed(directory: Path) -> None:
    with pytest.raises(AssertionError):
        await leaves_no_half(directory, "PublishesFirst", "content")


@pytest.mark.parametrize("point", ["content", "header", "eviction"])
async def test_the_next_process_finds_no_half_of_a_killed_one(directory: Path, point: str) -> None:
    """Also if no other one was there."""
    with process(directory, 8) as other:
        await other.said()
        assert await other.ask("save 1 8") == "32"
        await other.ask(f"stop {point}")
        other.tell("save 2 5")
        assert await other.said() == "stopped"
    async with SharedKVStore(directory, 8 * SIZE) as store:
        view = store.view()
        assert view.used_bytes == sum(model.size_bytes for model in view.models)
        assert store.lookup(prefix_of(2, 5)) == 0
        assert await save_of(store, prefix_of(3, 8)) == 32
        await found(store, 3, 8)
        await settled(directory, 8)


# ---------------------------------------------------------------------- a process that does not go on


async def test_a_stopped_process_keeps_no_event_loop_waiting(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s, try_lock = list[float](), SharedDirectory.try_lock

    def noted(lockable: SharedDirectory, limit_s: float) -> bool:
        waits_s.append(limit_s)
        return try_lock(lockable, limit_s)

    async with SharedKVStore(directory, 8 * SIZE) as store:
        await save_of(store, prefix_of(1, 4))
        with process(directory, 8) as other:
            await other.said()
            await other.ask("stop header")
            other.tell("save 2 2")
            assert await other.said() == "stopped"  # and it has the lock
            monkeypatch.setattr(SharedDirectory, "try_lock", noted)
            for _ in range(20):
                assert store.lookup(prefix_of(1, 4)) == 16, "as it was before"
                assert store.lease(prefix_of(1, 4)).num_tokens == 0
                assert store.put(prefix_of(3, 4)).num_tokens == 0
                store.view()
            assert len(waits_s) == 80
            assert sum(waits_s) <= 0.01
        await found(store, 1, 4)


async def test_a_write_waits_for_another_process_off_the_event_loop(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with SharedKVStore(directory, 8 * SIZE) as store:
        with process(directory, 8) as other:
            await other.said()
            with store.put(prefix_of(1, 2)) as put:
                assert put.num_tokens == 8
                await other.ask("stop header")
                other.tell("save 2 2")
                assert await other.said() == "stopped"
                num_turns = 0

                async def count() -> None:
                    nonlocal num_turns
                    while True:
                        await anyio.sleep(0.01)
                        num_turns += 1

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(count)
                    with pytest.raises(StoreBusy, match="locked by another process"):
                        await save_of(_WithPut(put), prefix_of(1, 2))  # type: ignore[arg-type]
                    tasks.cancel_scope.cancel()
                assert num_turns > 20
            other.kill()
        assert await save_of(store, prefix_of(1, 2)) == 8
        await found(store, 1, 2)
        assert store.view().used_bytes == 2 * SIZE


class _WithPut:
    """Gives a put that was opened before."""

    def __init__(self, put: object) -> None:
        self._put = put

    def put(self, prefix: object) -> object:
        return self._put


# ---------------------------------------------------------------------- at random


@pytest.mark.parametrize("seed", range(2))
async def test_every_byte_is_right_whatever_three_processes_save_and_restore(
    directory: Path, seed: int
) -> None:
    async with SharedKVStore(directory, 10 * SIZE) as store:
        with process(directory, 10) as one, process(directory, 10) as two:
            for other in (one, two):
                assert await other.said() == "open"
            for at, other in enumerate((one, two)):
                other.tell(f"play {seed}{at} 150")
            num_found = await play(store, Random(seed), 150)
            for other in (one, two):
                assert await other.said() == "played"
                assert other.leave() == 0
        assert num_found > 5
        view = store.view()
        assert view.used_bytes == sum(model.size_bytes for model in view.models)
        assert view.num_evicted > 20
        await settled(directory, view.used_bytes // SIZE)


async def test_processes_that_are_killed_at_random_leave_what_is_whole(directory: Path) -> None:
    random = Random(5)
    async with SharedKVStore(directory, 10 * SIZE) as store:
        for seed in range(4):
            with process(directory, 10) as other:
                await other.said()
                other.tell(f"play {seed} 100000")
                with anyio.move_on_after(random.uniform(0.05, 0.4)):
                    while True:
                        await play(store, random, 1)
                other.kill()
            await play(store, random, 20)
        await save_of(store, prefix_of(9, 10))
        await found(store, 9, 10)
        view = store.view()
        assert view.used_bytes == sum(model.size_bytes for model in view.models)
        await settled(directory, 10)
