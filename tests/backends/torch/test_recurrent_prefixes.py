"""Requests of models with recurrent states go on from snapshots, with the tokens of an undisturbed run."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import anyio
import pytest
from torch import Tensor

from hotswap import Adapter, AdapterId, ModelId, Request, RequestId, Sampling
from hotswap.backends.torch import SkeletonCache, TorchEngine, attention
from hotswap.backends.torch.forward import LocalForward
from hotswap.backends.torch.kv import KVCache
from hotswap.backends.torch.recurrent import SnapshotPool, StateCopy, StatePool
from hotswap.errors import ConfigError, InstanceError, OutOfMemory
from tests.backends.torch.adapters.files import merged, write
from tests.backends.torch.clients import make_client_plans, run_until_preempted
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.hybrids import make_hybrid
from tests.backends.torch.zoo import VOCABULARY, generate

SKELETONS = SkeletonCache()
BLOCK = 16
NUM_TURNS, NUM_CHATS = 3, 3
SLOT_BYTES = {"lfm2": 1024, "qwen3_5": 11_264}
FAMILIES = ["lfm2", "qwen3_5", "qwen3_next", "bamba", "mamba2", "kimi_linear", "jamba"]

Plant: TypeAlias = Callable[[pytest.MonkeyPatch], None]


def prompts_of(random: Random, *lengths: int) -> list[list[int]]:
    return [[random.randrange(2, VOCABULARY) for _ in range(length)] for length in lengths]


def ask(prompt: Sequence[int], name: str = "r", adapter: str | None = None, **sampling: Any) -> Request:
    options = {"max_tokens": 12, "ignore_eos": True, **sampling}
    return Request(
        id=RequestId(name),
        model=ModelId("m"),
        prompt=tuple(prompt),
        adapter=None if adapter is None else AdapterId(adapter),
        sampling=Sampling(**options),
    )


async def read(engine: TorchEngine, request: Request) -> tuple[list[int], int]:
    """Return a request's tokens, and how many of its tokens were not computed."""
    async with engine.stream(request) as tokens:
        return [token.id async for token in tokens], tokens.num_reused_tokens


@asynccontextmanager
async def serving(model: Any, **options: Any) -> AsyncGenerator[TorchEngine]:
    store = DictStore()
    card = store.add("m", model)
    settings: dict[str, Any] = {
        "kv_tokens": 1024,
        "kv_block_tokens": BLOCK,
        "max_requests": 6,
        "threads": 1,
        "skeletons": SKELETONS,
    }
    async with TorchEngine("e0", **settings | options) as engine:
        await engine.load(card, store)
        yield engine
        status = engine.status()
        assert status.num_free_kv_blocks == status.num_kv_blocks, "snapshots keep no blocks"


# ----------------------------------------------------------------------------------------------- chats


@dataclass
class Chat:
    """A conversation: what is said in each turn, and what an undisturbed run answers."""

    said: list[list[int]]
    answers: list[list[int]] = field(default_factory=list)

    def prompt(self, turn: int) -> list[int]:
        parts = zip(self.said[: turn + 1], [*self.answers[:turn], []], strict=True)
        return [token for said, answer in parts for token in (*said, *answer)]


def make_chats(model: Any, seed: int) -> list[Chat]:
    """Return chats that begin with the same 50 tokens, with the answers of `generate`."""
    random = Random(seed)
    (system,) = prompts_of(random, 50)
    chats = [
        Chat(prompts_of(random, *(random.choice([3, 14, 30]) for _ in range(NUM_TURNS))))
        for _ in range(NUM_CHATS)
    ]
    for chat in chats:
        chat.said[0] = [*system, *chat.said[0]]
        for turn in range(NUM_TURNS):
            chat.answers.append(generate(model, chat.prompt(turn), random.choice([1, 9, 25])))
    return chats


