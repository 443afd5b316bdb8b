"""The remote tier gives exact bytes or a typed error in any network, and all buffers are returned."""

from __future__ import annotations

import base64
import importlib
import os
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, get_args

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap import ModelId
from hotswap.abc import Manifest
from hotswap.backends.stores import PinnedStore, RemoteStore, TieredStore
from hotswap.backends.stores.remote import store as remote_store
from hotswap.errors import BackendMissing, ConfigError, ShardCorrupt, ShardMissing, StoreError, UnsafeFile
from hotswap.testing import cancel_everywhere
from tests.backends.stores.bad_server import BadServer, Fault, Kind
from tests.backends.stores.models import UNIT, put, read, read_rank

M = ModelId("m")
INDEX = "/m/index.json"

# Faults that the next attempt survives, and faults that it does not. Stalls take time and have own tests.
PASSING = (
    Fault("reset"),
    Fault("reset", after=1000),
    Fault("truncate"),
    Fault("truncate", after=1000),
    Fault("dwindle"),
    Fault("dwindle", after=1000),
    Fault("short"),
    Fault("garbage"),
    *(Fault("status", status=status) for status in (408, 429, 500, 502, 503, 504, 416)),
)


def store_of(server: BadServer, **settings: Any) -> RemoteStore:
    """A store that reads from a server, with short time limits."""
    changed = {"part_bytes": 2 * UNIT, "piece_bytes": 1, "concurrency": 3, "retries": 3, "backoff_s": 0.0}
    return RemoteStore(server.url, **(changed | settings))


@asynccontextmanager
async def serving(root: Path, **settings: Any) -> AsyncGenerator[tuple[BadServer, RemoteStore]]:
    """A server over `root` and a store that reads from it; all buffers must be returned at the end."""
    async with BadServer(root).run() as server, store_of(server, **settings) as store:
        yield server, store
        assert store.num_lent == 0


@asynccontextmanager
async def serving_tiers(root: Path, **settings: Any) -> AsyncGenerator[tuple[BadServer, TieredStore]]:
    """The same below a tier in host memory."""
    host = PinnedStore("1 MiB", chunk_bytes=UNIT)
    async with BadServer(root).run() as server, TieredStore(host, store_of(server, **settings)) as store:
        yield server, store
        assert store.num_lent == 0


def file_of(manifest: Manifest, number: int = 0) -> str:
    return f"/m/{manifest.shards[number].file}"


@pytest.mark.parametrize("size", [1024, UNIT, 5 * UNIT, 23 * UNIT + 512])
async def test_what_was_written_is_read_back_in_order(tmp_path: Path, size: int) -> None:
    written, ranks = put(tmp_path, size=size, world_size=2, file_bytes=8 * UNIT)
    async with serving(tmp_path) as (_, store):
        manifest = await store.manifest(M)
        assert manifest == written
        for rank in (0, 1):
            assert await read_rank(store, manifest, rank) == ranks[rank]


# ---------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("fault", PASSING, ids=str)
async def test_a_fault_that_passes_costs_nothing_but_time(tmp_path: Path, fault: Fault) -> None:
    manifest, ranks = put(tmp_path, size=8 * UNIT, file_bytes=8 * UNIT)
    async with serving(tmp_path) as (server, store):
        server.plan(INDEX, [fault])
        server.plan(file_of(manifest), [None, fault, fault])
        assert await store.manifest(M) == manifest
        assert await read_rank(store, manifest) == ranks[0]


@pytest.mark.parametrize("fault", PASSING, ids=str)
async def test_a_fault_that_stays_is_told_by_name(tmp_path: Path, fault: Fault) -> None:
    manifest, _ = put(tmp_path)
    async with serving(tmp_path) as (server, store):
        server.always(file_of(manifest), fault)
        with pytest.raises(StoreError, match=r"http://127.*rank-0-of-1\.000\.bin.* failed 4 times"):
            await read(store, manifest.shards[0])


