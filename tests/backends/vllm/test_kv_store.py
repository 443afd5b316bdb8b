"""Requests and chats of vLLM's cores find their KV blocks after their model was away."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from hotswap import Fleet, Model, Sampling
from hotswap.abc import Engine, KVLayout, KVLease, KVPrefix, KVPut, KVStore
from hotswap.backends.kv_stores import HostKVStore
from hotswap.backends.vllm import VllmEngine
from hotswap.backends.vllm.inside.ended import MOST_REQUESTS, Ended
from hotswap.policies import LeastLoadedRouter
from tests.backends.torch.dict_store import DictStore
from tests.backends.vllm.support import make_engine, make_store
from tests.backends.vllm.test_resumption import asked
from tests.runtime.support import Idle

BLOCK_TOKENS = 32
GREEDY = Sampling(max_tokens=300, ignore_eos=True)
SEEDED = Sampling(max_tokens=300, ignore_eos=True, temperature=1.0, seed=3)


def make_fleet(store: DictStore, kv_store: KVStore | None, *engines: Engine) -> Fleet:
    return Fleet(
        engines=engines or [make_engine()],
        store=store,
        models=[Model("a"), Model("b"), Model("deep")],
        router=LeastLoadedRouter(),
        scheduler=Idle(),
        kv_store=kv_store,
        interval_s=3600.0,
    )


def prompt(seed: int, count: int) -> tuple[int, ...]:
    random = Random(seed)
    return tuple(random.randrange(2, 500) for _ in range(count))


async def away(fleet: Fleet, other: str = "deep") -> None:
    """Swap to another model and back; `deep` takes another core, so nothing is left in the first."""
    await fleet.swap("e0", to=other)
    await fleet.swap("e0", to="a")


@pytest.mark.parametrize("other", ["b", "deep"], ids=["in one core", "in a core of its own"])
async def test_a_chat_of_ten_turns_finds_its_history_after_its_model_was_away(other: str) -> None:
    history, num_before = prompt(0, 40), 0
    async with make_fleet(make_store(), HostKVStore("64 MiB")) as fleet:
        await fleet.swap("e0", to="a")
        for turn in range(10):
            answer = await fleet.generate("a", history, Sampling(max_tokens=20, ignore_eos=True))
            assert num_before - answer.usage.reused_tokens <= BLOCK_TOKENS
            history += tuple(token.id for token in answer.tokens)
            num_before = len(history)
            history += prompt(turn + 1, 15)
            await away(fleet, other)
        view = fleet.view().kv_store
        assert view is not None
        assert view.num_leases == 0


async def run(
    fleet: Fleet, sampling: Sampling, *, evict_at: Sequence[int], other: str = "deep"
) -> tuple[list[int], int]:
    """Read a stream whose model goes and comes at some tokens; return its tokens and how many came back."""
    got: list[int] = []
    async with fleet.stream("a", prompt(7, 100), sampling) as stream:
        async for token in stream:
            got.append(token.id)
            if len(got) in evict_at:
                await away(fleet, other)
        return got, sum(hop.restored_tokens for hop in stream.hops)


async def test_tokens_over_evictions_at_random_tokens_are_those_of_an_undisturbed_run() -> None:
    random = Random(5)
    async with make_fleet(make_store(), HostKVStore("64 MiB")) as fleet:
        await fleet.swap("e0", to="a")
        for sampling in (GREEDY, SEEDED):
            got, num_restored = await run(fleet, sampling, evict_at=sorted(random.sample(range(1, 40), 3)))
            expected, _ = await run(fleet, sampling, evict_at=[])
            assert got == expected
            if any(record.num_saved for record in fleet.swaps):  # it may have ended, ahead of its reader
                assert num_restored >= 96


class FaultyStore(HostKVStore):
    """A store of which one method fails, or whose pieces fail when they are copied."""

    def __init__(self, fails: str) -> None:
        super().__init__("64 MiB")
        self.fails, self.num_failed = fails, 0

    def _fail(self, method: str) -> None:
        if self.fails == method:
            self.num_failed += 1
            raise RuntimeError(f"a planted fault in {method}")

    def lookup(self, prefix: KVPrefix) -> int:
        self._fail("lookup")
        return super().lookup(prefix)

    def lease(self, prefix: KVPrefix) -> KVLease:
        self._fail("lease")
        return super().lease(prefix)

    def put(self, prefix: KVPrefix, *, prefill_s: float = 0.0, copy_s: float = 0.0) -> KVPut:
        self._fail("put")
        return super().put(prefix, prefill_s=prefill_s, copy_s=copy_s)


@pytest.mark.parametrize("fails", ["lookup", "lease", "put"])
async def test_a_fault_of_the_store_fails_no_swap_and_no_request(fails: str) -> None:
    kv_store = FaultyStore(fails)
    async with make_fleet(make_store(), kv_store) as fleet:
        await fleet.swap("e0", to="a")
        got, num_restored = await run(fleet, GREEDY, evict_at=[3, 20])
        again = await fleet.generate("a", (*prompt(7, 100), *got), Sampling(max_tokens=2, ignore_eos=True))
        assert len(again.tokens) == 2
        assert kv_store.num_failed > 0
        assert num_restored == 0
        kv_store.fails = ""
        expected, _ = await run(fleet, GREEDY, evict_at=[])
        assert got == expected


async def test_where_another_connector_is_set_tokens_come_back_and_the_log_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    kv_store = HostKVStore("64 MiB")
    with caplog.at_level(logging.WARNING, logger="hotswap.vllm"):
        engine = make_engine(arguments={"kv_transfer_config": connector})
        async with make_fleet(make_store(), kv_store, engine) as fleet:
            await fleet.swap("e0", to="a")
            # This connector tells models of several depths not apart.
            got, num_restored = await run(fleet, GREEDY, evict_at=[3, 20], other="b")
            expected, _ = await run(fleet, GREEDY, evict_at=[])
    assert got == expected
    assert num_restored == 0
    assert sum("as tokens" in record.getMessage() for record in caplog.records) == 1


async def test_blocks_of_other_weights_are_not_restored() -> None:
    sampling = Sampling(max_tokens=20, ignore_eos=True)
    async with make_fleet(make_store(), None) as fleet:
        await fleet.swap("e0", to="b")
        expected = await fleet.generate("b", prompt(7, 100), sampling)
    async with make_fleet(make_store(), HostKVStore("64 MiB")) as fleet:
        await fleet.swap("e0", to="a")
        await fleet.generate("a", prompt(7, 100), sampling)
        await fleet.swap("e0", to="b")
        got = await fleet.generate("b", prompt(7, 100), sampling)
    assert got.usage.reused_tokens == 0
    assert [token.id for token in got.tokens] == [token.id for token in expected.tokens]


async def layout_in(engine: VllmEngine, store: DictStore) -> KVLayout:
    async with engine:
        await engine.load(store.card("a"), store)
        async with engine.import_kv(asked("greedy", 1)) as sink:
            return sink.layout


async def test_blocks_are_of_one_format_only_where_their_weights_are_computed_with_alike() -> None:
    plain = await layout_in(make_engine("one"), make_store())
    assert await layout_in(make_engine("two"), make_store()) == plain
    other = make_engine("three", arguments={"hf_overrides": {"rope_theta": 500.0}})
    assert (await layout_in(other, make_store())).weights != plain.weights


def ended(*hashes: bytes, salt: str = "w", adapter: str = "") -> Any:
    return SimpleNamespace(
        block_hashes=list(hashes),
        all_token_ids=list(range(4 * len(hashes) + 1)),
        cache_salt=salt,
        lora_request=SimpleNamespace(lora_name=adapter) if adapter else None,
    )


def test_of_a_chat_its_last_turn_is_remembered_within_bounds() -> None:
    notes = Ended()
    notes.note(ended(b"1"), 4)
    notes.note(ended(b"1", b"2", adapter="x"), 4)
    notes.note(ended(b"other", salt="v"), 4)
    notes.note(ended(), 4)  # of less than a block
    assert [(entry.tokens, entry.adapter) for entry in notes.latest("w")] == [(tuple(range(8)), "x")]
    assert [entry.hashes for entry in notes.latest("v")] == [(b"other",)]
    for number in range(2 * MOST_REQUESTS):
        notes.note(ended(b"many %d" % number), 4)
    found = notes.latest("w")
    assert len(found) == MOST_REQUESTS
    assert found[0].hashes == (b"many %d" % (2 * MOST_REQUESTS - 1),)
    assert notes.find(found[-1].id) is found[-1]
    notes.clear()
    assert notes.latest("w") == []
    assert notes.find(found[0].id) is None