async def run_chats(
    engine: TorchEngine, chats: Sequence[Chat]
) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Return the answers of chats that go on at the same time, and how many tokens each turn reused."""
    answers: list[list[list[int]]] = [[] for _ in chats]
    reused: list[list[int]] = [[] for _ in chats]

    async def run(at: int) -> None:
        for turn, answer in enumerate(chats[at].answers):
            request = ask(chats[at].prompt(turn), f"chat {at}", max_tokens=len(answer))
            got, num_reused = await read(engine, request)
            answers[at].append(got)
            reused[at].append(num_reused)

    async with anyio.create_task_group() as tasks:
        for at in range(len(chats)):
            tasks.start_soon(run, at)
    return answers, reused


def check_reuse(chats: Sequence[Chat], reused: Sequence[Sequence[int]]) -> None:
    """Check that each turn computed at most one block of what the turn before had."""
    for chat, counts in zip(chats, reused, strict=True):
        for turn in range(1, NUM_TURNS):
            had = len(chat.prompt(turn - 1)) + len(chat.answers[turn - 1]) - 1
            assert had - BLOCK < counts[turn] <= had


@pytest.mark.parametrize("architecture", FAMILIES)
async def test_turns_of_chats_compute_at_most_one_block_again(architecture: str) -> None:
    """In parts of prompts that other chats interrupt; all share what they begin with."""
    model = make_hybrid(architecture)
    chats = make_chats(model, seed=1)
    async with serving(model, token_budget=24, snapshot_bytes="1 MiB") as engine:
        answers, reused = await run_chats(engine, chats)
        assert answers == [chat.answers for chat in chats]
        check_reuse(chats, reused)
        assert engine.num_reused_tokens == sum(map(sum, reused))
        # The system prompt was found by the second request, and saved for those that come now.
        request = ask([*chats[0].prompt(0)[:50], 7, 7, 7], max_tokens=6)
        assert await read(engine, request) == (generate(model, list(request.prompt), 6), 48)


@pytest.mark.parametrize("architecture", ["lfm2", "qwen3_next", "bamba", "jamba"])
async def test_devices_without_kernels_copy_states_as_well(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVCache, "in_place", False)
    monkeypatch.setattr(attention, "attend", None)
    monkeypatch.setattr(StatePool, "uses_kernels", False)
    model = make_hybrid(architecture)
    chats = make_chats(model, seed=2)
    async with serving(model, token_budget=24, skeletons=SkeletonCache()) as engine:
        answers, reused = await run_chats(engine, chats)
    assert answers == [chat.answers for chat in chats]
    check_reuse(chats, reused)


@pytest.mark.parametrize("architecture", ["lfm2", "qwen3_5", "bamba"])
async def test_requests_that_are_preempted_abort_and_come_back_get_the_tokens_of_generate(
    architecture: str,
) -> None:
    random, model = Random(3), make_hybrid(architecture)
    shared, *rests = prompts_of(random, 40, 1, 5, 17, 30, 2, 20)
    prompts = [[*shared[: random.choice([0, 16, 40])], *rest] for rest in rests]
    expected = [generate(model, prompt, 50) for prompt in prompts]
    samplings = [Sampling(max_tokens=50)] * len(prompts)
    async with serving(model, kv_tokens=208, token_budget=24, snapshot_bytes="1 MiB") as engine:
        await run_until_preempted(engine, make_client_plans(random, "m", prompts, samplings), expected)
        assert engine.num_reused_tokens > 0


async def test_samples_of_one_prompt_compute_it_once() -> None:
    model = make_hybrid("qwen3_5")
    (prompt,) = prompts_of(Random(4), 70)
    expected = generate(model, prompt, 30)
    got: list[tuple[list[int], int]] = []
    async with serving(model) as engine, engine.stream(ask(prompt, "first", max_tokens=30)) as first:
        tokens = [(await anext(first)).id]

        async def sample(at: int) -> None:
            got.append(await read(engine, ask(prompt, f"sample {at}", max_tokens=30)))

        async with anyio.create_task_group() as tasks:
            for at in range(4):
                tasks.start_soon(sample, at)
        tokens += [token.id async for token in first]
    assert tokens == expected
    assert got == [(expected, 64)] * 4


async def test_adapters_share_nothing_with_the_model_and_each_goes_on_from_its_own(tmp_path: Path) -> None:
    random, model = Random(5), make_hybrid("lfm2")
    names = ("in_proj", "out_proj", "w1")
    adapters = [
        Adapter(name, "m", write(tmp_path / name, model, seed=seed, size=4.0, names=names, r=8))
        for seed, name in enumerate("ab")
    ]
    models: dict[str | None, Any] = {None: model}
    models |= {name: merged(model, tmp_path / name) for name in "ab"}
    (prompt,) = prompts_of(random, 60)
    async with serving(model) as engine:
        for adapter in adapters:
            await engine.load_adapter(adapter)
        for num_reused in (0, 48):
            for name, each in models.items():
                request = ask(prompt, adapter=name, max_tokens=8)
                assert await read(engine, request) == (generate(each, prompt, 8), num_reused)


async def test_a_prompt_whose_log_probabilities_are_asked_for_is_computed() -> None:
    model = make_hybrid("qwen3_5")
    (prompt,) = prompts_of(Random(6), 60)
    async with serving(model) as engine:
        for count, num_reused in ((None, 0), (1, 0), (None, 48)):
            request = ask(prompt, prompt_logprobs=count)
            assert await read(engine, request) == (generate(model, prompt, 12), num_reused)


# ----------------------------------------------------------------------------------------------- what goes


async def test_nothing_is_left_of_a_model_that_was_away() -> None:
    """Also where the next model was preloaded, whose blocks have the same format."""
    models = {name: make_hybrid("falcon_h1", seed=seed) for seed, name in enumerate("ab")}
    (prompt,) = prompts_of(Random(7), 60)
    store = DictStore()
    cards = {name: store.add(name, model) for name, model in models.items()}
    expected = {name: generate(model, prompt, 12) for name, model in models.items()}
    assert expected["a"] != expected["b"]
    async with TorchEngine(
        "e0", kv_tokens=512, kv_block_tokens=BLOCK, threads=1, skeletons=SKELETONS
    ) as engine:
        await engine.load(cards["a"], store)
        for name, following in ("ab", "ba", "aa"):
            for num_reused in (0, 48):
                request = replace(ask(prompt), model=ModelId(name))
                assert await read(engine, request) == (expected[name], num_reused)
            await engine.preload(cards[following], store)
            await engine.unload()
            await engine.load(cards[following], store)


@pytest.mark.parametrize("options", [{"prefix_reuse": False}, {"snapshot_bytes": 0}])
async def test_reuse_can_be_turned_off(options: dict[str, Any]) -> None:
    model = make_hybrid("lfm2")
    (prompt,) = prompts_of(Random(8), 60)
    async with serving(model, **options) as engine:
        for _ in range(2):
            assert await read(engine, ask(prompt)) == (generate(model, prompt, 12), 0)
        assert engine.num_reused_tokens == 0
        states = engine._models.migration_context().states if options.get("prefix_reuse", True) else None
        assert states is None or (isinstance(states, StatePool) and states.num_slots == 6)


def test_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="snapshot_bytes"):
        TorchEngine("e0", snapshot_bytes="many")


async def test_requests_after_a_step_that_failed_find_nothing_that_it_wrote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks and snapshots of the step are taken back, also those of requests that go on."""
    model, result = make_hybrid("qwen3_5"), LocalForward.result
    good, bad = prompts_of(Random(9), 40, 60)
    expected = generate(model, good, 200)
    poison = next(token for token in range(8, VOCABULARY) if token not in (*good, *bad, *expected))

    def fail(self: LocalForward) -> Tensor:
        made, pieces = result(self), self.work.pieces
        if any(poison in piece.tokens for piece in pieces):
            assert self.states is not None
            written = [block for piece in pieces for block in piece.blocks[piece.start // BLOCK :]]
            slots = [*(piece.slot for piece in pieces), *(copy.target for copy in self.work.saved)]
            for state in self.states.tensors:
                state[slots] = 7
            for kept in self.cache.tensors:
                kept[:, written] = 7
            raise RuntimeError("the device fell off")
        return made

    monkeypatch.setattr(LocalForward, "result", fail)
    async with serving(model, token_budget=64) as engine:
        async with engine.stream(ask(good, "good", max_tokens=200)) as tokens:
            got = [(await anext(tokens)).id]
            for count in range(20, 40):  # the other request is anywhere in its block when steps fail
                with pytest.raises(InstanceError):
                    await read(engine, ask([*bad[:count], poison], f"bad {count}"))
                assert (await read(engine, ask(bad[:20], max_tokens=1)))[0] == generate(model, bad[:20], 1)
            got += [token.id async for token in tokens]
        assert got == expected
        assert (await read(engine, ask(good, max_tokens=200)))[0] == expected
        assert (await read(engine, ask(bad)))[0] == generate(model, bad, 12)


# ----------------------------------------------------------------------------------------------- moves


async def test_a_request_that_has_moved_leaves_its_history_to_the_next_turn() -> None:
    model = make_hybrid("qwen3_5")
    (prompt,) = prompts_of(Random(10), 50)
    expected = generate(model, prompt, 40)
    request = ask(prompt, max_tokens=40)
    async with serving(model) as source_engine, serving(model) as destination:
        async with source_engine.stream(request) as tokens:
            for _ in range(9):
                await anext(tokens)
            async with (
                source_engine.export_kv(request.id) as source,
                destination.import_kv(request) as sink,
            ):
                stopped = await source.stop()
                await sink.reserve(stopped.num_computed)
                await sink.write(await source.read(0, stopped.num_computed))
                await sink.commit(stopped.tokens)
                moved = request.continued(stopped.tokens[len(prompt) :])
                got, num_reused = await read(destination, moved)
        assert ([*moved.generated, *got], num_reused) == (expected, stopped.num_computed)
        following = [*prompt, *expected, 9, 9]
        assert await read(destination, ask(following)) == (generate(model, following, 12), 80)


# ----------------------------------------------------------------------------------------------- memory


async def test_snapshots_are_in_the_budget_of_memory() -> None:
    model, store = make_hybrid("qwen3_5"), DictStore()
    card = store.add("m", model)
    sizes: dict[str, int] = {}
    options: dict[str, Any] = {"kv_tokens": 512, "max_requests": 4, "threads": 1, "skeletons": SKELETONS}
    for name, given in {
        "none": {"snapshot_bytes": 0},
        "default": {},
        "three": {"snapshot_bytes": 3 * SLOT_BYTES["qwen3_5"]},
        "little memory": {"memory_bytes": card.weight_bytes + 12 * SLOT_BYTES["qwen3_5"] + 40_000},
    }.items():
        async with TorchEngine("e0", **options | given) as engine:
            await engine.load(card, store)
            states = engine._models.migration_context().states
            assert isinstance(states, StatePool)
            assert states.slot_bytes == SLOT_BYTES["qwen3_5"]
            sizes[name] = states.num_slots
            assert engine._models.cache_bytes >= states.size_bytes == states.num_slots * states.slot_bytes
    assert sizes == {"none": 4, "default": 8, "three": 7, "little memory": 5}
    options |= {"memory_bytes": card.weight_bytes + (1 << 20), "snapshot_bytes": "1 MiB"}
    async with TorchEngine("e0", **options) as engine:
        with pytest.raises(OutOfMemory, match=r"snapshots, which take .*snapshot_bytes"):
            await engine.load(card, store)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory as Linux tells it")
async def test_memory_does_not_grow_with_the_number_of_requests() -> None:
    model = make_hybrid("lfm2")
    random = Random(11)

    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    async with serving(model, snapshot_bytes="64 KiB") as engine:
        context = engine._models.migration_context()
        batcher, states = context.runner.batcher, context.states
        assert batcher.snapshots is not None
        assert isinstance(states, StatePool)
        assert isinstance(context.cache, KVCache)
        sizes: list[int] = []
        for _ in range(3):
            for prompt in prompts_of(random, *[40] * 60):
                await read(engine, ask(prompt, max_tokens=2))
            sizes.append(resident_bytes())
        assert len(batcher.snapshots) == batcher.snapshots.num_slots
        assert sizes[2] - sizes[1] < 4 << 20
        tensors = (*context.cache.tensors, *states.tensors)
        assert engine._models.cache_bytes == sum(tensor.nbytes for tensor in tensors)


# ------------------------------------------------------------------------- mistakes that the tests must find


def a_token_too_many(patch: pytest.MonkeyPatch) -> None:
    """States are saved one step late, once the first token of the next block was computed."""
    late: list[StateCopy] = []
    result = LocalForward.result

    def save_late(forward: LocalForward) -> Tensor:
        made = result(forward)
        assert forward.states is not None
        forward.states.copy(late)
        late[:] = forward.work.saved
        return made

    patch.setattr(LocalForward, "result", save_late)


def another_key(patch: pytest.MonkeyPatch) -> None:
    """Any snapshot is used after any blocks."""
    patch.setattr(SnapshotPool, "longest", lambda pool, keys: len(keys) if pool._slots else 0)
    patch.setattr(SnapshotPool, "use", lambda pool, key: next(iter(pool._slots.values())))


def saved_before_they_are_restored(patch: pytest.MonkeyPatch) -> None:
    """A slot that is read in a step is written to before."""
    result = LocalForward.result

    def save_first(forward: LocalForward) -> Tensor:
        assert forward.states is not None
        forward.states.copy(forward.work.saved)
        return result(forward)

    patch.setattr(LocalForward, "result", save_first)


def not_restored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StatePool, "copy", lambda pool, copies: None)


async def outcome(model: Any, chats: Sequence[Chat], **options: Any) -> bool:
    """Whether all chats get their tokens, one after the other and then all at once."""
    async with serving(model, **options) as engine:
        for chat in chats:
            answers, _ = await run_chats(engine, [chat])
            if answers != [chat.answers]:
                return False
        answers, _ = await run_chats(engine, chats)
        return answers == [chat.answers for chat in chats]


@pytest.mark.parametrize("architecture", ["lfm2", "qwen3_5"])
@pytest.mark.parametrize(
    "plant",
    [a_token_too_many, another_key, saved_before_they_are_restored, not_restored],
    ids=lambda plant: plant.__name__,
)
async def test_wrong_states_would_be_seen(
    architecture: str, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test of the tests above: each planted fault changes tokens."""
    model = make_hybrid(architecture)
    chats = make_chats(model, seed=1)
    # With room for one, a step reads the snapshot that it replaces.
    options = {"snapshot_bytes": SLOT_BYTES[architecture]} if plant is saved_before_they_are_restored else {}
    assert await outcome(model, chats, **options)
    plant(monkeypatch)
    assert not await outcome(model, chats, **options)
