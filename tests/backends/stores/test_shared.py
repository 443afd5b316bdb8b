"""Shared host memory in one process, with two stores where a test needs two."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint

from hotswap import ModelId
from hotswap.abc import HostBuffer, Manifest
from hotswap.backends.stores import NvmeStore, SharedStore, TieredStore, segment
from hotswap.backends.stores.segment import Label, digest_of
from hotswap.backends.stores.segment_directory import SegmentDirectory
from hotswap.backends.torch.buffers import in_place
from hotswap.errors import ConfigError, ShardMissing, StoreError, TierFull, UnsafeFile
from hotswap.testing.cancel import cancel_everywhere
from tests.backends.stores.bad_disk import BadDisk, io_error
from tests.backends.stores.models import UNIT, put, read, read_rank
from tests.backends.stores.test_pinned import FakeCuda, with_cuda

M = ModelId("m")


class Machine:
    """A disk with models, and a directory of shared memory, for as many stores as a test wants."""

    def __init__(self, base: Path) -> None:
        self.root = base / "disk"
        self.directory = base / "shared"
        self.disk = BadDisk()

    def put(self, model: str = "m", *, size: int = 5 * UNIT, world_size: int = 1, seed: int = 0) -> Manifest:
        return put(self.root, model, size=size, world_size=world_size, seed=seed)[0]

    def bytes_of(self, manifest: Manifest, rank: int = 0) -> bytes:
        files = self.root / manifest.model
        return b"".join((files / shard.file).read_bytes() for shard in manifest.shards_of(rank))

    def store(self, budget: int | str = "1 MiB", *, linger_s: float = 0.0) -> TieredStore:
        shared = SharedStore(self.directory, budget, chunk_bytes=UNIT, linger_s=linger_s)
        return TieredStore(shared, NvmeStore(self.root, chunk_bytes=UNIT, calls=self.disk))

    def files(self) -> set[str]:
        return set(os.listdir(self.directory)) - {".budget"}

    def maps(self) -> list[str]:
        """The permissions of each mapping of a segment in this process."""
        lines = Path("/proc/self/maps").read_text("utf-8").splitlines()
        return [line.split()[1] for line in lines if str(self.directory) in line]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def size_of(manifest: Manifest) -> int:
    """The bytes of the budget that a model takes."""
    ranks = range(manifest.world_size)
    return sum(Label.of(manifest, rank, digest_of(manifest)).size_bytes for rank in ranks)


def used(store: TieredStore) -> int:
    return store.view().tiers[0].used_bytes


def host(store: TieredStore) -> SharedStore:
    tier = store.tiers[0]
    assert isinstance(tier, SharedStore)
    return tier


@contextmanager
def lent(buffer: HostBuffer | None) -> Iterator[HostBuffer]:
    assert buffer is not None
    yield buffer


async def test_a_model_that_one_store_has_loaded_is_lent_by_the_other_without_reading(
    machine: Machine,
) -> None:
    manifest = machine.put(world_size=2)
    async with machine.store() as one, machine.store() as other:
        await one.prefetch(M)
        num_reads = len(machine.disk.reads)
        for rank in (0, 1):
            async with other.lend(await other.manifest(M), rank) as buffer:
                assert buffer is not None
                assert (bytes(buffer.data), buffer.tier) == (machine.bytes_of(manifest, rank), "shared")
                assert buffer.data.readonly
                assert machine.maps() == ["r--s"]
            assert await read_rank(other, manifest, rank) == machine.bytes_of(manifest, rank)
        assert len(machine.disk.reads) == num_reads
        assert used(one) == used(other) == size_of(manifest)
        assert one.view().residency == other.view().residency
        assert machine.maps() == []


async def test_both_stores_map_the_same_pages(machine: Machine) -> None:
    manifest = machine.put()
    async with (
        machine.store() as one,
        machine.store() as other,
        one.lend(manifest) as mine,
        other.lend(manifest) as theirs,
    ):
        assert mine is not None
        assert theirs is not None
        (file,) = machine.files()
        before = bytes(theirs.data)
        with (machine.directory / file).open("r+b") as pages:  # as a mapping of it would
            pages.seek(-UNIT, os.SEEK_END)
            pages.write(b"here")
        assert bytes(mine.data) == bytes(theirs.data) != before


async def test_what_is_lent_is_found_by_other_processes_in_its_file(machine: Machine) -> None:
    manifest = machine.put(world_size=2)
    async with machine.store() as store:
        for rank in (0, 1):
            async with store.lend(manifest, rank) as buffer:
                assert buffer is not None
                assert buffer.file is not None
                with buffer.file.open("rb") as file:
                    file.seek(buffer.file_offset_bytes)
                    assert file.read(len(buffer.data)) == bytes(buffer.data)


async def test_a_restart_finds_its_models_warm(machine: Machine) -> None:
    manifest = machine.put()
    async with machine.store() as store:
        await store.prefetch(M)
    num_reads = len(machine.disk.reads)
    async with machine.store() as store:
        assert store.view().tier_of(M) == "shared"
        async with store.lend(await store.manifest(M)) as buffer:
            assert buffer is not None
            assert (bytes(buffer.data), buffer.tier) == (machine.bytes_of(manifest), "shared")
        await store.prefetch(M)
    assert len(machine.disk.reads) == num_reads


async def test_weights_of_an_earlier_conversion_are_never_lent(machine: Machine) -> None:
    old = machine.put()
    async with machine.store() as store:
        await store.prefetch(M)
        (machine.root / M).rename(machine.root / "old")
        new = machine.put(seed=1)
        async with machine.store() as restarted:
            assert restarted.view().tier_of(M) == "shared"  # it knows one conversion so far
            assert await restarted.manifest(M) == new
            assert restarted.view().tier_of(M) == "nvme"
            async with restarted.lend(new) as buffer, store.lend(old) as former:
                assert buffer is not None
                assert former is not None
                assert bytes(buffer.data) == machine.bytes_of(new) != bytes(former.data)
            assert [entry.tier for entry in restarted.view().residency if entry.model == M] == [
                "shared",
                "nvme",
            ]


async def test_the_budget_is_shared_and_the_least_recently_used_model_of_all_stores_is_evicted_first(
    machine: Machine,
) -> None:
    manifests = {model: machine.put(model, size=4 * UNIT) for model in "abc"}
    a, b, c = map(ModelId, "abc")
    budget = 2 * size_of(manifests["a"])
    async with machine.store(budget) as one, machine.store(budget) as other:
        await one.prefetch(a)
        await other.prefetch(b)
        await read_rank(one, manifests["b"])
        await read_rank(other, manifests["a"])
        await one.prefetch(c)
        assert [other.view().tier_of(model) for model in (a, b, c)] == ["shared", "nvme", "shared"]
        assert used(one) == used(other) == budget


async def test_a_model_that_another_store_lends_or_pins_stays(machine: Machine) -> None:
    manifests = {model: machine.put(model, size=4 * UNIT) for model in "ab"}
    budget = size_of(manifests["a"])
    async with machine.store(budget) as one, machine.store(budget) as other:
        async with other.lend(manifests["a"]) as buffer:
            with pytest.raises(TierFull, match="one process or another"):
                await one.prefetch(ModelId("b"))
            async with one.lend(manifests["b"]) as nothing:
                assert nothing is None
            assert await read_rank(one, manifests["b"]) == machine.bytes_of(manifests["b"])
            assert buffer is not None
            assert bytes(buffer.data) == machine.bytes_of(manifests["a"])
        other.pin(ModelId("a"))
        with pytest.raises(TierFull):
            await one.prefetch(ModelId("b"))
        other.unpin(ModelId("a"))
        await one.prefetch(ModelId("b"))
        assert other.view().tier_of(ModelId("a")) == "nvme"


async def test_a_pin_ends_with_its_store_and_may_come_before_it_is_open(machine: Machine) -> None:
    manifests = {model: machine.put(model, size=4 * UNIT) for model in "ab"}
    budget = size_of(manifests["a"])
    async with machine.store(budget) as store:
        pinning = machine.store(budget)
        pinning.pin(ModelId("a"))
        async with pinning:
            await pinning.prefetch(ModelId("a"))
            with pytest.raises(TierFull):
                await store.prefetch(ModelId("b"))
        await store.prefetch(ModelId("b"))


async def test_a_drop_waits_for_loans_of_another_store_and_can_be_cancelled(machine: Machine) -> None:
    manifest = machine.put()
    async with machine.store() as one, machine.store() as other:
        await one.prefetch(M)
        async with anyio.create_task_group() as tasks, other.lend(manifest) as buffer:
            with lent(buffer):
                tasks.start_soon(one.drop, M)
                await checkpoint()
                await one.prefetch(M)  # cancels it: otherwise the task group could not end
        assert one.view().tier_of(M) == "shared"
        async with anyio.create_task_group() as tasks, other.lend(manifest) as buffer:
            tasks.start_soon(one.drop, M)
            with lent(buffer):
                assert one.view().tier_of(M) == "shared"
        assert one.view().tier_of(M) == "nvme"
        assert machine.files() == set()


async def test_clear_removes_models_that_are_not_in_use(machine: Machine) -> None:
    manifests = {model: machine.put(model) for model in "abc"}
    async with machine.store() as one, machine.store() as other:
        for model in "abc":
            await one.prefetch(ModelId(model))
        other.pin(ModelId("b"))
        async with other.lend(manifests["a"]) as buffer:
            with lent(buffer):
                assert await host(one).clear() == size_of(manifests["c"])
                assert {str(entry.model) for entry in one.view().residency if entry.tier == "shared"} == {
                    "a",
                    "b",
                }
    assert await _clear_alone(machine) == 2 * size_of(manifests["a"])
    assert machine.files() == set()


async def _clear_alone(machine: Machine) -> int:
    async with machine.store() as store:
        return await host(store).clear()


async def test_a_load_cancelled_anywhere_leaves_nothing(machine: Machine) -> None:
    manifest = machine.put(world_size=2)
    async with machine.store() as store:

        async def load() -> None:
            async with store.lend(manifest, 1) as buffer:
                assert buffer is not None
                await checkpoint()

        async def look() -> None:
            assert store.num_lent == 0
            assert machine.maps() == []
            whole = {name for name in machine.files() if not name.startswith(".")}
            assert machine.files() == whole
            assert used(store) == len(whole) * size_of(manifest) // 2
            await store.drop(M)

        await cancel_everywhere(load, look)


async def test_waiting_for_another_store_cancelled_anywhere_leaves_nothing(machine: Machine) -> None:
    manifest = machine.put()
    (shard, *_) = manifest.shards
    async with machine.store() as store, machine.store() as other:
        async with host(other).reserve(manifest, 0) as reservation, reservation.filling():

            async def wait() -> None:
                with anyio.move_on_after(0.02):
                    await read(store, shard)
                    raise AssertionError("it did not wait")

            async def look() -> None:
                assert store.num_lent == 0

            await cancel_everywhere(wait, look, limit=60)
        assert await read(store, shard) == machine.bytes_of(manifest)[: shard.size_bytes]


async def test_a_store_resumes_the_fill_that_another_left(machine: Machine) -> None:
    manifest = machine.put(size=6 * UNIT)
    first, *rest = manifest.shards
    async with machine.store() as one, machine.store() as other:
        await read(one, first)  # kept, since it was read
        assert machine.files() == {Label.of(manifest, 0, digest_of(manifest)).incoming_name}
        assert one.view().tier_of(M) == "nvme"
        machine.disk.reads.clear()
        await other.prefetch(M)
        assert sum(size for _, size in machine.disk.reads) == sum(shard.size_bytes for shard in rest)
        assert one.view().tier_of(M) == "shared"
        assert await read_rank(one, manifest) == machine.bytes_of(manifest)


async def test_incomplete_segments_are_evicted_first(machine: Machine) -> None:
    whole, half, new = (machine.put(model, size=6 * UNIT) for model in ("whole", "half", "new"))
    budget = 2 * size_of(whole)
    async with machine.store(budget) as store:
        await store.prefetch(whole.model)
        await read(store, half.shards[0])
        await store.prefetch(new.model)
        assert [store.view().tier_of(m.model) for m in (whole, half, new)] == ["shared", "nvme", "shared"]


async def test_a_failed_read_leaves_nothing(machine: Machine) -> None:
    machine.put()
    machine.disk.fault, machine.disk.at = io_error, 1
    async with machine.store() as store:
        with pytest.raises(StoreError):
            await store.prefetch(M)
        assert (machine.files(), machine.maps(), used(store)) == (set(), [], 0)
        await store.prefetch(M)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
async def test_a_model_is_loaded_without_full_memory(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, at: int, number: int
) -> None:
    manifest = machine.put(size=8 * UNIT)
    calls = 0
    fallocate = os.posix_fallocate

    def full(fd: int, start: int, size: int, /) -> None:
        nonlocal calls
        calls += 1
        if calls > at:
            raise OSError(number, os.strerror(number))
        fallocate(fd, start, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(segment, "_RESERVE_BYTES", 2 * UNIT)
    async with machine.store() as store:
        with pytest.raises(TierFull, match="is full"):
            await store.prefetch(M)
        assert (machine.files(), machine.maps(), used(store)) == (set(), [], 0)
        async with store.lend(manifest) as nothing:
            assert nothing is None
        assert await read_rank(store, manifest) == machine.bytes_of(manifest)
        monkeypatch.setattr(os, "posix_fallocate", fallocate)
        await store.prefetch(M)
        assert store.view().tier_of(M) == "shared"


@pytest.fixture
def little(machine: Machine) -> Iterator[Machine]:
    """A machine whose shared memory is a file system of ten pages."""
    machine.directory.mkdir(mode=0o700)
    place = str(machine.directory)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={10 * UNIT},mode=700", "tmpfs", place]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting is not permitted here")
    yield machine
    subprocess.run(["umount", place], check=True)


async def test_a_model_is_loaded_without_a_full_file_system(little: Machine) -> None:
    large, small = little.put("large", size=16 * UNIT), little.put("small", size=4 * UNIT)
    async with little.store() as store:
        with pytest.raises(TierFull, match="No space left"):
            await store.prefetch(large.model)
        assert (little.files(), little.maps(), used(store)) == (set(), [], 0)
        assert await read_rank(store, large) == little.bytes_of(large)
        await store.prefetch(small.model)
        assert store.view().tier_of(small.model) == "shared"


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - UNIT)


def _grow(path: Path) -> None:
    os.truncate(path, path.stat().st_size + UNIT)


def _other_version(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"version": 1', b'"version": 2', 1))


def _not_whole(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(1026)
        file.write(b"\0")


def _foreign(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


def _of_another_model(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"model": "m"', b'"model": "n"', 1))


@pytest.mark.parametrize("damage", [_cut, _grow, _other_version, _not_whole, _foreign, _of_another_model])
async def test_a_segment_that_is_none_is_never_served_but_remade(
    machine: Machine, damage: Callable[[Path], None]
) -> None:
    manifest = machine.put()
    async with machine.store() as store:
        await store.prefetch(M)
        (name,) = machine.files()
        for path in (machine.directory / name, machine.directory / f".{name}.incoming"):
            if not path.exists():
                (machine.directory / name).rename(path)
            damage(path)
            async with machine.store() as fresh, fresh.lend(await fresh.manifest(M)) as buffer:
                assert buffer is not None
                assert (bytes(buffer.data), buffer.tier) == (machine.bytes_of(manifest), "nvme")
            assert machine.files() == {name}
            assert used(store) == size_of(manifest)


async def test_a_damaged_segment_is_not_shown(machine: Machine) -> None:
    machine.put()
    async with machine.store() as store:
        await store.prefetch(M)
    (name,) = machine.files()
    _other_version(machine.directory / name)
    async with machine.store() as store:
        assert store.view().tier_of(M) == "nvme"


def _link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _directory(path: Path) -> None:
    path.mkdir()


def _pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [_link, _directory, _pipe])
@pytest.mark.parametrize("incoming", [False, True])
async def test_a_path_that_is_no_file_is_neither_read_nor_removed(
    machine: Machine, make: Callable[[Path], None], incoming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = machine.put()
    label = Label.of(manifest, 0, digest_of(manifest))
    machine.directory.mkdir(mode=0o700)
    make(machine.directory / (label.incoming_name if incoming else label.name))
    async with machine.store() as store:
        with pytest.raises(UnsafeFile, match=r"store clear"):
            await store.prefetch(M)
        async with store.lend(manifest) as nothing:
            assert nothing is None
        assert await read_rank(store, manifest) == machine.bytes_of(manifest)
        assert len(machine.files()) == 1
    assert [record.message.split(" <")[0] for record in caplog.records] == ["Model 'm' is loaded without"]


async def test_processes_must_name_one_budget(machine: Machine) -> None:
    machine.put()
    async with machine.store(8 * UNIT):
        with pytest.raises(ConfigError, match=f"{8 * UNIT} bytes, this one names {9 * UNIT}"):
            async with machine.store(9 * UNIT):
                pass
        async with machine.store(8 * UNIT):
            pass
    async with machine.store(9 * UNIT):
        pass


async def test_a_smaller_budget_after_a_restart_holds_at_once(machine: Machine) -> None:
    manifests = [machine.put(model, size=4 * UNIT) for model in "ab"]
    async with machine.store() as store:
        for manifest in manifests:
            await store.prefetch(manifest.model)
    budget = size_of(manifests[0])
    async with machine.store(budget) as store:
        assert used(store) == budget
        assert store.view().tier_of(ModelId("b")) == "shared"


async def test_a_directory_that_others_may_write_to_is_refused(machine: Machine) -> None:
    machine.root.mkdir()
    machine.directory.mkdir()
    machine.directory.chmod(0o770)
    with pytest.raises(ConfigError, match="chmod 700"):
        async with machine.store():
            pass
    machine.directory.chmod(0o700)
    async with machine.store():
        pass


async def test_weights_without_checksums_are_not_shared(machine: Machine) -> None:
    manifest = machine.put()
    nameless = replace(manifest, shards=tuple(replace(s, checksum="") for s in manifest.shards))
    async with machine.store() as store:
        with pytest.raises(TierFull, match="without checksums"):
            async with host(store).reserve(nameless, 0):
                pass


async def test_a_host_tier_that_fails_is_passed_by_and_the_log_says_so_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = machine.put()

    def fail(*_: object, **__: object) -> None:
        raise StoreError("Too many open files.")

    async with machine.store() as store:
        await store.manifest(M)
        monkeypatch.setattr(SegmentDirectory, "attach_or_create", fail)
        monkeypatch.setattr(SegmentDirectory, "attach", fail)
        monkeypatch.setattr(SegmentDirectory, "has", lambda *_: True)
        with pytest.raises(StoreError, match="Too many"):
            async with host(store).reserve(manifest, 0):
                pass
        async with store.lend(manifest) as nothing:
            assert nothing is None
        assert await read_rank(store, manifest) == machine.bytes_of(manifest)
    assert ["Too many open files" in record.message for record in caplog.records] == [True]


async def test_a_model_whose_id_is_no_file_name_passes_by(machine: Machine) -> None:
    plain = machine.put()
    shards = tuple(replace(shard, model=ModelId("org\\m")) for shard in plain.shards)
    manifest = replace(plain, model=ModelId("org\\m"), shards=shards)
    async with machine.store() as store:
        tier = host(store)
        await tier.expect(manifest)
        assert not any(map(tier.holds, manifest.shards))
        with pytest.raises(TierFull, match=r"PinnedStore"):
            async with tier.reserve(manifest, 0):
                pass
        with pytest.raises(ShardMissing):
            await tier.manifest(manifest.model)
        async with store.lend(manifest) as nothing:
            assert nothing is None
        await store.drop(manifest.model)
        assert machine.files() == set()


async def test_a_replacement_is_noticed_when_the_model_has_left(machine: Machine) -> None:
    old = machine.put()
    async with machine.store() as store:
        await store.prefetch(M)
        (machine.root / M).rename(machine.root / "old")
        new = machine.put(seed=1)
        assert await store.manifest(M) == old
        await store.drop(M)
        assert await store.manifest(M) == new


async def test_a_store_that_is_not_open_says_so(machine: Machine) -> None:
    manifest = machine.put()
    store = host(machine.store())
    assert store.view().residency == ()
    assert "[0 of 1048576 bytes, 0 in use here]" in repr(store)
    with pytest.raises(ShardMissing):
        await store.manifest(M)
    with pytest.raises(StoreError, match="async with"):
        async with store.lend(manifest):
            pass


async def test_lent_memory_outlives_a_store_that_drops_it(machine: Machine) -> None:
    manifest = machine.put()
    async with machine.store() as store:
        async with store.lend(manifest) as buffer:
            assert buffer is not None
            kept = in_place(buffer.data)
            del buffer
        await store.drop(M)
        assert used(store) == 0
    assert bytes(kept.tolist()) == machine.bytes_of(manifest)


# -------------------------------------------------------------------------------------- pinned for a device


async def test_memory_is_pinned_while_it_is_mapped_and_goes_when_room_is_needed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = {model: machine.put(model, size=4 * UNIT) for model in "ab"}
    a, b = map(ModelId, "ab")
    cuda = FakeCuda()
    with_cuda(monkeypatch, cuda)
    async with machine.store(size_of(manifests["a"]), linger_s=1e9) as store:
        await store.prefetch(a)
        places = dict(cuda.pinned)
        assert list(places.values()) == [manifests["a"].buffer_bytes]
        for shard in manifests["a"].shards:  # which finds it mapped
            async with store.open(shard) as chunks:
                assert (await anext(chunks)).pinned
        assert cuda.pinned == places
        await store.prefetch(b)
        assert (store.view().tier_of(a), store.view().tier_of(b)) == ("nvme", "shared")
        assert len(cuda.pinned) == 1
        await store.drop(b)
        assert cuda.pinned == {}
        await store.prefetch(a)
    assert (cuda.pinned, machine.maps()) == ({}, [])


async def test_what_lingers_lets_go_by_itself(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = {model: machine.put(model, size=4 * UNIT) for model in "ab"}
    cuda = FakeCuda()
    with_cuda(monkeypatch, cuda)
    budget = size_of(manifests["a"])
    async with machine.store(budget) as store, machine.store(budget) as other:
        async with AsyncExitStack() as loans:
            await loans.enter_async_context(store.lend(manifests["a"]))
            assert len(cuda.pinned) == 1
            await loans.enter_async_context(store.lend(manifests["a"]))
        while cuda.pinned:
            await checkpoint()
        while True:  # what was unpinned is let go of next
            with suppress(TierFull):
                await other.prefetch(ModelId("b"))
                break


async def test_the_same_pages_pinned_by_two_are_unpinned_by_each(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = machine.put()
    cuda = FakeCuda()
    with_cuda(monkeypatch, cuda)
    async with machine.store() as one, machine.store() as other, AsyncExitStack() as loans:
        for store in (one, other):
            with lent(await loans.enter_async_context(store.lend(manifest))) as buffer:
                assert buffer.pinned
        assert len(cuda.pinned) == 2
    assert cuda.pinned == {}
