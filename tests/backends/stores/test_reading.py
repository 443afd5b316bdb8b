"""Reading with several threads: order, checksums, memory, and the event loop."""

from __future__ import annotations

import subprocess
import sys
import threading
import zlib
from pathlib import Path

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap.backends.crc import combine, crc32, fastest
from hotswap.backends.memory import address_of, aligned_buffer
from hotswap.backends.stores import NvmeStore
from hotswap.backends.stores.bandwidth import Meter
from hotswap.backends.stores.pieces import BufferPool, Ring
from hotswap.errors import ShardCorrupt, StoreError
from tests.backends.stores.models import UNIT, collect, exhaust, first_chunk, put, read
from tests.patience import PATIENCE_S

RING_BYTES = 16 << 20
SLACK_BYTES = 64 << 20
MODEL_BYTES = 192 << 20


@given(st.lists(st.binary(max_size=300), max_size=5), st.integers(0, 70_000))
def test_sums_of_pieces_make_the_sum_of_the_whole(pieces: list[bytes], zeros: int) -> None:
    pieces = [*pieces, bytes(zeros), b"end"]
    whole = 0
    for piece in pieces:
        whole = combine(whole, zlib.crc32(piece), len(piece))
    assert whole == zlib.crc32(b"".join(pieces))


@given(st.binary(max_size=10_000), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_the_fast_sum_is_that_of_zlib(data: bytes, skip: int, before: int) -> None:
    view = memoryview(bytearray(data))[skip:]  # off any alignment
    assert crc32(view, before) == zlib.crc32(view, before)
    assert crc32(data, 0) == zlib.crc32(data)


def test_sums_need_nothing_but_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)  # as where it is not installed
    assert fastest() is zlib.crc32


@given(
    size=st.integers(1, 40),
    pieces=st.integers(1, 4),
    depth=st.integers(1, 5),
    threads=st.integers(1, 5),
)
@settings(max_examples=30, deadline=None)
async def test_any_shape_of_the_ring_gives_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, size: int, pieces: int, depth: int, threads: int
) -> None:
    root = tmp_path_factory.mktemp("shape")
    manifest, ranks = put(root, size=size * UNIT, file_bytes=40 * UNIT)
    async with NvmeStore(root, chunk_bytes=pieces * UNIT, depth=depth, threads=threads) as store:
        assert await read(store, manifest.shards[0]) == ranks[0]
        assert store.num_lent == 0


async def test_threads_read_on_while_a_chunk_is_lent(tmp_path: Path) -> None:
    """And not further than the ring is deep."""
    manifest, _ = put(tmp_path, size=32 * UNIT, file_bytes=32 * UNIT)
    async with NvmeStore(tmp_path, chunk_bytes=UNIT, depth=5, threads=3) as store:
        async with store.open(manifest.shards[0]) as chunks:
            await anext(chunks)
            assert store.num_lent == 5
            await exhaust(chunks)
        assert store.num_lent == 0


async def test_a_chunk_asked_for_after_the_block_was_left_is_an_error(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path, size=32 * UNIT, file_bytes=32 * UNIT)
    async with NvmeStore(tmp_path, chunk_bytes=UNIT) as store:
        async with store.open(manifest.shards[0]) as chunks:
            await anext(chunks)
        with pytest.raises(StoreError, match="its block was left"):
            await anext(chunks)


async def test_a_shielded_reader_in_a_cancelled_scope_comes_to_an_end(tmp_path: Path) -> None:
    """Whether its threads had begun or not, it reads to the end or is told that it cannot."""
    manifest, ranks = put(tmp_path, size=32 * UNIT, file_bytes=32 * UNIT)
    async with NvmeStore(tmp_path, chunk_bytes=UNIT) as store:
        for num_before in (0, 1, 3):
            got = bytearray()
            with anyio.CancelScope() as scope:
                async with store.open(manifest.shards[0]) as chunks:
                    for _ in range(num_before):
                        got += (await anext(chunks)).data
                    scope.cancel()
                    with anyio.CancelScope(shield=True):
                        failure = ""
                        try:
                            async for chunk in chunks:
                                got += chunk.data
                        except StoreError as exc:
                            failure = str(exc)
                        assert bytes(got) == ranks[0] or "its block was left" in failure
            assert store.num_lent == 0


async def test_several_readers_of_few_buffers_do_not_wait_for_each_other(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path, size=8 * UNIT, file_bytes=8 * UNIT)
    shard = manifest.shards[0]
    async with NvmeStore(tmp_path, chunk_bytes=UNIT, depth=1, threads=4) as store:
        async with store.open(shard) as one, store.open(shard) as two, store.open(shard) as three:
            await anext(one)
            await anext(two)
            await anext(three)
            assert await read(store, shard) == ranks[0]
            for chunks in (three, one, two):
                await exhaust(chunks)
        assert store.num_lent == 0