async def test_a_server_that_is_gone_is_told_by_name(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path)
    async with BadServer(tmp_path).run() as server:
        url = server.url
    store = RemoteStore(url, retries=1, backoff_s=0)
    for reading in (store.manifest(M), read(store, manifest.shards[0]), store.tokenizer(M)):
        with pytest.raises(StoreError, match=f"{url}/m/.* failed 2 times.*: HTTP error: error sending"):
            await reading


async def test_a_part_goes_on_from_the_last_byte_received(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path, size=2 * UNIT)
    async with serving(tmp_path) as (server, store):
        server.plan(file_of(manifest), [Fault("truncate", after=1000), Fault("truncate", after=1)])
        assert await read_rank(store, manifest) == ranks[0]
        ranges = [request.headers["range"] for request in server.asked(file_of(manifest))]
    assert ranges == ["bytes=0-8191", "bytes=1000-8191", "bytes=1001-8191"]


@pytest.mark.parametrize("after", [0, 1000])
async def test_a_stall_is_a_failure_of_the_attempt(tmp_path: Path, after: int) -> None:
    manifest, ranks = put(tmp_path, size=8 * UNIT, file_bytes=8 * UNIT)
    async with serving(tmp_path, stall_s=0.1, retries=20) as (server, store):
        server.plan(INDEX, [Fault("stall", after=after)])
        server.plan(file_of(manifest), [Fault("stall", after=after)] * 2)
        assert await store.manifest(M) == manifest
        assert await read_rank(store, manifest) == ranks[0]


async def test_a_stall_that_stays_is_told(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path)
    async with serving(tmp_path, stall_s=0.05, retries=1) as (server, store):
        server.always(file_of(manifest), Fault("stall", after=9))
        with pytest.raises(StoreError, match=r"failed 2 times.*no bytes arrived for 0\.05 s"):
            await read(store, manifest.shards[0])


async def test_pauses_double_up_to_a_limit_and_are_drawn_from_the_random_passed_in(tmp_path: Path) -> None:
    class Dice(Random):
        limits: list[float]

        def uniform(self, a: float, b: float) -> float:
            self.limits.append(b)
            return a

    dice = Dice()
    dice.limits = []
    put(tmp_path)
    async with serving(tmp_path, retries=8, backoff_s=0.25, random=dice) as (server, store):
        server.always(INDEX, Fault("status"))
        with pytest.raises(StoreError, match="503"):
            await store.manifest(M)
    assert dice.limits == [0.25, 0.5, 1, 2, 4, 8, 10, 10]


async def test_bytes_outside_of_the_range_are_dropped(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path, size=8 * UNIT, file_bytes=8 * UNIT)
    async with serving(tmp_path) as (server, store):
        server.always(file_of(manifest), Fault("excess"))
        assert await read_rank(store, manifest) == ranks[0]


async def test_a_server_that_ignores_ranges_is_told_once(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path, size=8 * UNIT, file_bytes=8 * UNIT)
    async with serving(tmp_path, concurrency=1) as (server, store):
        server.always(file_of(manifest), Fault("whole"))
        with pytest.raises(StoreError, match="ignores byte ranges"):
            await read(store, manifest.shards[0])
        assert len(server.asked(file_of(manifest))) == 1


@pytest.mark.parametrize("kind", ["etag", "longer"])
async def test_an_object_replaced_under_the_reader_is_refused(tmp_path: Path, kind: Kind) -> None:
    manifest, _ = put(tmp_path, size=8 * UNIT, file_bytes=8 * UNIT)
    async with serving(tmp_path) as (server, store):
        server.plan(file_of(manifest), [None, None])
        server.always(file_of(manifest), Fault(kind))
        with pytest.raises(ShardCorrupt, match="was replaced while it was read"):
            await read(store, manifest.shards[0])


async def test_a_replacement_between_two_attempts_at_a_part_is_seen(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path, size=UNIT)
    async with serving(tmp_path) as (server, store):
        server.plan(file_of(manifest), [Fault("truncate", after=99), Fault("etag")])
        with pytest.raises(ShardCorrupt, match="replaced"):
            await read(store, manifest.shards[0])


