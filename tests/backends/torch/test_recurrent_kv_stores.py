"""Requests that are evicted are saved with their recurrent states, and restored with them or computed."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
import transformers
from torch import Tensor

from hotswap import Fleet, FleetStream, Model, ModelId, Sampling
from hotswap.abc import KVStore
from hotswap.backends.kv_index import Found, KVIndex
from hotswap.backends.kv_stores import HostKVStore, NvmeKVStore, SharedKVStore, TieredKVStore
from hotswap.backends.kv_stores.pages import Pages
from hotswap.backends.torch import SkeletonCache, TorchEngine
from hotswap.backends.torch.recurrent import StatePool
from hotswap.kv_store import KVPrefix
from hotswap.policies import LeastLoadedRouter
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.hybrids import make_hybrid
from tests.backends.torch.zoo import VOCABULARY, generate, make_model
from tests.runtime.support import Idle, until

SKELETONS = SkeletonCache()
NUM_TOKENS, BLOCK = 160, 16
GREEDY = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True)

KV_STORES: dict[str, Callable[[Path], KVStore]] = {
    "memory": lambda directory: HostKVStore("16 MiB"),
    "disk": lambda directory: NvmeKVStore(directory, "16 MiB"),
    "both": lambda directory: TieredKVStore(
        HostKVStore("256 KiB"), NvmeKVStore(directory, "16 MiB"), headroom="128 KiB"
    ),
    "shared": lambda directory: SharedKVStore(directory / "shared", "16 MiB"),
    "too small": lambda directory: HostKVStore("100 KiB"),
}


def prompts_of(seed: int, *lengths: int) -> list[tuple[int, ...]]:
    random = Random(seed)
    return [tuple(random.randrange(2, VOCABULARY) for _ in range(length)) for length in lengths]


class Client:
    """Reads one request, and knows what it was given."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self.prompt, self.tokens = prompt, list[int]()
        self.stream: FleetStream | None = None

    async def run(self, fleet: Fleet) -> None:
        async with fleet.stream("a", self.prompt, GREEDY) as self.stream:
            async for token in self.stream:
                self.tokens.append(token.id)

    @property
    def num_restored(self) -> int:
        assert self.stream is not None
        return sum(hop.restored_tokens for hop in self.stream.hops)


async def have(clients: Sequence[Client], count: int) -> None:
    """Return when each has so many tokens."""
    await until(lambda: all(len(one.tokens) >= count for one in clients))


async def swap_away_and_back(model: Any, kv_store: KVStore, clients: list[Client], times: int = 2) -> int:
    """Run clients while their model is swapped for another one and back; return how many were saved."""
    store = DictStore()
    store.add("a", model)
    store.add("b", make_model("llama"))
    engine = TorchEngine(
        "e0", kv_tokens=2048, max_requests=4, token_budget=64, threads=1, packed_bytes=0, skeletons=SKELETONS
    )
    async with Fleet(
        engines=[engine],
        store=store,
        models=[Model("a"), Model("b")],
        router=LeastLoadedRouter(),
        scheduler=Idle(),
        kv_store=kv_store,
    ) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as tasks:
            for client in clients:
                tasks.start_soon(client.run, fleet)
            for turn in range(times):
                await have(clients, 9 * turn + 1)
                await fleet.swap("e0", to="b", deadline_s=0.0)
                await fleet.swap("e0", to="a")
        batcher = engine._models.migration_context().runner.batcher
        await until(lambda: sorted(batcher._free_slots) == list(range(4)))
        status, view = engine.status(), fleet.view().kv_store
        assert status.num_free_kv_blocks == status.num_kv_blocks
        assert view is not None
        assert view.num_leases == 0
        return sum(record.num_saved for record in fleet.swaps)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [*(("qwen3_5", kind) for kind in KV_STORES), ("lfm2", "memory"), ("mamba2", "both"), ("jamba", "memory")],
)
async def test_tokens_are_those_of_an_undisturbed_run(architecture: str, kind: str, tmp_path: Path) -> None:
    model = make_hybrid(architecture)
    clients = [Client(prompt) for prompt in prompts_of(1, 5, 47, 130)]
    num_saved = await swap_away_and_back(model, KV_STORES[kind](tmp_path), clients)
    assert [one.tokens for one in clients] == [generate(model, one.prompt, NUM_TOKENS) for one in clients]
    if kind != "too small":
        assert sum(one.num_restored for one in clients) >= 40 * num_saved > 0


def no_states_restored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StatePool, "restore", lambda pool, slot, data: None)


def states_of_another_request(patch: pytest.MonkeyPatch) -> None:
    save = StatePool.save

    def save_next(pool: StatePool, slot: int, out: Tensor) -> None:
        save(pool, (slot + 1) % pool.num_slots, out)

    patch.setattr(StatePool, "save", save_next)


def states_of_the_longest_text(patch: pytest.MonkeyPatch) -> None:
    """The store finds blocks by their tokens, and has the states after all of them."""
    find = KVIndex.find_with_states
    newest: list[Any] = []

    def find_any(index: KVIndex[Pages], prefix: KVPrefix) -> Found[Pages]:
        found = find(index, prefix)
        newest[:] = [block for block in index if not block.tokens][-1:] or newest
        return Found(found.blocks, found.num_tokens, newest[0]) if found.states else found

    patch.setattr(KVIndex, "find_with_states", find_any)


