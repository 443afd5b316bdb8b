"""The disk tier under its budget: eviction order, models in use, and crashes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from anyio import to_thread
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotswap import Model, ModelId
from hotswap.abc import Manifest
from hotswap.backends.stores import NvmeStore
from hotswap.backends.stores.disk_directory import DiskDirectory
from hotswap.backends.stores.index import load_index
from hotswap.backends.stores.locks import locked
from hotswap.errors import ShardCorrupt, ShardMissing, StoreError, TierFull
from tests.backends.stores.models import UNIT, put, read, read_rank

ROOT = Path(__file__).parents[3]
SIZE = 5 * UNIT


class Elsewhere:
    """Models in another directory, and their admission into a disk tier."""

    def __init__(self, root: Path, *models: str, size: int = SIZE) -> None:
        self.models: dict[str, tuple[Manifest, list[bytes]]] = {
            model: put(root, model, size=size, world_size=2) for model in models
        }

    def manifest(self, model: str) -> Manifest:
        return self.models[model][0]

    async def admit(self, store: NvmeStore, model: str) -> None:
        manifest, ranks = self.models[model]
        async with store.admit(manifest) as admission:
            for shard in manifest.shards:
                async with admission.shard(shard) as file:
                    end = shard.buffer_offset_bytes + shard.size_bytes
                    await file.write(memoryview(ranks[shard.rank][shard.buffer_offset_bytes : end]))
                    file.finish()
            await admission.commit({"tokenizer.json": b"{}"})


def there(root: Path) -> set[str]:
    """The models of a directory; hidden entries must not outlive the process that made them."""
    names = set(os.listdir(root))
    assert not {name for name in names if name.startswith(".")}
    return names


def data_bytes(root: Path) -> int:
    """The bytes of all data files, hidden ones included."""
    return sum(file.stat().st_size for file in root.rglob("*.bin"))


async def test_the_least_recently_read_model_is_evicted_first_also_after_a_restart(tmp_path: Path) -> None:
    here = tmp_path / "here"
    elsewhere = Elsewhere(tmp_path / "elsewhere", "a", "b", "c", "d", "e")
    budget = 3 * elsewhere.manifest("a").weight_bytes
    async with NvmeStore(here, budget=budget) as store:
        for model in "abc":
            await elsewhere.admit(store, model)
        await read(store, elsewhere.manifest("a").shards[0])
    async with NvmeStore(here, budget=budget) as store:
        await elsewhere.admit(store, "d")
        assert there(here) == {"a", "c", "d"}
        assert store.view().tier_of(ModelId("b")) is None
        await read(store, elsewhere.manifest("c").shards[0])
    async with NvmeStore(here, budget=budget) as store:
        await elsewhere.admit(store, "e")
        assert there(here) == {"c", "d", "e"}
        assert store.view().tiers[0].used_bytes == budget == data_bytes(here)
        for model in "cde":
            assert await read_rank(store, elsewhere.manifest(model), 1) == elsewhere.models[model][1][1]
        assert await store.side_files(ModelId("e")) == {"tokenizer.json": b"{}"}


async def test_what_is_read_or_pinned_stays_and_room_that_cannot_be_made_removes_nothing(
    tmp_path: Path,
) -> None:
    here = tmp_path / "here"
    elsewhere = Elsewhere(tmp_path / "elsewhere", "read", "pinned", "idle", "new")
    big = Elsewhere(tmp_path / "elsewhere", "big", size=3 * SIZE)
    budget = 3 * elsewhere.manifest("read").weight_bytes
    async with NvmeStore(here, budget=budget) as store:
        for model in ("read", "pinned", "idle"):
            await elsewhere.admit(store, model)
        await store.pin(ModelId("pinned"))
        async with store.open(elsewhere.manifest("read").shards[0]) as chunks:
            await anext(chunks)
            with pytest.raises(TierFull, match=str(budget)):
                await big.admit(store, "big")
            assert there(here) == {"read", "pinned", "idle"}
            await elsewhere.admit(store, "new")
            assert there(here) == {"read", "pinned", "new"}
            for model in ("read", "pinned"):
                with pytest.raises(StoreError, match="in use"):
                    await store.remove(ModelId(model))
        store.unpin(ModelId("pinned"))
        await big.admit(store, "big")
        assert there(here) == {"big"}
        with pytest.raises(ShardMissing):
            await read(store, elsewhere.manifest("read").shards[0])


async def test_an_import_makes_room(tmp_path: Path, checkpoint: Path) -> None:
    old, _ = put(tmp_path, "old", size=16 * UNIT)
    async with NvmeStore(tmp_path, budget=16 * UNIT) as store:
        with pytest.raises(TierFull):
            async with store.open(old.shards[0]):
                await store.import_model(Model("tiny", checkpoint))
        assert there(tmp_path) == {"old"}
    tiny = 64 * UNIT
    async with NvmeStore(tmp_path, budget=tiny) as store:
        put(tmp_path, "filler", size=tiny - 16 * UNIT)
        await store.import_model(Model("tiny", checkpoint))
        assert store.view().tier_of(ModelId("tiny")) == "nvme"
        assert "old" not in there(tmp_path)
        assert data_bytes(tmp_path) <= tiny


async def test_an_admission_that_is_not_committed_leaves_nothing(tmp_path: Path) -> None:
    here = tmp_path / "here"
    elsewhere = Elsewhere(tmp_path / "elsewhere", "a")
    manifest, ranks = elsewhere.models["a"]
    async with NvmeStore(here, budget="1 MiB") as store:
        async with store.admit(manifest) as admission:
            async with admission.shard(manifest.shards[0]) as file:
                await file.write(memoryview(ranks[0])[:UNIT])
            assert store.view().tiers[0].used_bytes == manifest.weight_bytes
            assert admission.missing == manifest.shards
            with pytest.raises(StoreError, match="not written"):
                await admission.commit()
        async with store.admit(manifest) as admission:
            async with admission.shard(manifest.shards[0]) as file:
                await file.write(memoryview(bytes(manifest.shards[0].size_bytes)))
                with pytest.raises(ShardCorrupt, match=manifest.shards[0].file):
                    file.finish()
                with pytest.raises(StoreError, match="More than"):
                    await file.write(memoryview(b"more"))
            assert admission.missing == manifest.shards
        assert there(here) == set()
        assert store.view().tiers[0].used_bytes == 0


async def test_one_process_writes_a_model_at_a_time(tmp_path: Path) -> None:
    elsewhere = Elsewhere(tmp_path / "elsewhere", "a")
    async with NvmeStore(tmp_path / "here") as store, store.admit(elsewhere.manifest("a")):
        with pytest.raises(StoreError, match="Another process is writing"):
            await elsewhere.admit(store, "a")


async def test_a_damaged_copy_is_replaced_by_a_whole_one(tmp_path: Path) -> None:
    here = tmp_path / "here"
    elsewhere = Elsewhere(tmp_path / "elsewhere", "a")
    manifest, ranks = elsewhere.models["a"]
    async with NvmeStore(here) as store:
        await elsewhere.admit(store, "a")
        (here / "a" / manifest.shards[0].file).write_bytes(b"damage")
        await elsewhere.admit(store, "a")
        assert await read_rank(store, manifest) == ranks[0]
        assert there(here) == {"a"}


def limit_files() -> None:
    """Make files over 6000 bytes fail as on a full disk."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


