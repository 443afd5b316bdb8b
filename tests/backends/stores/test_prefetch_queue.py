"""Prefetches run in order of priority; loads never wait, and admit the prefetch of their model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint

from hotswap import ModelId
from hotswap.abc import HostChunk, Shard, WeightStore, WrapperStore
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.stores.loading import PrefetchQueue
from hotswap.errors import ConfigError
from hotswap.testing.cancel import cancel_everywhere
from tests.backends.stores.models import UNIT, put, read

A, B, C, D = map(ModelId, "abcd")


class Gated(WrapperStore):
    """Records which model is read, and reads nothing before its gate is opened."""

    def __init__(self, store: WeightStore) -> None:
        super().__init__(store)
        self.began: list[str] = []
        self.gates = {model: anyio.Event() for model in (A, B, C, D)}

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        self.began.append(shard.model)
        await self.gates[shard.model].wait()
        async with self.wrapped.open(shard) as chunks:
            yield chunks


@pytest.fixture
def disk(tmp_path: Path) -> Gated:
    for model in (A, B, C, D):
        put(tmp_path, model, size=4 * UNIT, file_bytes=4 * UNIT)
    return Gated(NvmeStore(tmp_path, chunk_bytes=UNIT))


def tiered(disk: Gated, *, prefetches: int = 1) -> TieredStore:
    return TieredStore(PinnedStore(64 * UNIT, chunk_bytes=UNIT), disk, prefetches=prefetches)


async def test_the_most_urgent_prefetch_goes_next(disk: Gated) -> None:
    async with tiered(disk) as store, anyio.create_task_group() as tasks:
        for model, priority in ((A, 0), (B, 0), (C, 1), (D, 0)):
            tasks.start_soon(partial(store.prefetch, model, priority=priority))
            await anyio.wait_all_tasks_blocked()
        await _until(lambda: disk.began == ["a"])
        assert store.view().tiers[0].used_bytes == 4 * UNIT, "those that wait take no room"
        for model in (A, C, B, D):
            await _until(partial(_last_is, disk, model))
            disk.gates[model].set()
    assert disk.began == ["a", "c", "b", "d"]


async def test_as_many_prefetches_run_as_were_allowed(disk: Gated) -> None:
    async with tiered(disk, prefetches=2) as store, anyio.create_task_group() as tasks:
        for model in (A, B, C):
            tasks.start_soon(store.prefetch, model)
        await _until(lambda: len(disk.began) == 2)
        await _settle()
        assert len(set(disk.began)) == 2
        for gate in disk.gates.values():
            gate.set()
    with pytest.raises(ConfigError, match="prefetches"):
        TieredStore(disk, prefetches=0)


@pytest.mark.parametrize("by_loan", [True, False])
async def test_a_load_admits_the_prefetch_of_its_model(disk: Gated, by_loan: bool) -> None:
    prefetched: list[str] = []
    async with tiered(disk) as store, anyio.create_task_group() as tasks:
        manifest = await store.manifest(B)

        async def prefetch(model: ModelId) -> None:
            await store.prefetch(model)
            prefetched.append(model)

        async def load() -> None:
            if by_loan:
                async with store.lend(manifest) as buffer:
                    assert buffer is not None
            else:
                await read(store, manifest.shards[0])

        tasks.start_soon(prefetch, A)
        await _until(lambda: disk.began == ["a"])
        tasks.start_soon(prefetch, B)
        await _settle()
        tasks.start_soon(load)
        await _until(lambda: disk.began == ["a", "b"])
        disk.gates[B].set()
        await _until(lambda: prefetched == ["b"])
        disk.gates[A].set()
    assert disk.began == ["a", "b"]


async def test_no_prefetch_begins_beside_a_load(disk: Gated) -> None:
    async with tiered(disk) as store, anyio.create_task_group() as tasks:
        manifest = await store.manifest(A)
        tasks.start_soon(read, store, manifest.shards[0])
        await _until(lambda: disk.began == ["a"])
        tasks.start_soon(store.prefetch, B)
        await _settle()
        assert disk.began == ["a"]
        disk.gates[A].set()
        await _until(lambda: disk.began == ["a", "b"])
        disk.gates[B].set()


async def test_a_prefetch_cancelled_while_it_waits_lets_the_next_go(disk: Gated) -> None:
    async with tiered(disk) as store, anyio.create_task_group() as tasks:
        tasks.start_soon(store.prefetch, A)
        await _until(lambda: disk.began == ["a"])
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(partial(store.prefetch, B, priority=9))
                await _settle()
                scope.cancel()
        tasks.start_soon(store.prefetch, C)
        for model in (A, C):
            disk.gates[model].set()
    assert disk.began == ["a", "c"]


async def test_a_turn_cancelled_anywhere_is_given_back() -> None:
    queue = PrefetchQueue()

    async def take() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_hold, queue, A)
            tasks.start_soon(_hold, queue, B)

    async def look() -> None:
        assert queue.waiting == ()
        async with queue.turn(C, 0):
            pass

    await cancel_everywhere(take, look)


async def test_the_view_says_what_is_queued(disk: Gated) -> None:
    async with tiered(disk) as store, anyio.create_task_group() as tasks:
        tasks.start_soon(store.prefetch, A)
        await _until(lambda: disk.began == ["a"])
        tasks.start_soon(store.prefetch, B)
        await _settle()
        view = store.view()
        nvme = next(tier for tier in view.tiers if tier.name == "nvme")
        assert nvme.queued_bytes == 4 * UNIT, "a prefetch that waits does not count"
        assert view.load_s(A) == pytest.approx(4 * UNIT / nvme.bytes_per_s)
        assert view.load_s(B) == view.load_s(B, "nvme") == pytest.approx(8 * UNIT / nvme.bytes_per_s)
        assert view.load_s(A, "pinned") == float("inf")
        assert view.load_bytes(A) == 4 * UNIT, "it is on its way, so its bytes are among those queued"
        assert view.load_bytes(B) == 8 * UNIT
        assert view.load_bytes(A, "pinned") is None
        for model in (A, B):
            disk.gates[model].set()
        await _until(lambda: store.view().tier_of(B) == "pinned")
        view = store.view()
        assert view.loading == ()
        assert view.load_s(A) == pytest.approx(4 * UNIT / view.tiers[0].bytes_per_s)
        nvme = view.tiers[1]
        assert view.load_s(A, "nvme") == pytest.approx(4 * UNIT / nvme.bytes_per_s)


def _last_is(disk: Gated, model: ModelId) -> bool:
    return disk.began[-1] == model


async def _hold(queue: PrefetchQueue, model: ModelId) -> None:
    async with queue.turn(model, 0):
        await checkpoint()


async def _until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until the condition holds."""
    while not condition():  # noqa: ASYNC110 - the store signals no event; and spinning would starve its threads
        await anyio.sleep(0.001)


async def _settle() -> None:
    """Let other tasks run until all that can start have started."""
    for _ in range(200):
        await anyio.wait_all_tasks_blocked()