@pytest.mark.parametrize(
    "plant",
    [no_states_restored, states_of_another_request, states_of_the_longest_text],
    ids=lambda plant: plant.__name__,
)
async def test_wrong_states_would_be_seen(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test of the test above: each planted fault changes tokens."""
    model = make_hybrid("qwen3_5")
    clients = [Client(prompt) for prompt in prompts_of(1, 47, 90)]
    plant(monkeypatch)
    assert await swap_away_and_back(model, HostKVStore("16 MiB"), clients) > 0
    assert sum(one.num_restored for one in clients) > 0
    assert [one.tokens for one in clients] != [generate(model, one.prompt, NUM_TOKENS) for one in clients]


@pytest.mark.parametrize("architecture", ["qwen3_5", "lfm2", "mamba2"])
async def test_chats_find_their_history_after_their_model_was_away(architecture: str) -> None:
    """Nothing of them runs while it is swapped away and back, between all their turns."""
    model, store = make_hybrid(architecture), DictStore()
    store.add("a", model)
    store.add("b", make_model("llama"))
    engine = TorchEngine(
        "e0", kv_tokens=2048, kv_block_tokens=BLOCK, threads=1, packed_bytes=0, skeletons=SKELETONS
    )
    chats = [list(prompt) for prompt in prompts_of(4, 20, 70)]
    async with Fleet(
        engines=[engine],
        store=store,
        models=[Model("a"), Model("b")],
        router=LeastLoadedRouter(),
        scheduler=Idle(),
        kv_store=HostKVStore("16 MiB"),
    ) as fleet:
        for turn in range(3):
            await fleet.swap("e0", to="a")
            for chat in chats:
                had = len(chat) - 1
                chat += [7, 8, 9] if turn else []
                async with fleet.stream("a", chat, Sampling(max_tokens=30, ignore_eos=True)) as tokens:
                    answer = [token.id async for token in tokens]
                    restored = sum(hop.restored_tokens for hop in tokens.hops)
                assert answer == generate(model, chat, 30)
                assert restored == (had // BLOCK * BLOCK if turn else 0)
                chat += answer
            await fleet.swap("e0", to="b")


async def test_blocks_that_were_saved_ahead_are_not_used_without_states() -> None:
    """An engine is lost amid saves of what is full: blocks are stored then, and no states."""
    model, store = make_hybrid("qwen3_5"), DictStore()
    store.add("a", model)
    engines = [
        TorchEngine(name, kv_tokens=2048, threads=1, packed_bytes=0, skeletons=SKELETONS)
        for name in ("e0", "e1")
    ]
    clients = [Client(prompt) for prompt in prompts_of(2, 47, 90)]
    async with Fleet(
        engines=engines,
        store=store,
        models=[Model("a")],
        router=LeastLoadedRouter(),
        scheduler=Idle(),
        kv_store=HostKVStore("16 MiB"),
        kv_write_through_s=0.02,
    ) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as tasks:
            for client in clients:
                tasks.start_soon(client.run, fleet)
            await have(clients, 40)
            await fleet.swap("e1", to="a")
            engines[0].lose()
    assert [one.tokens for one in clients] == [generate(model, one.prompt, NUM_TOKENS) for one in clients]
    assert sum(one.num_restored for one in clients) == 0


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory as Linux tells it")
async def test_swaps_away_and_back_leak_no_memory() -> None:
    start, end = await memory_around_swaps(num_before=4, num_rounds=6)
    assert abs(end - start) < 16 << 20


async def memory_around_swaps(*, num_before: int, num_rounds: int) -> tuple[int, int]:
    """Return the process's memory after some swaps A-B-A under a request, and after more of them.

    Weights, recurrent states and saved blocks are over 16 MB each, so that a leak of any would show.
    """
    wide: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "eos_token_id": None,
        "num_hidden_layers": 3,
    }
    hybrid = transformers.Qwen3_5TextConfig(
        **wide,
        head_dim=64,
        linear_num_key_heads=8,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
    )
    model, store = make_model(hybrid), DictStore()
    cards = [store.add("a", model), store.add("b", make_model(transformers.Qwen3Config(**wide, head_dim=64)))]
    assert min(card.weight_bytes for card in cards) > 16 << 20
    (prompt,) = prompts_of(3, 40)
    expected = generate(model, prompt, 60)
    del model
    engine = TorchEngine("e0", kv_tokens=2048, max_requests=64, threads=1, skeletons=SKELETONS)
    async with Fleet(
        engines=[engine],
        store=store,
        models=[Model("a"), Model("b")],
        router=LeastLoadedRouter(),
        scheduler=Idle(),
        kv_store=HostKVStore("16 MiB"),
    ) as fleet:
        await fleet.swap("e0", to="a")
        assert engine._models.migration_context().layout(ModelId("a"), None).state_bytes * 64 > 16 << 20

        async def run_round() -> None:
            received: list[int] = []
            async with fleet.stream("a", prompt, Sampling(max_tokens=60, ignore_eos=True)) as tokens:
                received += [(await anext(tokens)).id for _ in range(3)]
                await fleet.swap("e0", to="b", deadline_s=0.0)
                await fleet.swap("e0", to="a")
                received += [token.id async for token in tokens]
            assert received == expected

        for _ in range(num_before):
            await run_round()
        start = resident_bytes()
        for _ in range(num_rounds):
            await run_round()
        return start, resident_bytes()
