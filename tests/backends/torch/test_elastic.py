"""Engines that share a device budget have the tokens of undisturbed runs while memory moves between them."""

from __future__ import annotations

import mmap
import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from random import Random
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap import DeviceBudget, ModelId, PromptTooLong, Request, RequestId, Sampling
from hotswap.abc import SupportsResize
from hotswap.backends.process import SharedDeviceBudget
from hotswap.backends.torch import SkeletonCache, TorchEngine, device_pages
from hotswap.backends.torch.blocks import BlockPool
from hotswap.errors import ConfigError, InstanceError, OutOfMemory, RequestEvicted
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.host_pages import HostDriver
from tests.backends.torch.test_elastic_blocks import resident_bytes
from tests.backends.torch.zoo import generate, make_model
from tests.runtime.support import until

SKELETONS = SkeletonCache()
MODELS = {name: make_model("llama", seed=seed) for seed, name in enumerate("abc", start=1)}
FLOOR = 2 << 20
PROMPTS = [tuple((17 * at * number + number) % 500 + 2 for at in range(40 * number)) for number in (1, 2, 5)]


def make_store() -> DictStore:
    store = DictStore()
    for name, model in MODELS.items():
        store.add(name, model)
    return store


@asynccontextmanager
async def started(budget: DeviceBudget, *names: str, **options: Any) -> AsyncGenerator[list[TorchEngine]]:
    given: dict[str, Any] = {
        "kv_tokens": 8192,
        "kv_block_tokens": 16,
        "threads": 1,
        "skeletons": SKELETONS,
        "device_budget": budget,
        "floor_bytes": FLOOR,
    }
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(TorchEngine(name, **given | options)) for name in names]
    assert not budget.leases


def request(model: str, number: int, prompt: tuple[int, ...], count: int) -> Request:
    return Request(
        id=RequestId(f"{model}{number}"),
        model=ModelId(model),
        prompt=prompt,
        sampling=Sampling(max_tokens=count, ignore_eos=True),
    )


async def read(engine: TorchEngine, asked: Request) -> list[int]:
    async with engine.stream(asked) as tokens:
        return [token.id async for token in tokens]


async def read_all(engine: TorchEngine, model: str, num: int, *, count: int = 12) -> None:
    """Run so many requests at once, each with a prompt of its own; their tokens are those of `generate`."""

    async def run(number: int) -> None:
        prompt = (number + 2, *PROMPTS[2])
        tokens = await read(engine, request(model, number, prompt, count))
        assert tokens == generate(MODELS[model], list(prompt), count)

    async with anyio.create_task_group() as tasks:
        for number in range(num):
            tasks.start_soon(run, number)


def held_by(budget: DeviceBudget, name: str) -> int:
    return next(lease.held_bytes for lease in budget.leases if lease.holder == name)


