"""asyncio's own cancellation, which no shield holds back: what a thread takes is given back all the same."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread
from anyio.lowlevel import checkpoint

from hotswap import ModelId
from hotswap.abc import Manifest
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore, pinned
from hotswap.backends.stores.disk_directory import ReadLock
from hotswap.backends.stores.reading import ReadAhead
from hotswap.backends.stores.segment import Segment
from hotswap.backends.stores.segment_directory import SegmentDirectory
from hotswap.backends.stores.shared_buffer import SharedBuffer
from hotswap.worker_threads import shielded
from tests.backends.stores.models import UNIT, exhaust, put
from tests.backends.stores.test_pinned import FakeCuda, with_cuda
from tests.backends.stores.test_shared import Machine, used
from tests.patience import PATIENCE_S

M = ModelId("m")
Work = Callable[[], Coroutine[Any, Any, object]]


class Held:
    """Holds one method of a class in its thread until it is let go."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.entered, self.left, self._go = threading.Event(), threading.Event(), threading.Event()
        call = getattr(owner, name)

        def hold(*args: Any, **more: Any) -> object:
            if self._go.is_set():
                return call(*args, **more)
            self.entered.set()
            assert self._go.wait(PATIENCE_S)
            try:
                return call(*args, **more)
            finally:
                self.left.set()

        patch.setattr(owner, name, hold)

    async def cancel(self, work: Work) -> None:
        """Cancel the work while the method runs, twice, and let it end."""
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(work())
            assert await to_thread.run_sync(self.entered.wait, PATIENCE_S)
            for _ in range(2):
                task.cancel()
                for _ in range(5):
                    await checkpoint()
            self._go.set()
            assert await to_thread.run_sync(self.left.wait, 20)
        assert task.cancelled()


def open_files(below: Path) -> list[str]:
    """What this process has open there."""
    found: list[str] = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return [path for path in found if path.startswith(str(below))]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


async def lend(store: TieredStore, manifest: Manifest) -> None:
    async with store.lend(manifest) as buffer:
        assert buffer is not None


@pytest.mark.parametrize(
    ("owner", "name", "resident"),
    [
        (SegmentDirectory, "attach_or_create", False),
        (SegmentDirectory, "attach", False),
        (SegmentDirectory, "attach", True),
        (Segment, "reserve", False),
        (SharedBuffer, "close", True),
        (Segment, "end_filling", False),
    ],
)
async def test_a_shared_loan_leaves_nothing_mapped_locked_or_reserved(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, resident: bool
) -> None:
    manifest = machine.put()
    async with machine.store() as store, machine.store() as other:
        if resident:
            await other.prefetch(M)
        held = Held(monkeypatch, owner, name)
        await held.cancel(lambda: lend(store, manifest))
        assert (store.num_lent, machine.maps()) == (0, [])
        await other.drop(M)
        assert (machine.files(), used(store)) == (set(), 0)
        await lend(store, manifest)


async def test_shared_memory_that_was_pinned_is_given_back(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda()
    with_cuda(monkeypatch, cuda)
    manifest = machine.put()
    async with machine.store() as store, machine.store() as other:
        await other.prefetch(M)
        held = Held(monkeypatch, SharedBuffer, "_pin")
        await held.cancel(lambda: lend(store, manifest))
        while machine.maps():  # what is pinned lingers
            await checkpoint()
        assert (store.num_lent, cuda.pinned) == (0, {})
        await other.drop(M)
        assert (machine.files(), used(store)) == (set(), 0)
        await lend(store, manifest)


async def test_a_shared_store_that_was_not_opened_keeps_no_file_open(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch, SegmentDirectory, "open")

    async def enter() -> None:
        async with machine.store():
            pass

    await held.cancel(enter)
    assert open_files(machine.directory) == []


@pytest.mark.parametrize("name", ["_pin", "close"])
async def test_pinned_memory_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    manifest, _ = put(tmp_path)
    cuda = FakeCuda()
    with_cuda(monkeypatch, cuda)
    async with PinnedStore("1 MiB", chunk_bytes=UNIT) as store:
        held = Held(monkeypatch, pinned._RankBuffer, name)

        async def hold() -> None:
            async with store.reserve(manifest, 0):
                pass

        await held.cancel(hold)
        assert (store.num_lent, store.view().tiers[0].used_bytes, cuda.pinned) == (0, 0, {})


@pytest.mark.parametrize(("owner", "name"), [(ReadLock, "acquire"), (ReadAhead, "prepare")])
async def test_a_read_from_the_disk_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    manifest, _ = put(tmp_path)
    async with NvmeStore(tmp_path, chunk_bytes=UNIT) as store:
        await store.manifest(M)
        held = Held(monkeypatch, owner, name)

        async def read() -> None:
            async with store.open(manifest.shards[0]) as chunks:
                await exhaust(chunks)

        await held.cancel(read)
        assert (store.num_lent, open_files(tmp_path)) == (0, [])
        await store.remove(M)


async def test_shielded_work_returns_or_raises_as_it_is() -> None:
    async def fail() -> int:
        raise ValueError("as it is")

    async def answer() -> int:
        await checkpoint()
        return 7

    assert await shielded(answer) == 7
    with pytest.raises(ValueError, match="as it is"):
        await shielded(fail)


async def test_shielded_work_outlasts_a_timeout_of_asyncio() -> None:
    steps: list[str] = []

    async def work() -> None:
        for step in "abc":
            await anyio.sleep(0.001)
            steps.append(step)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await shielded(work)
    assert steps == ["a", "b", "c"]
    with anyio.move_on_after(0) as scope:
        await shielded(work)
    assert scope.cancelled_caught
    assert steps == ["a", "b", "c"] * 2