ADMIT = """
    import anyio, sys
    from pathlib import Path
    from hotswap.backends.stores import NvmeStore
    from hotswap.backends.stores.index import load_index
    from hotswap.errors import StoreError

    async def main(source, root, pause_at):
        manifest = load_index(source, "a")
        async with NvmeStore(root) as store, store.admit(manifest) as admission:
            for number, shard in enumerate(manifest.shards):
                async with admission.shard(shard) as file:
                    data = (source / "a" / shard.file).read_bytes()
                    await file.write(memoryview(data)[:100])
                    if number == pause_at:
                        print("writing", flush=True)
                        await anyio.sleep_forever()
                    await file.write(memoryview(data)[100:])
                    file.finish()
            await admission.commit()

    try:
        anyio.run(main, Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    except StoreError as exc:
        print(type(exc).__name__, exc, flush=True)
"""

REMOVE = """
    import shutil, sys, time
    from pathlib import Path
    from hotswap.backends.stores.disk_directory import DiskDirectory

    def rmtree(path, **options):
        next(Path(path).glob("*.bin")).unlink()
        print("removing", flush=True)
        sys.stdin.read()

    shutil.rmtree = rmtree
    DiskDirectory(Path(sys.argv[1]), None).remove("a")
"""

PIN = """
    import anyio, sys
    from hotswap.backends.stores import NvmeStore

    async def main(root):
        async with NvmeStore(root) as store:
            await store.pin("a")
            print("pinned", flush=True)
            await anyio.to_thread.run_sync(sys.stdin.read)

    anyio.run(main, sys.argv[1])
"""