async def test_wrong_bytes_are_found_before_the_last_chunk_is_lent(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path, size=8 * UNIT, file_bytes=8 * UNIT)
    async with serving(tmp_path, concurrency=1) as (server, store):
        server.plan(file_of(manifest), [None, Fault("flip", after=5)])
        async with store.open(manifest.shards[0]) as chunks:
            for _ in range(3):
                await anext(chunks)
            with pytest.raises(ShardCorrupt, match=r"rank-0-of-1\.000\.bin.*checksum"):
                await anext(chunks)


@pytest.mark.parametrize("left", [0, UNIT, 5 * UNIT, 8 * UNIT - 1])
async def test_an_object_that_is_too_short_is_refused_without_trying_again(tmp_path: Path, left: int) -> None:
    manifest, _ = put(tmp_path, size=8 * UNIT, file_bytes=8 * UNIT)
    os.truncate(tmp_path / "m" / manifest.shards[0].file, left)
    async with serving(tmp_path, concurrency=1) as (server, store):
        with pytest.raises(ShardCorrupt, match=f"truncated: it ends at byte {left}"):
            await read(store, manifest.shards[0])
        assert len(server.asked(file_of(manifest))) <= 2, "the part, and how long the object is"


@pytest.mark.parametrize("status", [401, 403])
async def test_refused_access_is_told_without_trying_again(tmp_path: Path, status: int) -> None:
    put(tmp_path)
    async with serving(tmp_path) as (server, store):
        server.always(INDEX, Fault("status", status=status))
        with pytest.raises(StoreError, match=f"refused: the server answered {status}.*credentials"):
            await store.manifest(M)
        assert len(server.asked(INDEX)) == 1


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    kind = draw(st.sampled_from([kind for kind in get_args(Kind) if kind != "stall"]))
    return Fault(kind, draw(st.integers(0, 4 * UNIT)), draw(st.sampled_from([401, 404, 416, 429, 500, 503])))


