"""A pushed model appears whole or not at all, and reads back unchanged; on files and on S3."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from hotswap import ModelId
from hotswap.backends.stores import NvmeStore, RemoteStore
from hotswap.backends.stores.remote import transfer
from hotswap.errors import ShardCorrupt, ShardMissing, StoreError, UnsafeFile
from hotswap.testing import cancel_everywhere
from tests.backends.stores.bad_server import BadServer
from tests.backends.stores.models import UNIT, put, read_rank

M = ModelId("m")


@pytest.fixture
def far(tmp_path: Path) -> Path:
    directory = tmp_path / "far"
    directory.mkdir()
    return directory


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "near"


@pytest.fixture
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_PART_BYTES", 2 * UNIT)


def over_files(far: Path) -> RemoteStore:
    return RemoteStore(far.as_uri(), part_bytes=2 * UNIT)


# ---------------------------------------------------------------------------------------------------- files


@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("size", [1024, 5 * UNIT, 23 * UNIT + 512])
async def test_a_pushed_model_reads_back_unchanged(near: Path, far: Path, size: int) -> None:
    manifest, ranks = put(near, size=size, world_size=2, file_bytes=8 * UNIT)
    (near / "m" / "tokenizer.json").write_text("{}")
    async with over_files(far) as store:
        assert await store.push(near / "m") == manifest
        assert await store.manifest(M) == manifest
        assert await store.side_files(M) == {"tokenizer.json": b"{}"}
        for rank in (0, 1):
            assert await read_rank(store, manifest, rank) == ranks[rank]
    async with NvmeStore(far) as disk:
        assert await disk.manifest(M) == manifest
    assert {path.name for path in (far / "m").iterdir()} == {path.name for path in (near / "m").iterdir()}


async def test_a_model_can_be_pushed_under_another_name(near: Path, far: Path) -> None:
    _, ranks = put(near)
    async with over_files(far) as store:
        await store.push(near / "m", ModelId("other"))
        assert await read_rank(store, await store.manifest(ModelId("other"))) == ranks[0]
        await store.push(near / "m", ModelId("../other"))
        assert len(os.listdir(far)) == 2  # its name has no slash
        with pytest.raises(UnsafeFile, match="cannot be called"):
            await store.push(near / "m", ModelId("..\\other"))


@pytest.mark.usefixtures("_small_parts")
async def test_a_damaged_model_is_not_stored_until_it_is_repaired(near: Path, far: Path) -> None:
    manifest, ranks = put(near, size=10 * UNIT, file_bytes=5 * UNIT)
    last = near / "m" / manifest.shards[-1].file
    good = last.read_bytes()
    last.write_bytes(b"\1" + good[1:])
    async with over_files(far) as store:
        with pytest.raises(ShardCorrupt, match=last.name):
            await store.push(near / "m")
        with pytest.raises(ShardMissing):
            await store.manifest(M)
        assert not (far / "m" / last.name).exists()
        last.write_bytes(good)
        await store.push(near / "m")
        assert await read_rank(store, manifest) == ranks[0]


@pytest.mark.usefixtures("_small_parts")
async def test_a_push_cancelled_anywhere_leaves_no_model_that_cannot_be_read(near: Path, far: Path) -> None:
    manifest, ranks = put(near, size=10 * UNIT, file_bytes=5 * UNIT)
    async with over_files(far) as store:

        async def look() -> None:
            try:
                there = await store.manifest(M)
            except ShardMissing:
                return
            assert await read_rank(store, there) == ranks[0]
            (far / "m" / "index.json").unlink()

        assert await cancel_everywhere(lambda: store.push(near / "m"), look) > 5
        await store.push(near / "m")
        assert await read_rank(store, manifest) == ranks[0]


async def test_a_model_is_replaced_by_other_weights_only_on_request(near: Path, far: Path) -> None:
    old, old_ranks = put(near)
    _, new_ranks = put(near.parent / "new", seed=1)
    async with over_files(far) as store:
        await store.push(near / "m")
        with pytest.raises(StoreError, match="replace=True"):
            await store.push(near.parent / "new" / "m")
        assert await read_rank(store, await store.manifest(M)) == old_ranks[0]
        await store.push(near.parent / "new" / "m", replace=True)
        assert await read_rank(store, await store.manifest(M)) == new_ranks[0]
        with pytest.raises(ShardCorrupt):
            await read_rank(store, old)


@pytest.mark.usefixtures("_small_parts")
async def test_a_model_whose_replacement_failed_is_not_stored(near: Path, far: Path) -> None:
    put(near)
    manifest, ranks = put(near.parent / "new", seed=1)
    last = near.parent / "new" / "m" / manifest.shards[-1].file
    good = last.read_bytes()
    last.write_bytes(b"\1" + good[1:])
    async with over_files(far) as store:
        await store.push(near / "m")
        with pytest.raises(ShardCorrupt):
            await store.push(near.parent / "new" / "m", replace=True)
        with pytest.raises(ShardMissing):
            await store.manifest(M)
        last.write_bytes(good)
        await store.push(near.parent / "new" / "m")
        assert await read_rank(store, manifest) == ranks[0]


async def test_there_must_be_a_model_to_push(near: Path, far: Path) -> None:
    async with over_files(far) as store:
        with pytest.raises(ShardMissing, match="near"):
            await store.push(near / "m")


async def test_a_server_that_takes_no_files_says_so(near: Path, far: Path) -> None:
    put(near)
    async with BadServer(far).run() as server, RemoteStore(server.url) as store:
        with pytest.raises(StoreError, match=f"Writing '{server.url}/m/rank-0.*404"):
            await store.push(near / "m")


# ------------------------------------------------------------------------------------------------------- S3


@pytest.fixture(scope="module")
def s3() -> Generator[Any]:
    """An S3 server on loopback, and a boto3 client of it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield boto3.client(
            "s3",
            endpoint_url=f"http://{host}:{port}",
            region_name="us-east-1",
            aws_access_key_id="key",
            aws_secret_access_key="s3cret",
        )
    finally:
        server.stop()


