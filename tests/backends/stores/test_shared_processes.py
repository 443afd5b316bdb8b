"""Shared host memory between processes: one reads, a killed one leaves nothing behind, what lives is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from hotswap import ModelId
from hotswap.abc import HostBuffer, Manifest
from hotswap.backends.stores import TieredStore
from hotswap.errors import TierFull
from tests.backends.stores.models import read_rank
from tests.backends.stores.test_shared import Machine, size_of, used

ROOT = Path(__file__).parents[3]
A, B = ModelId("a"), ModelId("b")


class Process:
    """Another process on the same machine that runs one of the jobs of `sharing`."""

    def __init__(self, machine: Machine, budget: int, work: str, model: str) -> None:
        words = (machine.root, machine.directory, budget, work, model)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.backends.stores.sharing", *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    async def said(self) -> str:
        assert self._process.stdout is not None
        return (await to_thread.run_sync(self._process.stdout.readline)).strip()

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    async def end(self) -> None:
        await to_thread.run_sync(self._process.communicate)

    async def kill(self) -> None:
        self._process.kill()
        await self.end()


@asynccontextmanager
async def process(machine: Machine, budget: int, work: str, model: str = "a") -> AsyncGenerator[Process]:
    other = Process(machine, budget, work, model)
    try:
        yield other
    finally:
        with anyio.CancelScope(shield=True):
            await other.kill()


class Waiting:
    """A load in this process that waits for another process, `until` that one continues."""

    def __init__(self, machine: Machine, store: TieredStore, manifest: Manifest) -> None:
        self.machine, self.store, self.manifest = machine, store, manifest
        self.tier = ""

    async def until(self, go: Callable[[], Awaitable[None]]) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._load)
            while not self.store.num_lent:
                await anyio.lowlevel.checkpoint()
            assert self.machine.disk.reads == []
            await go()

    async def _load(self) -> None:
        async with self.store.lend(self.manifest) as buffer:
            assert isinstance(buffer, HostBuffer)
            assert bytes(buffer.data) == self.machine.bytes_of(self.manifest)
            self.tier = buffer.tier


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


async def test_of_two_processes_that_load_a_model_one_reads_it(machine: Machine) -> None:
    manifest = machine.put("a")
    budget = size_of(manifest)
    theirs_bytes = 0
    async with process(machine, budget, "fill") as other, machine.store(budget) as store:
        assert await other.said() == "reading"
        assert store.view().tier_of(A) == "nvme"  # half of it is not there
        waiting = Waiting(machine, store, manifest)

        async def go() -> None:
            other.go_on()
            nonlocal theirs_bytes
            theirs_bytes = int((await other.said()).removeprefix("filled "))

        await waiting.until(go)
        # Either process may read the next shard; each is read once.
        assert theirs_bytes
        assert theirs_bytes + sum(size for _, size in machine.disk.reads) == manifest.weight_bytes
        await other.end()
        assert store.view().tier_of(A) == "shared"
        assert used(store) == budget
        assert await read_rank(store, manifest) == machine.bytes_of(manifest)


async def test_a_waiting_process_resumes_the_fill_of_a_killed_one(machine: Machine) -> None:
    manifest = machine.put("a")
    budget = size_of(manifest)
    async with process(machine, budget, "fill") as other, machine.store(budget) as store:
        assert await other.said() == "reading"
        waiting = Waiting(machine, store, manifest)
        await waiting.until(other.kill)
        assert waiting.tier == "nvme"
        assert machine.disk.reads
        assert store.view().tier_of(A) == "shared"
        assert used(store) == budget
        assert not [name for name in machine.files() if name.startswith(".")]


async def test_a_process_killed_while_it_fills_leaves_nothing_behind(machine: Machine) -> None:
    manifest, other_manifest = machine.put("a"), machine.put("b")
    budget = size_of(manifest)
    async with machine.store(budget) as store, process(machine, budget, "fill") as other:
        assert await other.said() == "reading"
        with pytest.raises(TierFull):  # the filling process is alive
            await store.prefetch(B)
        await other.kill()
        assert used(store) == budget
        await store.prefetch(B)
        assert machine.files() == {name for name in machine.files() if name.startswith("b.")}
        assert await read_rank(store, other_manifest) == machine.bytes_of(other_manifest)


async def test_the_next_to_open_sweeps_what_a_killed_process_left(machine: Machine) -> None:
    manifest = machine.put("a")
    budget = size_of(manifest)
    async with process(machine, budget, "fill") as other:
        assert await other.said() == "reading"
        async with machine.store(budget):
            assert len(machine.files()) == 1  # a living one is left alone
        await other.kill()
    async with machine.store(budget) as store:
        assert (machine.files(), used(store)) == (set(), 0)


@pytest.mark.parametrize(("work", "says"), [("lend", "lent nvme"), ("pin", "pinned")])
async def test_a_model_that_a_process_lends_or_pins_stays_until_the_process_ends_or_is_killed(
    machine: Machine, work: str, says: str
) -> None:
    manifest = machine.put("a")
    machine.put("b")
    budget = size_of(manifest)
    async with machine.store(budget) as store, process(machine, budget, work) as other:
        assert await other.said() == says
        if work == "pin":
            await store.prefetch(A)
        with pytest.raises(TierFull):
            await store.prefetch(B)
        assert await store.tiers[0].clear() == 0  # type: ignore[attr-defined]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store.drop, A)
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            assert store.view().tier_of(A) == "shared"
            await other.kill()
        assert store.view().tier_of(A) == "nvme"
        await store.prefetch(B)
        assert store.view().tier_of(B) == "shared"


async def test_a_process_is_lent_what_another_has_loaded_and_goes_on_when_that_has_ended(
    machine: Machine,
) -> None:
    manifest = machine.put("a")
    budget = size_of(manifest)
    async with process(machine, budget, "lend") as other:
        async with machine.store(budget) as store:
            assert await other.said() == "lent nvme"
            async with store.lend(manifest) as buffer:
                assert buffer is not None
                assert buffer.tier == "shared"
        other.go_on()
        assert await other.said() == "same"
        await other.end()
    async with process(machine, budget, "lend") as again:
        assert await again.said() == "lent shared"