@settings(max_examples=40)
@given(
    schedule=st.lists(st.none() | faults(), max_size=12),
    units=st.integers(1, 12),
    part_units=st.integers(1, 6),
    concurrency=st.integers(1, 4),
)
async def test_any_sequence_of_faults_ends_in_exact_bytes_or_a_typed_error(
    schedule: list[Fault | None], units: int, part_units: int, concurrency: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        manifest, ranks = put(Path(name), size=units * UNIT, file_bytes=units * UNIT)
        async with serving(Path(name), part_bytes=part_units * UNIT, concurrency=concurrency) as (
            server,
            store,
        ):
            server.plan(file_of(manifest), schedule)
            try:
                data = await read_rank(store, manifest)
            except StoreError:
                assert any(schedule), "a store failed without a reason"
            else:
                assert data == ranks[0]
            assert store.num_lent == 0
            server.clear()
            assert await read_rank(store, manifest) == ranks[0], "an earlier failure left something behind"


@settings(max_examples=30)
@given(schedule=st.lists(st.none() | st.sampled_from(PASSING), max_size=3), part_units=st.integers(1, 6))
async def test_no_more_passing_faults_than_retries_never_fail_a_read(
    schedule: list[Fault | None], part_units: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        manifest, ranks = put(Path(name), size=9 * UNIT, file_bytes=9 * UNIT)
        async with serving(Path(name), part_bytes=part_units * UNIT) as (server, store):
            server.plan(file_of(manifest), schedule)
            assert await read_rank(store, manifest) == ranks[0]


# -------------------------------------------------------------------------------------------------- reading


async def test_no_more_is_fetched_ahead_than_there_are_buffers(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path, size=40 * UNIT, file_bytes=40 * UNIT)
    async with serving(tmp_path, concurrency=3) as (server, store), store.open(manifest.shards[0]) as chunks:
        async for chunk in chunks:
            await anyio.wait_all_tasks_blocked()
            starts = [int(request.headers["range"][6:].split("-")[0]) for request in server.requests]
            assert max(starts) <= chunk.offset_bytes + 4 * 2 * UNIT
            assert store.num_lent == 4


async def test_reading_cancelled_amid_faults_gives_everything_back(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path, size=8 * UNIT, file_bytes=8 * UNIT)
    async with serving(tmp_path) as (server, store):

        async def scenario() -> None:
            server.clear()
            server.plan(file_of(manifest), [Fault("truncate", after=10), Fault("status"), Fault("reset")])
            await read(store, manifest.shards[0])

        async def check() -> None:
            assert store.num_lent == 0

        assert await cancel_everywhere(scenario, check) > 3


async def test_a_chunk_kept_too_long_is_an_error_not_other_bytes(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path, size=8 * UNIT, file_bytes=8 * UNIT)
    async with serving(tmp_path) as (_, store), store.open(manifest.shards[0]) as chunks:
        first = await anext(chunks)
        await anext(chunks)
        with pytest.raises(ValueError, match="released"):
            bytes(first.data)


async def test_reading_teaches_the_bandwidth(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path)
    async with serving(tmp_path) as (_, store):
        guess = store.view().tiers[0].bytes_per_s
        await read_rank(store, manifest)
        assert 0 < store.view().tiers[0].bytes_per_s != guess


# ---------------------------------------------------------------------------------------- indices and names


async def test_an_unchanged_index_is_not_sent_again(tmp_path: Path) -> None:
    put(tmp_path)
    async with serving(tmp_path) as (server, store):
        manifest = await store.manifest(M)
        assert await store.manifest(M) is manifest
        assert "if-none-match" in server.asked(INDEX)[-1].headers
        for file in (tmp_path / M).iterdir():
            file.unlink()
        (tmp_path / M).rmdir()
        anew, ranks = put(tmp_path, size=7 * UNIT, seed=1)
        assert await store.manifest(M) == anew
        assert await read_rank(store, anew) == ranks[0]


async def test_missing_models_and_files_are_told_by_name(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path)
    async with serving(tmp_path) as (_, store):
        with pytest.raises(ShardMissing, match=r"no model 'nowhere'.*RemoteStore\.push"):
            await store.manifest(ModelId("nowhere"))
        await store.manifest(M)
        assert store.view().tier_of(M) == "remote"
        for file in (tmp_path / M).iterdir():
            file.unlink()
        with pytest.raises(ShardMissing, match=manifest.shards[0].file):
            await read(store, manifest.shards[0])
        with pytest.raises(ShardMissing):
            await store.manifest(M)
        assert store.view().tier_of(M) is None


async def test_an_index_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path)
    index = tmp_path / "m" / "index.json"
    text = index.read_bytes()
    async with serving(tmp_path) as (server, store):
        index.write_bytes(text.replace(b'"rank-0-of-1.000.bin"', b'"../rank-0-of-1.bin"'))
        with pytest.raises(UnsafeFile, match=f"{server.url}/m/index.json"):
            await store.manifest(M)
        index.write_bytes(text[:-9])
        with pytest.raises(ShardCorrupt, match=f"{server.url}/m/index.json"):
            await store.manifest(M)
        monkeypatch.setattr(remote_store, "_MOST_SMALL_BYTES", 99)
        index.write_bytes(text)
        with pytest.raises(ShardCorrupt, match="over the limit of 99"):
            await store.manifest(M)


@pytest.mark.parametrize("model", ["../m", "a/b"])
async def test_a_model_id_with_slashes_stays_inside_the_store(tmp_path: Path, model: str) -> None:
    async with serving(tmp_path) as (server, store):
        with pytest.raises(ShardMissing):
            await store.manifest(ModelId(model))
        assert server.requests
        assert not any(model in str(request) for request in server.requests)


@pytest.mark.parametrize("model", ["..", "a\\b", "a\nb", ""])
async def test_a_model_id_cannot_lead_elsewhere(tmp_path: Path, model: str) -> None:
    async with serving(tmp_path) as (server, store):
        with pytest.raises(UnsafeFile, match="cannot be called"):
            await store.manifest(ModelId(model))
        assert not server.requests


async def test_the_tokenizer_comes_along(tmp_path: Path, checkpoint: Path) -> None:
    put(tmp_path)
    async with serving(tmp_path) as (_, store):
        assert await store.tokenizer(M) is None
        (tmp_path / "m" / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
        tokenizer = await store.tokenizer(M)
        assert tokenizer is not None
        assert tuple(tokenizer.encode("hello world")) == (1, 2)


async def test_a_password_is_used_and_never_shown(tmp_path: Path) -> None:
    put(tmp_path)
    async with BadServer(tmp_path).run() as server:
        store = RemoteStore(server.url.replace("//", "//me:s3cret%21@"), retries=0)
        await store.manifest(M)
        expected = base64.b64encode(b"me:s3cret!").decode()
        assert server.requests[0].headers["authorization"] == f"Basic {expected}"
        shown = [repr(store), store.url]
        for fault in (
            Fault("status"),
            Fault("status", status=403),
            Fault("garbage"),
            Fault("status", status=404),
        ):
            server.plan(INDEX, [fault])
            with pytest.raises(StoreError) as caught:
                await store.manifest(M)
            assert caught.value.__cause__ is None
            shown.append(str(caught.value))
    for text in shown:
        assert "s3cret" not in text
        assert "127.0.0.1" in text


@pytest.mark.parametrize(
    "url", ["https://host/path?sig=s3cret", "s3://key:s3cret@bucket/x", "https://host/#s3cret"]
)
def test_a_url_that_holds_a_secret_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigError, match="options") as caught:
        RemoteStore(url)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "settings"),
    [
        ("ftp://host/x", {}),
        ("nonsense", {}),
        ("https://", {}),
        ("s3://bucket", {"options": {"no_such_option": "1"}}),
        ("https://host", {"options": {"region": "x"}}),
        ("https://host", {"client_options": {"no_such_option": "1"}}),
        ("https://host", {"part_bytes": 0}),
        ("https://host", {"part_bytes": 1000}),
        ("https://host", {"concurrency": 0}),
        ("https://host", {"retries": -1}),
        ("https://host", {"stall_s": 0}),
    ],
)
def test_a_set_up_that_cannot_work_is_refused_at_once(url: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RemoteStore(url, **settings)


# --------------------------------------------------------------------------------------- below other tiers


async def test_many_readers_of_a_tiered_store_make_one_download(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path, size=16 * UNIT, file_bytes=16 * UNIT)
    read_back: list[bytes] = []
    async with serving_tiers(tmp_path) as (server, store):

        async def reader() -> None:
            read_back.append(await read(store, manifest.shards[0]))

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(reader)
        assert read_back == [ranks[0]] * 5
        assert len(server.asked(file_of(manifest))) == 8
        assert await read_rank(store, manifest) == ranks[0]
        assert len(server.asked(file_of(manifest))) == 8, "the second read comes from host memory"
        assert store.view().tier_of(M) == "pinned"


@pytest.mark.parametrize("fault", [Fault("flip"), Fault("etag"), Fault("status", status=404)], ids=str)
async def test_a_download_that_fails_leaves_the_host_tier_as_it_was(tmp_path: Path, fault: Fault) -> None:
    manifest, ranks = put(tmp_path, size=16 * UNIT, file_bytes=16 * UNIT)
    async with serving_tiers(tmp_path, concurrency=1) as (server, store):
        await store.manifest(M)
        for attempt in (read_rank(store, manifest), store.prefetch(M)):
            server.plan(file_of(manifest), [None, None, fault])
            with pytest.raises(StoreError):
                await attempt
            assert store.num_lent == 0
            assert store.view().tiers[0].used_bytes == 0
        assert await read_rank(store, manifest) == ranks[0]


def test_without_the_library_only_the_remote_store_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("hotswap.backends.stores")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)
    stores = importlib.import_module("hotswap.backends.stores")
    assert stores.NvmeStore
    with pytest.raises(BackendMissing, match=r"pip install 'hotswap\[remote\]'"):
        _ = stores.RemoteStore
    with pytest.raises(AttributeError, match="ClayStore"):
        _ = stores.ClayStore