@pytest.mark.parametrize("in_groups", [False, True])
async def test_memory_follows_the_load_from_one_engine_to_the_other_and_back(
    in_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In groups, as on a GPU, blocks of other engines have no memory here: to read one ends the process."""
    driver = HostDriver(4 * mmap.PAGESIZE)
    if in_groups:
        monkeypatch.setattr(device_pages, "driver_for", lambda device: driver)
    store, budget = make_store(), DeviceBudget("5 MiB")
    async with started(budget, "e0", "e1") as (e0, e1):
        await e0.load(store.card("a"), store)
        await e1.load(store.card("b"), store)
        assert budget.held_bytes <= 2 * FLOOR, "at first each has what fits into its floor"
        sizes: list[tuple[int, int]] = []
        for engine, model in ((e0, "a"), (e1, "b"), (e0, "a")):
            await read_all(engine, model, 24)
            sizes.append((e0.status().num_kv_blocks, e1.status().num_kv_blocks))
            assert budget.held_bytes <= budget.size_bytes
        first, second, third = sizes
        assert first[0] > second[0] < third[0]
        assert first[1] < second[1] > third[1]
        for engine in (e0, e1):
            status = engine.status()
            assert status.num_free_kv_blocks == status.num_kv_blocks
            assert status.request_kv_blocks <= status.num_kv_blocks
            # What `ElasticMemory` plans by.
            assert status.device_budget == budget.name
            assert status.least_kv_blocks <= status.num_kv_blocks <= status.most_kv_blocks
            lent = (status.most_kv_blocks - status.least_kv_blocks) * status.kv_block_bytes
            assert 0 < lent <= budget.size_bytes - 2 * FLOOR
        if in_groups:
            blocks = sum(engine.status().num_kv_blocks + 1 for engine in (e0, e1))
            assert sum(driver.parts.values()) == blocks * e0.status().kv_block_bytes
            assert driver.num_waits, "no step may read what is given back"
    assert not driver.parts


async def test_memory_follows_the_load_between_the_engines_of_two_processes_and_back() -> None:
    """Each engine has a budget object of its own, and they know each other by the name alone."""
    store = make_store()
    here, there = (SharedDeviceBudget(f"elastic-{os.getpid()}", "5 MiB") for _ in range(2))
    async with started(here, "e0") as (e0,), started(there, "e1") as (e1,):
        await e0.load(store.card("a"), store)
        await e1.load(store.card("b"), store)
        sizes: list[tuple[int, int]] = []
        for engine, model in ((e0, "a"), (e1, "b"), (e0, "a")):
            await read_all(engine, model, 24)
            assert here.held_bytes <= here.size_bytes
            sizes.append((e0.status().num_kv_blocks, e1.status().num_kv_blocks))
        first, second, third = sizes
        assert first[0] > second[0] < third[0]
        assert first[1] < second[1] > third[1]
        assert e0.status().device_budget == e1.status().device_budget == here.name


@given(seed=st.integers(0, 1 << 30), spare_mb=st.floats(0, 3))
@settings(max_examples=4, deadline=None)
def test_tokens_are_those_of_undisturbed_runs_with_any_budget(seed: int, spare_mb: float) -> None:
    anyio.run(_serve_at_random, seed, spare_mb)


async def _serve_at_random(seed: int, spare_mb: float) -> None:
    """Two engines with load at random, swapped and resized amid it; the budget is drawn, too."""
    random, store = Random(seed), make_store()
    budget = DeviceBudget(2 * FLOOR + int(spare_mb * (1 << 20)))
    num_blocks: set[int] = set()

    async def run(engine: TorchEngine, number: int) -> None:
        """Run a request; if its engine evicts it, go on where the model is served again."""
        model = random.choice("abc")
        prompt = (random.randrange(2, 9), *random.choice(PROMPTS)[: random.randrange(10, 200)])
        count = random.choice([3, 12, 30])
        asked, received = request(model, number, prompt, count), list[int]()
        while len(received) < count:
            try:
                async with engine.stream(asked.continued(received)) as tokens:
                    async for token in tokens:
                        received.append(token.id)
                        num_blocks.add(engine.status().num_kv_blocks)
                        assert budget.held_bytes <= budget.size_bytes
            except RequestEvicted:
                await anyio.sleep(0.001)
        assert received == generate(MODELS[model], list(prompt), count)

    async def serve(engine: TorchEngine) -> None:
        """Serve each model in turn, until all requests have ended."""
        names = "abc"
        while True:
            for name in names:
                if engine.status().model is not None:
                    with suppress(OutOfMemory):
                        await engine.preload(store.card(name), store)
                    await engine.evict(deadline_s=random.choice([0, 0.05]))
                    await engine.unload()
                await engine.load(store.card(name), store)
                for _ in range(3):
                    await anyio.sleep(0.02)
                    if random.random() < 0.4:
                        await engine.resize_kv(random.randrange(600))

    async with started(budget, "e0", "e1") as both:
        async with anyio.create_task_group() as servers:
            for engine in both:
                servers.start_soon(serve, engine)
            async with anyio.create_task_group() as tasks:
                for number in range(30):
                    tasks.start_soon(run, random.choice(both), number)
            servers.cancel_scope.cancel()
        for engine in both:
            await engine.unload()
            await engine.drop_preload()  # of a swap that was cancelled before its load
        assert budget.held_bytes == 0
    assert len(num_blocks) > 1 or spare_mb < 0.1


async def test_the_property_finds_blocks_that_are_still_found_when_they_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = BlockPool.withdraw

    def withdraw(self: Any, count: int) -> list[int]:
        kept = dict(self._contents), dict(self._by_key), dict(self._by_start)
        chosen = original(self, count)
        self._contents, self._by_key, self._by_start = kept
        return chosen

    store, budget = make_store(), DeviceBudget("5 MiB")
    async with started(budget, "e0", "e1") as (e0, e1):
        await e0.load(store.card("a"), store)
        await e1.load(store.card("b"), store)
        await read_all(e0, "a", 24)
        monkeypatch.setattr(BlockPool, "withdraw", withdraw)
        await read_all(e1, "b", 24)
        with pytest.raises(BaseException):  # noqa: B017, PT011 - wrong tokens, or a pool that ends the engine
            await read_all(e0, "a", 24)


async def test_memory_that_is_given_back_is_not_resident_and_never_more_than_is_leased() -> None:
    store, budget = make_store(), DeviceBudget("8 MiB")
    # A block of a layer then has three whole pages of keys, and three of values.
    async with started(budget, "e0", "e1", kv_block_tokens=64) as (e0, e1):
        await e0.load(store.card("a"), store)
        await e1.load(store.card("b"), store)

        def resident(engine: TorchEngine) -> tuple[int, int]:
            pool = engine._models._pool
            assert pool is not None
            return sum(map(resident_bytes, pool.cache.tensors)), pool.size_bytes

        await read_all(e0, "a", 24)
        filled, leased = resident(e0)
        assert FLOOR < filled <= leased
        await e0.resize_kv(0)
        shrunk, leased = resident(e0)
        assert shrunk <= leased < filled / 1.5
        await read_all(e1, "b", 24)
        assert resident(e1)[0] <= resident(e1)[1]
        cache = e1._models._pool.cache  # type: ignore[union-attr]
        await e1.unload()
        assert sum(map(resident_bytes, cache.tensors)) == 0
        assert held_by(budget, "e1") == 0


async def test_a_request_that_does_not_fit_into_the_floor_is_refused_at_once_and_one_that_does_ends() -> None:
    store, budget = make_store(), DeviceBudget("8 MiB")
    async with started(budget, "e0", "e1") as (e0, e1):
        await e0.load(store.card("a"), store)
        await e1.load(store.card("b"), store)
        least = e0.status().request_kv_blocks * 16
        assert 0 < least < 8192
        with pytest.raises(PromptTooLong):
            await read(e0, request("a", 0, (5,) * (least + 1), 5))
        # The other engine takes all that is free, and needs it.
        assert await e1.resize_kv(10_000) < 10_000
        assert budget.free_bytes < 16 << 10
        prompt = tuple(at % 90 + 2 for at in range(150))
        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(read, e0, request("a", number, (number + 2, *prompt), least // 2 - 151))


async def test_a_preload_takes_cached_blocks_and_is_refused_where_requests_need_them() -> None:
    store, budget = make_store(), DeviceBudget("5 MiB")
    async with started(budget, "e0", "e1") as (e0, e1):
        await e0.load(store.card("a"), store)
        await e1.load(store.card("b"), store)
        await read_all(e0, "a", 24)
        before = held_by(budget, "e0")
        assert budget.free_bytes < store.card("c").weight_bytes
        await e0.preload(store.card("c"), store)
        assert held_by(budget, "e0") <= before + (64 << 10), "its own cached blocks made room"
        await e0.drop_preload()
        await e0.resize_kv(10_000)
        assert budget.free_bytes < store.card("c").weight_bytes
        await e1.preload(store.card("c"), store)  # now blocks of the other engine
        assert e1.status().preloaded == "c"


async def test_an_engine_keeps_its_blocks_across_a_preloaded_swap_under_a_budget() -> None:
    store, budget = make_store(), DeviceBudget("8 MiB")
    async with started(budget, "e0") as (engine,):
        await engine.load(store.card("a"), store)
        await read_all(engine, "a", 20)
        for name in "ba":
            await engine.preload(store.card(name), store)
            await engine.evict(deadline_s=0)
            await engine.unload()
            await engine.load(store.card(name), store)
            assert held_by(budget, "e0") <= budget.size_bytes
        async with engine.stream(request("a", 1, (21, *PROMPTS[2]), 3)) as tokens:
            assert [token.id async for token in tokens] == generate(MODELS["a"], [21, *PROMPTS[2]], 3)
            assert tokens.num_reused_tokens > 48


async def test_a_lost_engine_gives_back_what_it_had() -> None:
    store, budget = make_store(), DeviceBudget("6 MiB")
    async with started(budget, "e0", "e1") as (e0, e1):
        await e0.load(store.card("a"), store)
        await read_all(e0, "a", 20)
        e0.lose()
        await e0.unload()
        assert held_by(budget, "e0") == 0
        await e1.load(store.card("b"), store)
        await read_all(e1, "b", 20)
        await e0.load(store.card("a"), store)
        await read_all(e0, "a", 3)


async def test_an_engine_is_told_of_memory_that_comes_free_while_its_queue_waits() -> None:
    store, budget = make_store(), DeviceBudget("5 MiB")
    async with started(budget, "e0") as (engine,):
        other = budget.lease("other")
        await engine.load(store.card("a"), store)
        assert other.take(budget.free_bytes)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read_all, engine, "a", 24)
            await until(lambda: budget.leases[0].wanted_bytes > 0)
            assert other.owed_bytes > 0
            other.close()
            await until(lambda: engine.status().num_kv_blocks > engine.status().request_kv_blocks)
        await until(lambda: budget.leases[0].wanted_bytes == 0)


async def test_resizing_needs_a_budget_and_a_model() -> None:
    store = make_store()
    async with TorchEngine("e0", kv_tokens=512, threads=1, skeletons=SKELETONS) as engine:
        assert isinstance(engine, SupportsResize)
        await engine.load(store.card("a"), store)
        with pytest.raises(InstanceError, match="device_budget"):
            await engine.resize_kv(3)
    async with started(DeviceBudget("8 MiB"), "e0") as (engine,):
        with pytest.raises(InstanceError, match="EMPTY"):
            await engine.resize_kv(3)
        with pytest.raises(ConfigError, match="num_blocks"):
            await engine.resize_kv(-1)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"floor_bytes": "1 MiB"}, "floor_bytes"),
        ({"device_budget": DeviceBudget(1 << 20)}, "floor_bytes"),
        ({"device_budget": DeviceBudget(1 << 20), "floor_bytes": 0}, "floor_bytes"),
        ({"device_budget": "40 GiB", "floor_bytes": 1}, "device_budget"),
        ({"device_budget": DeviceBudget(1 << 20), "floor_bytes": 1, "tp": 2}, "tp"),
        ({"device_budget": DeviceBudget(1 << 20), "floor_bytes": 1, "packed_bytes": 5}, "packed_bytes"),
    ],
)
def test_arguments_that_do_not_fit_a_budget_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        TorchEngine("e0", **options)


async def test_floors_that_exceed_the_budget_are_refused_when_an_engine_starts() -> None:
    budget = DeviceBudget(FLOOR)
    async with started(budget, "e0"):
        with pytest.raises(ConfigError, match="e1"):
            async with TorchEngine("e1", device_budget=budget, floor_bytes=1):
                pass
    async with started(budget, "e1"):
        pass


async def test_weights_beyond_the_floor_are_refused_and_hold_nothing() -> None:
    store, budget = make_store(), DeviceBudget("8 MiB")
    async with started(budget, "e0", floor_bytes=100_000) as (engine,):
        with pytest.raises(OutOfMemory, match="floor_bytes"):
            await engine.load(store.card("a"), store)
        assert held_by(budget, "e0") == 0
        assert not engine.can_preload(store.card("a"))
