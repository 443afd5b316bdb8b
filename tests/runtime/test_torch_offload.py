"""On a real model requests that come back with their KV blocks get the tokens of an undisturbed run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import anyio
import anyio.lowlevel
import pytest

from hotswap import (
    Adapter,
    AdapterId,
    ModelId,
    Sampling,
)
from hotswap.abc import KVLayout, KVStore
from hotswap.backends.kv_stores import HostKVStore, NvmeKVStore, SharedKVStore, TieredKVStore
from hotswap.kv_lookup import KVLookup
from tests.backends.torch.adapters.files import write
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import make_model
from tests.runtime.offloaded import (
    BLOCK_BYTES,
    PROMPTS,
    Client,
    all_released,
    disturb,
    ensure,
    make_engine,
    make_fleet,
    make_store,
    prompt,
    settle,
    undisturbed,
)


@pytest.fixture(scope="module")
def store() -> DictStore:
    return make_store()


@pytest.mark.parametrize("budget", [1 << 24, 20 * BLOCK_BYTES, 0], ids=["roomy", "20 blocks", "nothing"])
@pytest.mark.parametrize("kv_tokens", [4096, 800], ids=["roomy pool", "tight pool"])
async def test_tokens_are_those_of_an_undisturbed_run(store: DictStore, budget: int, kv_tokens: int) -> None:
    num_restored, num_saved = await _swap_and_compare(store, HostKVStore(budget), kv_tokens)
    if budget > 1 << 20 and kv_tokens > 1000:  # of those that had not ended before
        assert num_restored >= 40 * num_saved
    if not budget:
        assert num_restored == 0


async def test_tokens_are_those_of_an_undisturbed_run_when_an_engine_is_lost_amid_write_throughs(
    store: DictStore,
) -> None:
    engines = [make_engine("e0"), make_engine("e1")]
    clients = [Client(number) for number in range(len(PROMPTS))]
    fleet = make_fleet(store, HostKVStore(1 << 24), engines, kv_write_through_s=0.02)
    async with fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as tasks:
            for client in clients:
                tasks.start_soon(client.run, fleet)
            for client in clients:
                await client.has(40)
            await fleet.swap("e1", to="a")
            engines[0].lose()
        await settle(engines[1:])
        assert sum(client.num_restored for client in clients) > 0
    assert [client.tokens for client in clients] == await undisturbed(store)


@pytest.mark.parametrize("in_memory", [False, True], ids=["disk", "memory and disk"])
async def test_tokens_are_those_of_an_undisturbed_run_with_blocks_on_a_disk(
    store: DictStore, tmp_path: Path, in_memory: bool
) -> None:
    kv_store = _tiered(tmp_path, 1 << 24) if in_memory else NvmeKVStore(tmp_path, 1 << 24)
    num_restored, num_saved = await _swap_and_compare(store, kv_store, 4096)
    assert num_restored >= 40 * num_saved > 0


def _tiered(directory: Path, size_bytes: int) -> TieredKVStore:
    """A store with memory for two blocks, and for two more that it keeps free."""
    disk = NvmeKVStore(directory, size_bytes - 2 * BLOCK_BYTES)
    return TieredKVStore(HostKVStore(4 * BLOCK_BYTES), disk, headroom=2 * BLOCK_BYTES)


async def test_tokens_are_those_of_an_undisturbed_run_of_two_fleets_that_share_blocks(
    store: DictStore, tmp_path: Path
) -> None:
    async with anyio.create_task_group() as tasks:
        for weights in (store, make_store()):
            tasks.start_soon(_swap_and_compare, weights, SharedKVStore(tmp_path / "shared", 1 << 24), 4096)
    num_restored, _ = await _swap_and_compare(store, SharedKVStore(tmp_path / "shared", 1 << 24), 800)
    assert num_restored > 0


async def _swap_and_compare(store: DictStore, kv_store: KVStore, kv_tokens: int) -> tuple[int, int]:
    """Swap away and back three times; return how many tokens were restored and requests saved."""
    engine = make_engine("e0", kv_tokens)
    clients = [Client(number) for number in range(len(PROMPTS))]
    async with make_fleet(store, kv_store, [engine]) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as tasks:
            for client in clients:
                tasks.start_soon(client.run, fleet)
            for turn in range(3):
                for client in clients:
                    await client.has(1 if not turn else 9 * turn)
                await fleet.swap("e0", to="b", deadline_s=0.01 * turn)
                await fleet.swap("e0", to="a")
        await settle([engine])
        all_released(fleet, [engine])
        num_saved = sum(record.num_saved for record in fleet.swaps)
    assert [client.tokens for client in clients] == await undisturbed(store)
    return sum(client.num_restored for client in clients), num_saved


async def test_a_request_amid_its_prefill_keeps_what_it_has(store: DictStore) -> None:
    clients = [Client(3)]
    engine = make_engine("e0")
    async with make_fleet(store, HostKVStore("16 MiB"), [engine]) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(clients[0].run, fleet)
            while not engine.status().num_running:
                await anyio.lowlevel.checkpoint()
            await fleet.swap("e0", to="b")
            await fleet.swap("e0", to="a")
    assert clients[0].tokens == (await undisturbed(store))[3]


async def test_a_chat_finds_its_history_after_its_model_was_away(store: DictStore) -> None:
    """From the second of ten turns on at most one block of it is computed again."""
    history, num_before = PROMPTS[0], 0
    async with make_fleet(store, HostKVStore("64 MiB")) as fleet:
        await fleet.swap("e0", to="a")
        for turn in range(10):
            answer = await fleet.generate("a", history, Sampling(max_tokens=20, ignore_eos=True))
            assert num_before - answer.usage.reused_tokens <= 32
            history += tuple(token.id for token in answer.tokens)
            num_before = len(history)
            history += prompt(turn, 15)
            await fleet.swap("e0", to="b")
            await fleet.swap("e0", to="a")


@pytest.mark.parametrize("way", ["left", "closed gracefully", "left amid its answer"])
async def test_a_chat_finds_its_history_after_its_service_was_started_anew(
    store: DictStore, tmp_path: Path, way: str
) -> None:
    """By its first request already, which tells the layout of blocks."""
    history, num_before = PROMPTS[0], 0
    for turn in range(4):
        tokens: list[int] = []
        async with make_fleet(store, SharedKVStore(tmp_path / "shared", "64 MiB")) as fleet:
            await fleet.swap("e0", to="a")
            stream = fleet.stream("a", history, Sampling(max_tokens=20, ignore_eos=True))
            async with stream as answer:
                async for token in answer:
                    tokens.append(token.id)
                    if way == "left amid its answer" and len(tokens) == 10:
                        break
                assert num_before - answer.usage.reused_tokens <= 32
                if way == "closed gracefully":
                    await fleet.close_gracefully()
        history += tuple(tokens)
        num_before = len(history)
        history += prompt(turn, 15)


async def test_requests_of_one_prompt_are_restored_with_one_copy_of_it(store: DictStore) -> None:
    clients = [Client(0, seed=number) for number in range(4)]
    for client in clients:
        client.prompt = prompt(7, 400)
    async with make_fleet(store, HostKVStore("64 MiB")) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as tasks:
            for client in clients:
                tasks.start_soon(client.run, fleet)
            for client in clients:
                await client.has(2)
            await fleet.swap("e0", to="b")
            num_saved = fleet.swaps[-1].num_saved
            await fleet.swap("e0", to="a")
        for client in clients:
            again = await fleet.generate("a", client.prompt, client.sampling)
            assert client.tokens == [token.id for token in again.tokens]
    if num_saved == len(clients):  # else some had ended before
        hops = [client.stream.hops[1] for client in clients if client.stream is not None]
        of_prompts = [hop.restored_tokens - hop.first_index for hop in hops]
        assert max(of_prompts) >= 390
        assert sum(of_prompts) < 2 * 400


async def test_a_prompt_whose_log_probabilities_are_asked_for_is_computed(store: DictStore) -> None:
    sampling = Sampling(max_tokens=3, ignore_eos=True, prompt_logprobs=1)
    async with make_fleet(store, HostKVStore("64 MiB")) as fleet:
        await fleet.swap("e0", to="a")
        before = await fleet.generate("a", PROMPTS[1], sampling)
        await fleet.swap("e0", to="b")
        await fleet.swap("e0", to="a")
        after = await fleet.generate("a", PROMPTS[1], sampling)
    assert fleet.swaps[-2].saved_bytes > 0
    assert after.samples[0].hops[0].restored_tokens == 0
    assert after.prompt_logprobs == before.prompt_logprobs


def test_versions_of_adapters_are_told_from_those_of_other_fleets() -> None:
    """Both call theirs by one name and number, whatever is in it."""
    plain, lookups = make_layout(None), [KVLookup(HostKVStore(0), fleet) for fleet in ("one", "other")]
    alike, apart = (
        {lookup.prefix(layout, range(40)).key(0) for lookup in lookups}
        for layout in (plain, make_layout(AdapterId("sql")))
    )
    assert (len(alike), len(apart)) == (1, 2)


def make_layout(adapter: AdapterId | None) -> KVLayout:
    return KVLayout(
        model=ModelId("a"), weights="w", adapter=adapter, block_tokens=32, layers=(), block_bytes=64
    )


async def test_blocks_of_an_adapter_come_back_to_that_adapter_alone(
    store: DictStore, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root, model = tmp_path_factory.mktemp("adapters"), make_model("llama", seed=0)
    adapters = [
        Adapter(name, "a", write(root / name, model, seed=seed, r=4, size=4.0))
        for seed, name in enumerate(("x", "y"), 1)
    ]
    clients = [Client(number, adapter.id) for number in range(len(PROMPTS)) for adapter in adapters]
    async with make_fleet(store, HostKVStore("64 MiB"), adapters=adapters) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as tasks:
            for client in clients:
                tasks.start_soon(client.run, fleet)
            for client in clients[:8]:
                await client.has(5)
            await fleet.swap("e0", to="b")
            await fleet.swap("e0", to="a")
    assert [client.tokens for client in clients] == await undisturbed(store, adapters)
    assert sum(client.num_restored > 0 for client in clients) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("has_disk", [False, True], ids=["memory", "memory and disk"])
async def test_random_swaps_losses_and_budgets_lose_no_token(
    store: DictStore, tmp_path: Path, has_disk: bool
) -> None:
    """Two engines save and restore at once, with a store of 1.2 times one request."""
    random, seen = Random(11), Counter[str]()
    engines = [make_engine("e0", 1024), make_engine("e1", 1024)]
    clients = [Client(number % len(PROMPTS)) for number in range(24)]
    size_bytes = round(1.2 * 9 * BLOCK_BYTES)
    kv_store = _tiered(tmp_path, size_bytes) if has_disk else HostKVStore(size_bytes)
    async with make_fleet(store, kv_store, engines) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as tasks:
            for client in clients:
                tasks.start_soon(client.run, fleet)
            async with anyio.create_task_group() as others:
                for engine in engines:
                    others.start_soon(disturb, fleet, engine, Random(random.random()), clients, seen)
            await ensure(fleet, engines[0])
        await settle(engines)
        all_released(fleet, engines)
    whole = await undisturbed(store)
    assert [client.tokens for client in clients] == [whole[number % len(PROMPTS)] for number in range(24)]
    assert seen["swaps"] > 5
    assert any(client.num_restored for client in clients)