def on_s3(s3: Any, bucket: str) -> RemoteStore:
    return RemoteStore(
        f"s3://{bucket}/some/where",
        part_bytes=2 * UNIT,
        options={
            "endpoint": s3.meta.endpoint_url,
            "region": "us-east-1",
            "access_key_id": "key",
            "secret_access_key": "s3cret",
        },
    )


async def test_s3_gives_back_what_was_pushed(near: Path, s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        transfer, "_PART_BYTES", 5 << 20
    )  # the least that S3 takes for all parts but the last
    manifest, ranks = put(near, size=6 << 20, world_size=2, file_bytes=8 << 20)
    (near / "m" / "tokenizer.json").write_text("{}")
    s3.create_bucket(Bucket="there-and-back")
    async with on_s3(s3, "there-and-back") as store:
        with pytest.raises(ShardMissing, match="no model 'm'"):
            await store.manifest(M)
        assert await store.push(near / "m") == manifest
        for rank in (0, 1):
            assert await read_rank(store, manifest, rank) == ranks[rank]
        assert await store.manifest(M) is await store.manifest(M), "its tag says that it is the same"
        assert store.num_lent == 0
    assert "s3cret" not in repr(store)


async def test_s3_is_not_sent_twice_what_it_has(near: Path, s3: Any) -> None:
    manifest, ranks = put(near, size=10 * UNIT, file_bytes=5 * UNIT)
    s3.create_bucket(Bucket="once")
    s3.put_bucket_versioning(Bucket="once", VersioningConfiguration={"Status": "Enabled"})
    last = near / "m" / manifest.shards[-1].file
    good = last.read_bytes()
    last.write_bytes(b"\1" + good[1:])
    async with on_s3(s3, "once") as store:
        with pytest.raises(ShardCorrupt):
            await store.push(near / "m")
        last.write_bytes(good)
        for _ in range(2):
            await store.push(near / "m")
        assert await read_rank(store, manifest) == ranks[0]
    keys = [version["Key"] for version in s3.list_object_versions(Bucket="once")["Versions"]]
    assert sorted(keys) == sorted(
        f"some/where/m/{name}" for name in (*{shard.file for shard in manifest.shards}, "index.json")
    )
    assert "Uploads" not in s3.list_multipart_uploads(Bucket="once"), "an upload was left half done"


async def test_s3_weights_that_were_tampered_with_are_refused(near: Path, s3: Any) -> None:
    manifest, _ = put(near)
    s3.create_bucket(Bucket="tampered")
    async with on_s3(s3, "tampered") as store:
        await store.push(near / "m")
        shard = manifest.shards[0]
        key = f"some/where/m/{shard.file}"
        s3.put_object(Bucket="tampered", Key=key, Body=bytes(shard.size_bytes))
        with pytest.raises(ShardCorrupt, match=f"s3://tampered/{key}.*checksum"):
            await read_rank(store, manifest)
        s3.put_object(Bucket="tampered", Key=key, Body=b"short")
        with pytest.raises(ShardCorrupt, match=f"s3://tampered/{key}.*truncated"):
            await read_rank(store, manifest)
        s3.delete_object(Bucket="tampered", Key=key)
        with pytest.raises(ShardMissing, match=f"s3://tampered/{key}"):
            await read_rank(store, manifest)
