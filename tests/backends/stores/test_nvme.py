"""The disk tier reads the bytes that were written, or raises a typed error that names the file."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hotswap import ModelId, Residency
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.errors import ShardCorrupt, ShardMissing, StoreError, UnsafeFile
from tests.backends.stores.models import UNIT, exhaust, put, read, read_rank


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [1024, UNIT, 5 * UNIT, 9 * UNIT + 512])
async def test_what_was_written_is_read_back_in_order(tmp_path: Path, size: int, direct: bool) -> None:
    written, ranks = put(tmp_path, size=size, world_size=2, file_bytes=4 * UNIT)
    async with NvmeStore(tmp_path, chunk_bytes=UNIT, direct=direct) as store:
        manifest = await store.manifest(ModelId("m"))
        assert manifest == written
        for rank in (0, 1):
            assert await read_rank(store, manifest, rank) == ranks[rank]
        assert store.num_lent == 0


async def test_a_chunk_kept_too_long_is_an_error_not_other_bytes(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path)
    async with NvmeStore(tmp_path, chunk_bytes=UNIT) as store, store.open(manifest.shards[0]) as chunks:
        first = await anext(chunks)
        await anext(chunks)
        with pytest.raises(ValueError, match="released"):
            bytes(first.data)


async def test_the_view_shows_the_models(tmp_path: Path) -> None:
    one, _ = put(tmp_path, "one")
    async with NvmeStore(tmp_path, budget="1 MiB") as store:
        two, _ = put(tmp_path, "two", size=2 * UNIT)
        assert store.view().tier_of(ModelId("two")) is None
        await store.manifest(ModelId("two"))
        view = store.view()
    assert view.tier_of(ModelId("one")) == view.tier_of(ModelId("two")) == "nvme"
    assert view.tiers[0].used_bytes == one.weight_bytes + two.weight_bytes
    assert view.tiers[0].capacity_bytes == 1 << 20


async def test_opening_a_store_reads_no_list_of_tensors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest, _ = put(tmp_path)
    index = tmp_path / "m" / "index.json"
    index.write_bytes(index.read_bytes().replace(b'"head"', b'"HEAD"'))  # against its checksum
    async with NvmeStore(tmp_path) as store:
        assert store.view().residency == (
            Residency(model=manifest.model, tier="nvme", size_bytes=manifest.weight_bytes),
        )
        with pytest.raises(ShardCorrupt, match="checksum"):
            await store.manifest(manifest.model)
        assert store.view().residency == ()
    assert caplog.records == []


async def test_a_cut_index_is_found_when_the_store_opens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path)
    index = tmp_path / "m" / "index.json"
    os.truncate(index, index.stat().st_size - 9)
    async with NvmeStore(tmp_path) as store:
        assert store.view().residency == ()
    assert "'m' is not used" in caplog.text


async def test_a_view_makes_no_entry_anew_for_a_model_that_has_not_changed(tmp_path: Path) -> None:
    put(tmp_path, "one")
    async with TieredStore(PinnedStore("1 MiB"), NvmeStore(tmp_path)) as store:
        await store.prefetch(ModelId("one"))
        before = store.view().residency
        assert store.view().residency is before
        put(tmp_path, "two")
        await store.manifest(ModelId("two"))
        after = store.view().residency
        assert after != before
        assert [entry.model for entry in after] == ["one", "one", "two"]
        assert after[1] is before[1]


async def test_reading_teaches_the_bandwidth(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path)
    async with NvmeStore(tmp_path) as store:
        guess = store.view().tiers[0].bytes_per_s
        await read_rank(store, manifest)
        assert 0 < store.view().tiers[0].bytes_per_s != guess


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def _foreign(file: Path) -> None:
    file.write_bytes(os.urandom(file.stat().st_size))


@pytest.mark.parametrize("damage", [_truncate, _flip, _foreign])
async def test_a_damaged_data_file_is_refused_by_name(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    manifest, ranks = put(tmp_path)
    put(tmp_path, "other")
    last = manifest.shards_of(0)[-1]
    damage(tmp_path / "m" / last.file)
    async with NvmeStore(tmp_path, chunk_bytes=UNIT) as store:
        with pytest.raises(ShardCorrupt, match=f"{last.file}.*hotswap store add"):
            await read(store, last)
        assert await read(store, manifest.shards[0]) == ranks[0][: 2 * UNIT]
        assert await read_rank(store, await store.manifest(ModelId("other")))
        assert store.num_lent == 0


async def test_a_truncated_file_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path)
    _truncate(tmp_path / "m" / manifest.shards[1].file)
    async with NvmeStore(tmp_path) as store:
        assert store.view().residency == ()
        with pytest.raises(ShardCorrupt, match=manifest.shards[1].file):
            await store.manifest(ModelId("m"))


async def test_a_file_that_shrinks_under_the_reader_is_refused(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path, size=64 * UNIT, file_bytes=64 * UNIT)
    async with NvmeStore(tmp_path, chunk_bytes=UNIT) as store:
        async with store.open(manifest.shards[0]) as chunks:
            await anext(chunks)
            os.truncate(tmp_path / "m" / manifest.shards[0].file, 10 * UNIT)
            with pytest.raises(ShardCorrupt, match="truncated"):
                await exhaust(chunks)
        assert store.num_lent == 0


async def test_missing_files_and_models_are_told_by_name(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path)
    (tmp_path / "m" / manifest.shards[0].file).unlink()
    async with NvmeStore(tmp_path) as store:
        with pytest.raises(ShardMissing, match=manifest.shards[0].file):
            await store.manifest(ModelId("m"))
        with pytest.raises(ShardMissing, match=manifest.shards[0].file):
            await read(store, manifest.shards[0])
        with pytest.raises(ShardMissing, match="nowhere"):
            await store.manifest(ModelId("nowhere"))


@pytest.mark.parametrize("model", ["../m", "/etc", "..", "a/b"])
async def test_a_model_id_cannot_lead_out_of_the_root(tmp_path: Path, model: str) -> None:
    put(tmp_path)
    async with NvmeStore(tmp_path / "a") as store:
        with pytest.raises(StoreError, match=r"cannot be called|holds no model"):
            await store.manifest(ModelId(model))


async def test_links_and_pipes_are_refused(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path)
    linked, piped, _ = manifest.shards
    target = tmp_path / "m" / linked.file
    target.rename(tmp_path / "elsewhere.bin")
    target.symlink_to(tmp_path / "elsewhere.bin")
    (tmp_path / "m" / piped.file).unlink()
    os.mkfifo(tmp_path / "m" / piped.file)
    async with NvmeStore(tmp_path) as store:
        for shard in (linked, piped):
            with pytest.raises(UnsafeFile, match=shard.file):
                await read(store, shard)


async def test_a_block_left_early_returns_its_buffers_and_its_own_error(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path)
    async with NvmeStore(tmp_path, chunk_bytes=UNIT) as store:

        async def fail_while_reading() -> None:
            async with store.open(manifest.shards[0]) as chunks:
                await anext(chunks)
                assert store.num_lent > 0
                raise KeyError("the reader's own")

        with pytest.raises(KeyError, match="the reader's own"):
            await fail_while_reading()
        assert store.num_lent == 0
        assert await read_rank(store, manifest) == ranks[0]


async def test_refused_direct_reads_go_on_buffered_and_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manifest, ranks = put(tmp_path)
    real, attempts = os.preadv, list[int]()

    def refusing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            attempts.append(fd)
            raise OSError(errno.EINVAL, "as on some file systems")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", refusing)
    async with NvmeStore(tmp_path, chunk_bytes=UNIT, threads=1) as store:
        assert await read_rank(store, manifest) == ranks[0]
        assert await read_rank(store, manifest) == ranks[0]
    assert len(attempts) <= 1
    assert [record.message for record in caplog.records].count(
        f"{str(tmp_path)!r} refuses direct reads; going on through the page cache."
    ) == 1


async def test_a_read_error_is_told_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, _ = put(tmp_path)

    def broken(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    async with NvmeStore(tmp_path) as store:
        with pytest.raises(StoreError, match=f"{manifest.shards[0].file}.*Input/output error"):
            await read(store, manifest.shards[0])
        assert store.num_lent == 0
