"""What a fleet saves as it closes: prefixes of ended requests, for fleets that open the KV store later."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Self

import anyio
import pytest

from hotswap import AdapterId, Fleet, ModelId, SwapLimits
from hotswap.abc import CachedKV, Engine, KVLayout, KVPages, KVPrefix, KVPut, KVStore
from hotswap.backends.sim import SimEngine, SimKVStore
from hotswap.errors import FleetClosed
from hotswap.offline.virtual_time import virtual_time
from tests.runtime.support import until
from tests.runtime.test_offload import LONG, PROMPTS, make_engine, make_fleet

COMMON = KVLayout(
    model=ModelId("a"),
    weights="w",
    adapter=None,
    block_tokens=16,
    layers=(),
    block_bytes=1024,
    computed_by="sim",
)
OF_THE_FLEET_ALONE = (replace(COMMON, adapter=AdapterId("sql")), replace(COMMON, computed_by=""))
NUM_BLOCKS = 5


class Cached(CachedKV):
    """A prefix of 5 blocks."""

    def __init__(self, layout: KVLayout, first: int, copy_s: float) -> None:
        self.layout, self.tokens = layout, tuple(range(first, first + NUM_BLOCKS * layout.block_tokens))
        self._copy_s = copy_s

    async def read(self, first_block: int, num_tokens: int) -> KVPages:
        await anyio.sleep(self._copy_s)
        return KVPages(first_block, num_tokens, memoryview(bytearray()))


class Listing(SimEngine):
    """Keeps prefixes of ended requests, one of which other fleets can find."""

    copy_s, num_asked = 0.01, 0
    error: Exception | None = None

    async def cached_kv(self) -> Sequence[CachedKV]:
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        return [
            Cached(layout, 1000 * at, self.copy_s) for at, layout in enumerate((*OF_THE_FLEET_ALONE, COMMON))
        ]


class Lasting(SimKVStore):
    """Outlives its fleets, and counts the blocks that were saved."""

    outlives_fleets = True
    num_saved = 0

    async def fill(self, places: Sequence[None], data: memoryview) -> None:
        await super().fill(places, data)
        self.num_saved += len(places)


class Broken(Lasting):
    def put(self, prefix: KVPrefix, *, prefill_s: float = 0.0, copy_s: float = 0.0) -> KVPut:
        raise RuntimeError("the store is broken")


def make_listing(name: str = "e0") -> Listing:
    engine = make_engine(name, Listing)
    assert isinstance(engine, Listing)
    return engine


def fleet_of(store: SimKVStore, *engines: Listing) -> Fleet:
    return make_fleet(store, engines, limits=SwapLimits(evict_s=4.0))


async def open_and_close(store: SimKVStore, *engines: Listing, gracefully: bool = False) -> float:
    """Return the seconds that closing took."""
    async with fleet_of(store, *engines) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to="a")
        began_s = anyio.current_time()
        if gracefully:
            await fleet.close_gracefully()
    return anyio.current_time() - began_s


@virtual_time
@pytest.mark.parametrize("gracefully", [False, True])
async def test_what_other_fleets_find_is_saved_once(gracefully: bool) -> None:
    """Not what an adapter's version or an unnamed way of computing keeps from them."""
    store, engine = Lasting("1 GiB"), make_listing()
    await open_and_close(store, engine, gracefully=gracefully)
    assert (store.num_saved, engine.num_asked) == (NUM_BLOCKS, 1)


@virtual_time
async def test_a_store_that_ends_with_its_fleet_gets_nothing() -> None:
    engine = make_listing()
    assert await open_and_close(SimKVStore("1 GiB"), engine) == pytest.approx(0.0, abs=0.001)
    assert engine.num_asked == 0


class Mixed(SimKVStore):
    """Outlives its fleets with what the engine "e0" computes, and no other."""

    def __init__(self) -> None:
        super().__init__("1 GiB")
        self.lasting = Lasting("1 GiB")

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with self.lasting, super().__asynccontextmanager__():
            yield self

    def near(self, engine: Engine) -> KVStore:
        return self.lasting if engine.id == "e0" else self


@virtual_time
async def test_engines_near_a_part_of_a_store_that_outlives_fleets_save_to_it() -> None:
    store, engines = Mixed(), [make_listing("e0"), make_listing("e1")]
    await open_and_close(store, *engines)
    assert [engine.num_asked for engine in engines] == [1, 0]
    assert store.lasting.num_saved == NUM_BLOCKS


@virtual_time
async def test_instances_save_at_once_and_those_without_a_model_are_not_asked() -> None:
    engines = [make_listing("e0"), make_listing("e1")]
    for engine in engines:
        engine.copy_s = 1.0
    assert await open_and_close(Lasting("1 GiB"), *engines) == pytest.approx(1.0, abs=0.01)
    empty = make_listing()
    async with fleet_of(Lasting("1 GiB"), empty):
        pass
    assert [engine.num_asked for engine in (*engines, empty)] == [1, 1, 0]


@virtual_time
@pytest.mark.parametrize("gracefully", [False, True])
async def test_what_is_not_saved_in_half_of_the_limit_of_an_eviction_is_lost(gracefully: bool) -> None:
    engine = make_listing()
    engine.copy_s = 60.0
    assert await open_and_close(Lasting("1 GiB"), engine, gracefully=gracefully) == pytest.approx(
        2.0, abs=0.01
    )


@virtual_time
@pytest.mark.parametrize("is_of_store", [False, True])
async def test_a_fleet_closes_though_nothing_can_be_saved(
    is_of_store: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_listing()
    engine.error = None if is_of_store else RuntimeError("the engine is broken")
    with caplog.at_level(logging.ERROR, "hotswap"):
        await open_and_close(Broken("1 GiB") if is_of_store else Lasting("1 GiB"), engine)
    assert "is broken" in caplog.text


@virtual_time
async def test_a_cancellation_ends_the_saving() -> None:
    store, engine = Lasting("1 GiB"), make_listing()
    engine.copy_s = 1.5
    async with fleet_of(store, engine) as fleet:
        await fleet.swap("e0", to="a")
        with anyio.move_on_after(0.5):
            await fleet.close_gracefully()
        assert fleet.is_open
        assert store.num_saved == 0
        await fleet.close_gracefully()
        assert store.num_saved == NUM_BLOCKS
    began_s = anyio.current_time()
    with anyio.move_on_after(0.5) as scope:
        await open_and_close(store, engine)
    assert scope.cancelled_caught
    assert anyio.current_time() - began_s == pytest.approx(0.5, abs=0.2)


@virtual_time
async def test_requests_end_before_what_they_leave_is_saved() -> None:
    store, engine = Lasting("1 GiB"), make_listing()
    async with anyio.create_task_group() as tasks, fleet_of(store, engine) as fleet:
        await fleet.swap("e0", to="a")

        async def client() -> None:
            with pytest.raises(FleetClosed):
                await fleet.generate("a", PROMPTS[0], LONG)
            assert engine.num_asked == 0

        tasks.start_soon(client)
        await until(lambda: fleet.num_tokens[ModelId("a")] > 3)
    assert store.num_saved == NUM_BLOCKS
