"""Locks that other processes hold: a wait ends at its limit or when it is cancelled, and tells the holder."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from hotswap import ModelId
from hotswap.abc import Manifest
from hotswap.backends.stores import NvmeStore, PinnedStore, SharedStore, TieredStore
from hotswap.backends.stores.locks import LockWait, holder_of, locked
from hotswap.backends.stores.writer import WriteOptions, write_model, writing
from hotswap.errors import StoreBusy, UnsafeFile
from tests.backends.stores.holders import held
from tests.backends.stores.models import blank, content, put, read, read_rank

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
M = ModelId("m")
MOMENT_S = 0.02


async def load(store: NvmeStore, manifest: Manifest) -> None:
    await read(store, manifest.shards[0])


async def load_in_place(store: NvmeStore, manifest: Manifest) -> None:
    await store.read_into(manifest.shards[0], memoryview(bytearray(manifest.shards[0].size_bytes)))


async def pin(store: NvmeStore, manifest: Manifest) -> None:
    await store.pin(manifest.model)


async def admit(store: NvmeStore, manifest: Manifest) -> None:
    async with store.admit(manifest):
        pass


USES = [load, load_in_place, pin, admit]


def place(root: Path, use: object) -> Path:
    """What a use locks: its model, or the root."""
    return root if use is admit else root / "m"


@pytest.mark.parametrize("use", USES)
async def test_a_stopped_process_holds_a_load_no_longer_than_the_limit(
    tmp_path: Path, use: Callable[[NvmeStore, Manifest], Awaitable[None]]
) -> None:
    manifest, ranks = put(tmp_path)
    async with NvmeStore(tmp_path, lock_limit_s=MOMENT_S) as store:
        with (
            held(place(tmp_path, use)) as pid,
            pytest.raises(StoreBusy, match=rf"locked by process {pid} \('.*', stopped\) for 0.02 s"),
        ):
            await use(store, manifest)
        await use(store, manifest)
        assert store.num_lent == 0
        assert await read_rank(store, manifest) == ranks[0]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("native", [True, False])
async def test_a_wait_for_a_lock_ends_when_it_is_cancelled(
    tmp_path: Path, native: bool, use: Callable[[NvmeStore, Manifest], Awaitable[None]]
) -> None:
    manifest, _ = put(tmp_path)
    async with NvmeStore(tmp_path, lock_limit_s=3600) as store:
        with held(place(tmp_path, use)):
            if native:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(MOMENT_S):
                        await use(store, manifest)
            else:
                with anyio.move_on_after(MOMENT_S) as scope:
                    await use(store, manifest)
                assert scope.cancelled_caught
        assert await store.remove(M) == manifest.weight_bytes  # no lock was left behind


async def test_a_store_opens_while_its_root_and_a_leftover_are_locked(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path)
    left = tmp_path / ".m.01234567.partial"
    left.mkdir()
    with held(tmp_path), held(left):
        async with NvmeStore(tmp_path) as store:
            assert await read_rank(store, manifest) == ranks[0]
        assert left.exists()


async def test_a_tier_whose_model_is_locked_is_skipped_for_the_next(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path / "near")
    put(tmp_path / "far")
    near = NvmeStore(tmp_path / "near", lock_limit_s=MOMENT_S)
    async with TieredStore(PinnedStore("1 MiB"), near, NvmeStore(tmp_path / "far", name="far")) as store:
        with held(tmp_path / "near" / "m"):
            assert await read_rank(store, manifest) == ranks[0]


async def test_shared_memory_that_is_locked_is_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest, ranks = put(tmp_path / "root")
    shared = SharedStore(tmp_path / "shared", "1 MiB", lock_limit_s=MOMENT_S)
    async with TieredStore(shared, NvmeStore(tmp_path / "root")) as store:
        with held(tmp_path / "shared"):
            assert await read_rank(store, manifest) == ranks[0]
            with pytest.raises(StoreBusy, match="locked by process"):
                await shared.clear()
        assert await read_rank(store, manifest) == ranks[0]
        assert store.view().tier_of(M) == "shared"
    assert "is loaded without" in caplog.text


def test_a_wait_asks_no_more_often_than_its_pauses_allow(tmp_path: Path) -> None:
    with held(tmp_path):
        before_s = time.thread_time()
        with pytest.raises(StoreBusy), locked(tmp_path, LockWait(0.3)):
            pass
        assert time.thread_time() - before_s < 0.15  # a busy loop takes it all


def test_a_lock_without_a_known_holder_is_told_as_such(tmp_path: Path) -> None:
    assert holder_of(tmp_path) == "another process"
    assert holder_of(tmp_path / "nothing") == "another process"


# ---------------------------------------------------------------------------------------------- other users


def modes(root: Path) -> set[int]:
    paths = [root, *root.rglob("*")]
    return {path.stat().st_mode & 0o077 for path in paths}


async def test_other_users_can_neither_read_nor_lock_what_a_store_makes(tmp_path: Path) -> None:
    root, far, manifest = tmp_path / "root", tmp_path / "far", blank()
    before = os.umask(0o022)
    try:
        made = write_model(
            root, manifest, [[memoryview(content(manifest)[0])]], side_files={"tokenizer.json": b"{}"}
        )
        async with NvmeStore(far) as store, NvmeStore(root) as source, store.admit(made) as admission:
            for shard in made.shards:
                async with admission.shard(shard) as file:
                    async with source.open(shard) as chunks:
                        async for chunk in chunks:
                            await file.write(chunk.data)
                    file.finish()
            await admission.commit(await source.side_files(M))
            assert modes(far) == {0}
    finally:
        os.umask(before)
    assert modes(root) == modes(far) == {0}


async def test_a_root_that_other_users_can_enter_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
    put(root)
    async with NvmeStore(root):
        assert caplog.records == []
    root.chmod(0o755)
    async with NvmeStore(root) as store:
        assert (await store.manifest(M)).model == M
    assert [record.message for record in caplog.records] == [
        f"{str(root)!r} has mode 755: other users can enter it, and hold locks that loads then wait for. "
        "Run `chmod 700` on it."
    ]
    assert root.stat().st_mode & 0o777 == 0o755


@pytest.mark.skipif(os.geteuid() != 0, reason="it starts a process of another user")
async def test_another_user_can_hold_a_lock_in_an_open_root_alone(tmp_path: Path) -> None:
    other = 65534
    for parent in (tmp_path, *tmp_path.parents[:3]):  # one more of several test processes
        parent.chmod(parent.stat().st_mode | 0o055)
    root = tmp_path / "root"
    manifest, _ = put(root)
    with pytest.raises(AssertionError, match="the lock was not taken"), held(root / "m", user=other):
        pass
    root.chmod(0o755)
    (root / "m").chmod(0o755)
    async with NvmeStore(root, lock_limit_s=MOMENT_S) as store:
        with (
            held(root / "m", user=other),
            pytest.raises(StoreBusy, match=f"stopped, of user {other}"),
        ):
            await read(store, manifest.shards[0])
        assert await read(store, manifest.shards[0])


# ------------------------------------------------------------------------------------------ replaced models


def successor() -> Manifest:
    return dataclasses.replace(blank(), max_context_tokens=65)


def replace(root: Path, *, wait: LockWait) -> Manifest:
    options = WriteOptions(replace_existing=True, wait=wait, key="0" * 32)
    manifest = successor()
    with writing(root, manifest, side_files={}, options=options) as writer:
        writer.ranks[0].write(memoryview(content(manifest, seed=1)[0]))
    return writer.manifest


async def test_a_model_that_is_pinned_or_read_is_not_replaced(tmp_path: Path) -> None:
    before, ranks = put(tmp_path)
    async with NvmeStore(tmp_path) as store, NvmeStore(tmp_path) as other:
        await other.pin(M)
        with pytest.raises(StoreBusy, match=r"'m'.*is in use.*nothing was changed"):
            replace(tmp_path, wait=LockWait(MOMENT_S))
        other.unpin(M)
        async with store.open(before.shards[0]) as chunks:
            await anext(chunks)
            with pytest.raises(StoreBusy, match="is in use"):
                replace(tmp_path, wait=LockWait(MOMENT_S))
        assert await store.manifest(M) == before
        assert await read_rank(store, before) == ranks[0]
        after = replace(tmp_path, wait=LockWait(MOMENT_S))
        assert await store.manifest(M) == after != before
    assert os.listdir(tmp_path) == ["m"]


async def test_a_model_that_is_pinned_while_its_successor_is_written_stays_and_the_next_call_resumes(
    tmp_path: Path,
) -> None:
    before, ranks = put(tmp_path)
    manifest = successor()
    options = WriteOptions(replace_existing=True, wait=LockWait(MOMENT_S), key="0" * 32)
    async with NvmeStore(tmp_path) as store:

        async def replace_while_it_is_pinned() -> None:
            with writing(tmp_path, manifest, side_files={}, options=options) as writer:
                writer.ranks[0].write(memoryview(content(manifest, seed=1)[0]))
                await store.pin(M)

        with pytest.raises(StoreBusy, match="is in use"):
            await replace_while_it_is_pinned()
        assert await read_rank(store, before) == ranks[0]
        assert await store.manifest(M) == before
        store.unpin(M)
        with writing(tmp_path, manifest, side_files={}, options=options) as writer:
            assert writer.ranks[0].finished_bytes == before.buffer_bytes
        assert await store.manifest(M) == writer.manifest
        assert await read_rank(store, writer.manifest) == content(manifest, seed=1)[0]


def test_a_replacement_waits_for_a_read_that_ends(tmp_path: Path) -> None:
    put(tmp_path)
    read_and_leave = (
        "import fcntl, os, sys, time; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_SH);"
        "print(flush=True); time.sleep(0.1)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", read_and_leave, str(tmp_path / "m")], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        assert replace(tmp_path, wait=LockWait()).max_context_tokens == 65


# --------------------------------------------------------------------------------------------------- links


async def test_a_model_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    manifest, _ = put(tmp_path / "elsewhere")
    root.mkdir(mode=0o700)
    (root / "m").symlink_to(tmp_path / "elsewhere" / "m")
    async with NvmeStore(root) as store:
        assert store.view().residency == ()
        with pytest.raises(UnsafeFile, match="symbolic link"):
            await store.manifest(M)
        with pytest.raises(UnsafeFile, match="symbolic link"):
            await read(store, manifest.shards[0])
        with pytest.raises(UnsafeFile, match="symbolic link"):
            await store.pin(M)
        with pytest.raises(UnsafeFile, match="symbolic link"):
            await store.remove(M)
    assert (tmp_path / "elsewhere" / "m" / "index.json").is_file()