def start(code: str, *arguments: object, limit: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=limit,
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


async def test_a_process_killed_while_it_admits_leaves_no_half_model(tmp_path: Path) -> None:
    here = tmp_path / "here"
    elsewhere = Elsewhere(tmp_path / "elsewhere", "a")
    with start(ADMIT, tmp_path / "elsewhere", here, 2) as process:
        assert await to_thread.run_sync(line_of, process) == "writing"
        async with NvmeStore(here, budget=elsewhere.manifest("a").weight_bytes) as store:
            assert store.view().residency == ()
            assert len(os.listdir(here)) == 2  # a living writer is left alone, and its reservation counts
            with pytest.raises(TierFull):
                await Elsewhere(tmp_path / "elsewhere", "b").admit(store, "b")
        await to_thread.run_sync(kill, process)
    async with NvmeStore(here, budget=elsewhere.manifest("a").weight_bytes) as store:
        await elsewhere.admit(store, "a")
        assert there(here) == {"a"}
        assert await read_rank(store, elsewhere.manifest("a")) == elsewhere.models["a"][1][0]


async def test_a_process_killed_while_it_removes_leaves_no_half_model(tmp_path: Path) -> None:
    put(tmp_path, "a")
    with start(REMOVE, tmp_path) as process:
        assert await to_thread.run_sync(line_of, process) == "removing"
        async with NvmeStore(tmp_path) as store:
            with pytest.raises(ShardMissing):
                await store.manifest(ModelId("a"))
            assert [name[:3] for name in os.listdir(tmp_path)] == [".a."]
        await to_thread.run_sync(kill, process)
    async with NvmeStore(tmp_path) as store:
        assert store.view().residency == ()
        assert there(tmp_path) == set()


async def test_another_process_keeps_what_it_pinned(tmp_path: Path) -> None:
    elsewhere = Elsewhere(tmp_path / "elsewhere", "b")
    put(tmp_path / "here", "a", size=SIZE, world_size=2)
    budget = elsewhere.manifest("b").weight_bytes
    async with NvmeStore(tmp_path / "here", budget=budget) as store:
        with start(PIN, tmp_path / "here") as process:
            assert await to_thread.run_sync(line_of, process) == "pinned"
            with pytest.raises(TierFull):
                await elsewhere.admit(store, "b")
            with pytest.raises(StoreError, match="in use"):
                await store.remove(ModelId("a"))
            await to_thread.run_sync(kill, process)
        await elsewhere.admit(store, "b")
        assert there(tmp_path / "here") == {"b"}


async def test_a_disk_that_fills_up_leaves_the_tier_as_it_was(tmp_path: Path) -> None:
    here = tmp_path / "here"
    put(here, "before")
    put(tmp_path / "elsewhere", "a")
    with start(ADMIT, tmp_path / "elsewhere", here, -1, limit=limit_files) as process:
        said, _ = await to_thread.run_sync(process.communicate)
    assert said.startswith("TierFull")
    assert str(here) in said
    assert there(here) == {"before"}


STEPS = st.lists(
    st.tuples(st.sampled_from(["admit", "open", "close", "pin", "unpin", "remove"]), st.integers(0, 4)),
    max_size=30,
)
SIZES = tuple(units * UNIT for units in (1, 2, 3, 5, 6))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
async def test_the_budget_holds_and_what_is_lent_stays(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    base = tmp_path_factory.mktemp("budget")
    elsewhere = [Elsewhere(base / "elsewhere", f"m{n}", size=size) for n, size in enumerate(SIZES)]
    here, budget = base / "here", 16 * UNIT
    here.mkdir()
    kept: dict[int, list[AsyncExitStack]] = {n: [] for n in range(5)}
    pinned: set[int] = set()
    async with AsyncExitStack() as everything:
        # Two on one root, as two processes would be: they share nothing but the directory.
        stores = [await everything.enter_async_context(NvmeStore(here, budget=budget)) for _ in range(2)]
        for turn, (step, n) in enumerate(steps):
            store, model = stores[turn % 2], ModelId(f"m{n}")
            held = {f"m{m}" for m in range(5) if kept[m] or m in pinned}
            before = there(here)
            try:
                if step == "admit" and model not in before:
                    await elsewhere[n].admit(store, model)
                elif step == "open":
                    stack = await everything.enter_async_context(AsyncExitStack())
                    await stack.enter_async_context(store.open(elsewhere[n].manifest(model).shards[0]))
                    kept[n].append(stack)
                elif step == "close" and kept[n]:
                    await kept[n].pop().aclose()
                elif step == "pin":
                    await stores[0].pin(model)
                    pinned.add(n)
                elif step == "unpin":
                    stores[0].unpin(model)
                    pinned.discard(n)
                elif step == "remove":
                    await store.remove(model)
                    assert model not in held
            except TierFull:
                assert step == "admit"
                assert there(here) == before
            except ShardMissing:
                assert model not in before
            except StoreError:
                assert step == "remove"
                assert model in held
            assert held <= there(here)
            assert data_bytes(here) <= budget
    assert all(load_index(here, ModelId(model)) for model in there(here))


async def test_the_files_of_a_conversion_that_can_be_resumed_count(tmp_path: Path) -> None:
    here = tmp_path / "here"
    elsewhere = Elsewhere(tmp_path / "elsewhere", "a", "b")
    size = elsewhere.manifest("a").weight_bytes
    left = here / ".c.0123456789abcdef.partial"
    left.mkdir(parents=True)
    (left / "rank-0-of-1.000.bin").write_bytes(bytes(UNIT))
    directory = DiskDirectory(here, size + UNIT - 1)
    with pytest.raises(TierFull), directory.reserve(ModelId("a"), size):
        pass
    with directory.reserve(ModelId("c"), size):  # it is resumed
        assert len(os.listdir(here)) == 2
    with DiskDirectory(here, size + UNIT).reserve(ModelId("a"), size):
        assert len(os.listdir(here)) == 2


def test_a_fork_while_a_model_or_the_root_is_locked_keeps_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path)
    kept: list[int] = []
    close = os.close

    def close_here(fd: int) -> None:
        kept.append(os.dup(fd))  # as in a child process forked meanwhile
        close(fd)

    directory = DiskDirectory(tmp_path, None)
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close_here)
        lock = directory.read_lock(ModelId("m"))
        lock.acquire()
        lock.release()
        with directory.reserve(ModelId("new"), 1):
            pass
    assert kept
    assert not directory.in_use(ModelId("m"))
    with locked(tmp_path):
        pass
    for fd in kept:
        close(fd)