async def test_buffers_are_kept_for_the_next_read_and_no_more_than_one_ring(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path, size=8 * UNIT, file_bytes=8 * UNIT)
    shard = manifest.shards[0]
    pool = BufferPool(UNIT, keep=2)
    taken = [pool.take() for _ in range(4)]
    places = [address_of(buffer) for buffer in taken]
    for buffer in taken:
        pool.put(buffer)
    assert pool.num_lent == 0
    assert {address_of(pool.take()), address_of(pool.take())} == set(places[:2])
    async with NvmeStore(tmp_path, chunk_bytes=UNIT, depth=2) as store:
        assert (await first_chunk(store, shard)).offset_bytes == 0
        assert store.num_lent == 0


def test_the_next_piece_in_order_always_has_a_buffer() -> None:
    ring = Ring(6, [memoryview(bytearray(1)) for _ in range(2)])
    first, second = ring.claim(), ring.claim()
    assert first is not None
    assert second is not None
    assert (first[0], second[0]) == (0, 1)
    assert ring.take() is None
    assert not ring.fill(1, second[1]), "no consumer waits for piece 1"
    assert ring.fill(0, first[1]), "the consumer waits for piece 0"
    lent = ring.take()
    assert isinstance(lent, memoryview)
    ring.put_back(lent)
    third = ring.claim()
    assert third is not None
    assert third[0] == 2


def test_a_ring_that_stops_ends_its_threads() -> None:
    ring = Ring(6, [])
    claims: list[object] = []
    thread = threading.Thread(target=lambda: claims.append(ring.claim()))
    thread.start()
    ring.stop()
    thread.join(PATIENCE_S)
    assert claims == [None]


@pytest.mark.parametrize("size", [1, UNIT, (2 << 20) - 1, 2 << 20, (5 << 20) + 3])
def test_buffers_begin_on_a_page_and_are_as_long_as_asked(size: int) -> None:
    buffer = aligned_buffer(size)
    assert len(buffer) == size
    assert address_of(buffer) % (UNIT if size < 2 << 20 else 2 << 20) == 0
    buffer[-1] = 7
    assert buffer[-1] == 7


def test_overlapping_reads_are_not_counted_twice() -> None:
    """Two threads that read 100 bytes each within the same second: 200 bytes a second, not 100."""
    now = iter([0.0, 1.0, 1.0])
    meter = Meter(1.0, lambda: next(now))
    with meter.reading(100), meter.reading(100):
        pass
    assert meter.bytes_per_s == pytest.approx(200, rel=0.03)


async def test_the_last_bytes_are_not_lent_before_the_whole_was_compared(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path, size=8 * UNIT, file_bytes=8 * UNIT)
    shard = manifest.shards[0]
    file = tmp_path / "m" / shard.file
    file.write_bytes(b"\0" + ranks[0][1:] if ranks[0][0] else b"\1" + ranks[0][1:])
    got = bytearray()
    async with NvmeStore(tmp_path, chunk_bytes=UNIT, depth=8) as store:
        with pytest.raises(ShardCorrupt, match="checksum"):
            await collect(store, shard, got)
    assert len(got) < shard.size_bytes


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak of memory")
@pytest.mark.parametrize("method", ["lend", "into"])
def test_loading_takes_a_ring_of_memory_and_little_more(tmp_path: Path, method: str) -> None:
    """In a process of its own, since memory that another test has freed would be used again unseen."""
    script = f"""
import re, anyio
from pathlib import Path
from hotswap.backends.memory import aligned_buffer
from hotswap.backends.stores import NvmeStore
from tests.backends.stores.models import UNIT, blank, exhaust
from hotswap.backends.stores.writer import write_model

def memory(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

async def main(root):
    piece = memoryview(bytes(1 << 20))
    manifest = write_model(root, blank(size={MODEL_BYTES}), [[piece] * {MODEL_BYTES >> 20}])
    target = aligned_buffer(manifest.buffer_bytes if {method == "into"} else 1)
    for start in range(0, len(target), 4096):
        target[start] = 1
    async with NvmeStore(root, chunk_bytes="4 MiB", depth={RING_BYTES >> 22}) as store:
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        for shard in manifest.shards:
            if {method == "into"}:
                await store.read_into(shard, target[shard.buffer_offset_bytes:][:shard.size_bytes])
            else:
                async with store.open(shard) as chunks:
                    await exhaust(chunks)
        print(memory("VmHWM") - before)

anyio.run(main, Path({str(tmp_path)!r}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    assert 0 <= int(done.stdout) <= RING_BYTES + SLACK_BYTES
