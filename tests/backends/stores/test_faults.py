"""A failing disk gives the right bytes or a typed error that names the file, and keeps no resources."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap.abc import HostChunk, Manifest, Shard
from hotswap.backends.memory import aligned_buffer
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.errors import ShardCorrupt, ShardMissing, StoreError
from hotswap.testing.cancel import cancel_everywhere
from tests.backends.stores import bad_disk
from tests.backends.stores.bad_disk import BadDisk
from tests.backends.stores.models import UNIT, collect, exhaust, put, read, read_rank

Read: TypeAlias = Callable[[NvmeStore, Shard], Awaitable[bytes]]

HARMLESS = [bad_disk.short, bad_disk.ragged]
FATAL = [bad_disk.io_error, bad_disk.stale, bad_disk.end]
NUM_PIECES = 9


async def place(store: NvmeStore, shard: Shard, *, unaligned: bool = False) -> bytes:
    """Read a shard into a buffer, and return its bytes."""
    start = 100 if unaligned else 0
    target = aligned_buffer(shard.size_bytes + start)[start:]
    chunk = await store.read_into(shard, target)
    assert chunk == HostChunk(shard.buffer_offset_bytes, target, "nvme", buffered=chunk.buffered)
    return bytes(target)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest, bytes]:
    root = tmp_path_factory.mktemp("faults")
    manifest, ranks = put(root, size=NUM_PIECES * UNIT - 100, file_bytes=NUM_PIECES * UNIT)
    return root, manifest, ranks[0]


@pytest.mark.parametrize("method", [read, place])
@given(
    fault=st.sampled_from([*HARMLESS, *FATAL, bad_disk.flipped]),
    at=st.integers(0, NUM_PIECES - 1),
    threads=st.integers(1, 4),
    depth=st.integers(1, 5),
    pieces=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
async def test_a_fault_anywhere_gives_the_right_bytes_or_a_typed_error(
    model: tuple[Path, Manifest, bytes],
    method: Read,
    fault: bad_disk.Fault,
    at: int,
    threads: int,
    depth: int,
    pieces: int,
) -> None:
    root, manifest, whole = model
    shard = manifest.shards[0]
    num_reads = -(-NUM_PIECES // pieces)
    disk = BadDisk(fault=fault, at=at % num_reads)
    async with NvmeStore(root, chunk_bytes=pieces * UNIT, threads=threads, depth=depth, calls=disk) as store:
        if fault in HARMLESS:
            assert await method(store, shard) == whole
        else:
            expected = StoreError if fault in (bad_disk.io_error, bad_disk.stale) else ShardCorrupt
            with pytest.raises(expected, match=shard.file):
                await method(store, shard)
        assert store.num_lent == 0
        assert not disk.open_fds
        disk.fault = None
        assert await method(store, shard) == whole
    assert all(offset + size <= shard.size_bytes for offset, size in disk.reads)


@given(at=st.integers(0, NUM_PIECES - 1))
@settings(max_examples=10, deadline=None)
async def test_what_came_before_a_fault_is_lent_in_order(
    model: tuple[Path, Manifest, bytes], at: int
) -> None:
    root, manifest, whole = model
    got = bytearray()

    def fail_there(fd: int, buffer: memoryview, offset: int) -> int:
        return (
            bad_disk.io_error(fd, buffer, offset) if offset == at * UNIT else os.preadv(fd, [buffer], offset)
        )

    async with NvmeStore(root, chunk_bytes=UNIT, calls=BadDisk(fault=fail_there)) as store:
        with pytest.raises(StoreError, match="Input/output error"):
            await collect(store, manifest.shards[0], got)
    assert bytes(got) == whole[: at * UNIT]


@pytest.mark.parametrize("method", [read, place])
@pytest.mark.parametrize("harm", ["write", "truncate", "vanish", "replace"])
async def test_a_file_changed_under_the_reader(tmp_path: Path, harm: str, method: Read) -> None:
    manifest, ranks = put(tmp_path, size=8 * UNIT, file_bytes=8 * UNIT)
    shard = manifest.shards[0]
    file = tmp_path / "m" / shard.file

    def meanwhile(fd: int, buffer: memoryview, offset: int) -> int:
        if offset == 2 * UNIT:
            if harm == "write":
                os.utime(file, ns=(0, 0))
            elif harm == "truncate":
                os.truncate(file, 2 * UNIT)
            elif harm == "vanish":
                file.unlink()
            else:
                shutil.copyfile(file, other := file.with_name("other"))
                os.replace(other, file)
        return os.preadv(fd, [buffer], offset)

    disk = BadDisk(fault=meanwhile)
    async with NvmeStore(tmp_path, chunk_bytes=UNIT, verify="never", threads=1, calls=disk) as store:
        if harm in ("vanish", "replace"):  # the file that was opened is still whole
            assert await method(store, shard) == ranks[0]
        else:
            with pytest.raises(ShardCorrupt, match=rf"{shard.file}.*(truncated|while it was being read)"):
                await method(store, shard)
        assert store.num_lent == 0
        if harm == "vanish":
            with pytest.raises(ShardMissing, match=shard.file):
                await method(store, shard)


async def test_two_files_are_not_mixed_where_direct_reads_end(tmp_path: Path) -> None:
    """The file is opened again for buffered reads, and may have been replaced."""
    manifest, _ = put(tmp_path, size=8 * UNIT, file_bytes=8 * UNIT)
    file = tmp_path / "m" / manifest.shards[0].file

    def replace_and_refuse(fd: int, buffer: memoryview, offset: int) -> int:
        other = file.with_name("other")
        other.write_bytes(bytes(file.stat().st_size))
        os.replace(other, file)
        return bad_disk.ragged(fd, buffer, offset)

    disk = BadDisk(fault=replace_and_refuse, at=3)
    async with NvmeStore(tmp_path, chunk_bytes=UNIT, verify="never", calls=disk) as store:
        with pytest.raises(ShardCorrupt, match="replaced while it was being read"):
            await read(store, manifest.shards[0])
    assert not disk.open_fds


@pytest.mark.parametrize("fault", FATAL)
async def test_the_next_tier_is_tried_and_the_failing_one_stays_as_it_was(
    tmp_path: Path, fault: bad_disk.Fault
) -> None:
    manifest, ranks = put(tmp_path / "bad", size=4 * UNIT, file_bytes=4 * UNIT)
    shutil.copytree(tmp_path / "bad", tmp_path / "good")
    bad = NvmeStore(
        tmp_path / "bad", name="bad", chunk_bytes=UNIT, calls=BadDisk(fault=fault, at=0), threads=1
    )
    good = NvmeStore(tmp_path / "good", name="good", chunk_bytes=UNIT)
    async with TieredStore(bad, good) as store:
        before = bad.view()
        assert await read_rank(store, manifest) == ranks[0]
        assert bad.view().residency == before.residency
        assert store.num_lent == 0


async def test_a_fault_leaves_the_host_tier_empty(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path, size=4 * UNIT, file_bytes=4 * UNIT)
    disk = BadDisk(fault=bad_disk.flipped, at=3)
    host = PinnedStore("1 MiB")
    async with TieredStore(host, NvmeStore(tmp_path, chunk_bytes=UNIT, calls=disk)) as store:
        with pytest.raises(ShardCorrupt, match="checksum"):
            await read_rank(store, manifest)
        assert host.view().residency == ()
        assert await read_rank(store, manifest) == ranks[0]


async def test_nothing_is_compared_where_the_disk_is_trusted(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path, size=4 * UNIT, file_bytes=4 * UNIT)
    disk = BadDisk(fault=bad_disk.flipped, at=0)
    async with NvmeStore(tmp_path, verify="never", calls=disk) as store:
        assert len(await read(store, manifest.shards[0])) == 4 * UNIT


async def test_refused_direct_reads_are_told_in_the_chunks(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path)
    for disk in (BadDisk(refuse=True), BadDisk()):
        async with NvmeStore(tmp_path, calls=disk) as store, store.open(manifest.shards[0]) as chunks:
            assert (await anext(chunks)).buffered is disk.refuse
            await exhaust(chunks)
            target = aligned_buffer(manifest.shards[0].size_bytes)
            whole = await store.read_into(manifest.shards[0], target)
            assert whole.buffered is disk.refuse
            assert bytes(target) == ranks[0][: len(target)]


async def test_a_missing_file_is_not_taken_for_a_refusal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest, _ = put(tmp_path)
    (tmp_path / "m" / manifest.shards[0].file).unlink()
    async with NvmeStore(tmp_path) as store:
        with pytest.raises(ShardMissing):
            await read(store, manifest.shards[0])
        caplog.clear()
        async with store.open(manifest.shards[1]) as chunks:
            assert not (await anext(chunks)).buffered
    assert not caplog.records


async def test_a_destination_off_the_page_is_filled_too(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path, size=8 * UNIT, file_bytes=8 * UNIT)
    async with NvmeStore(tmp_path, chunk_bytes=UNIT) as store:
        assert await place(store, manifest.shards[0], unaligned=True) == ranks[0]
        for wrong in (aligned_buffer(UNIT), memoryview(bytes(8 * UNIT))):
            with pytest.raises(ValueError, match=r"give \d+ writable"):
                await store.read_into(manifest.shards[0], wrong)
        assert store.num_lent == 0


async def test_reading_into_place_cancelled_anywhere_writes_no_more(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path, size=8 * UNIT, file_bytes=8 * UNIT)
    disk = BadDisk()
    async with NvmeStore(tmp_path, chunk_bytes=UNIT, calls=disk) as store:

        async def look() -> None:
            assert not disk.open_fds

        await cancel_everywhere(lambda: place(store, manifest.shards[0]), look)
        assert await place(store, manifest.shards[0]) == ranks[0]


def test_a_store_without_buffers_or_threads_is_refused() -> None:
    with tempfile.TemporaryDirectory() as root:
        for wrong in ({"depth": 0}, {"threads": 0}, {"chunk_bytes": 0}, {"chunk_bytes": UNIT + 1}):
            with pytest.raises(ValueError, match=r"is 0|must be a multiple"):
                NvmeStore(root, **wrong)  # type: ignore[arg-type]
