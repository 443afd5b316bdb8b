"""Requests move between engines with their recurrent states, and get the tokens of an undisturbed run."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from random import Random
from typing import Any, TypeAlias

import anyio
import pytest
import torch
from torch import Tensor

from hotswap import Fleet, MigrationRecord, Model, ModelId, Request, RequestId, Sampling
from hotswap.abc import KVPages
from hotswap.backends.torch import SkeletonCache, TorchEngine
from hotswap.backends.torch.forward import LocalForward
from hotswap.backends.torch.migration import TorchKVSink
from hotswap.backends.torch.recurrent import StatePool, StateShape
from hotswap.backends.torch.worker import Pieces
from hotswap.backends.transports import memory_channels, remote_sink, serve_sink
from hotswap.errors import InvalidRequest, MigrationAborted
from hotswap.policies import LeastLoadedRouter
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.hybrids import HYBRIDS, make_hybrid
from tests.backends.torch.zoo import VOCABULARY, generate
from tests.runtime.support import Idle, until

SKELETONS = SkeletonCache()
MAX_REQUESTS = 4
NUM_TOKENS, NUM_LONG = 40, 150

Plant: TypeAlias = Callable[[pytest.MonkeyPatch], None]


def make_engine(name: str, **options: Any) -> TorchEngine:
    given: dict[str, Any] = {
        "kv_tokens": 1024,
        "kv_block_tokens": 16,
        "token_budget": 24,
        "max_requests": MAX_REQUESTS,
        "threads": 1,
    }
    return TorchEngine(name, skeletons=SKELETONS, **given | options)


def prompts_of(random: Random, *lengths: int) -> list[list[int]]:
    return [[random.randrange(2, VOCABULARY) for _ in range(length)] for length in lengths]


def ask(prompt: Sequence[int], name: str = "r", **sampling: Any) -> Request:
    options = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **sampling}
    return Request(id=RequestId(name), model=ModelId("m"), prompt=tuple(prompt), sampling=Sampling(**options))


@asynccontextmanager
async def two_engines(model: Any, *options: dict[str, Any]) -> AsyncGenerator[tuple[TorchEngine, ...]]:
    store = DictStore()
    card = store.add("m", model)
    async with AsyncExitStack() as stack:
        engines = [make_engine(f"e{at}", **one) for at, one in enumerate(options or ({}, {}))]
        for engine in engines:
            await stack.enter_async_context(engine)
            await engine.load(card, store)
        yield tuple(engines)
        for engine in engines:
            await until_released(engine)


async def until_released(engine: TorchEngine) -> None:
    """Return when all blocks and slots of an engine are free, which must be soon."""
    batcher = engine._models.migration_context().runner.batcher
    await until(lambda: sorted(batcher._free_slots) == list(range(batcher.max_requests)))
    await until(lambda: engine.status().num_free_kv_blocks == engine.status().num_kv_blocks)


@asynccontextmanager
async def two_replicas(model: Any) -> AsyncGenerator[Fleet]:
    store, engines = DictStore(), [make_engine("e0"), make_engine("e1")]
    store.add("m", model)
    async with Fleet(
        engines=engines,
        store=store,
        models=[Model("m")],
        router=LeastLoadedRouter(),
        scheduler=Idle(),
    ) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to="m")
        yield fleet
        for engine in engines:
            await until_released(engine)


async def run_moving(
    fleet: Fleet, prompts: Sequence[Sequence[int]], leaves: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[MigrationRecord]]:
    """Return what clients get whose requests move once they have so many tokens, and the moves."""
    received: list[list[int]] = [[] for _ in prompts]
    records: list[MigrationRecord] = []
    one_at_a_time = anyio.Lock()

    async def client(at: int) -> None:
        async with fleet.stream("m", prompts[at], Sampling(max_tokens=NUM_LONG, ignore_eos=True)) as tokens:
            async for token in tokens:
                received[at].append(token.id)
                if len(received[at]) in leaves[at]:
                    async with one_at_a_time:
                        to = "e1" if tokens.hops[-1].instance == "e0" else "e0"
                        with suppress(InvalidRequest, MigrationAborted):  # it has ended meanwhile
                            records.append(await fleet.migrate(tokens.request.id, to=to, method="kv"))

    async with anyio.create_task_group() as tasks:
        for at in range(len(prompts)):
            tasks.start_soon(client, at)
    return received, records


# -------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("architecture", HYBRIDS)
async def test_moving_requests_get_the_tokens_of_generate(architecture: str) -> None:
    model, random = make_hybrid(architecture), Random(architecture)
    prompts = prompts_of(random, 3, 16, 47, 90)
    expected = [generate(model, prompt, NUM_LONG) for prompt in prompts]
    leaves = [random.sample(range(1, NUM_LONG // 2), 3) for _ in prompts]
    async with two_replicas(model) as fleet:
        received, records = await run_moving(fleet, prompts, leaves)
    assert received == expected
    assert {record.method for record in records} == {"kv"}
    outcomes = [record.outcome for record in records]
    assert outcomes.count("done") >= len(prompts), outcomes


def states_not_moved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StatePool, "restore", lambda pool, slot, data: None)


def states_of_another_slot(patch: pytest.MonkeyPatch) -> None:
    save = StatePool.save
    patch.setattr(StatePool, "save", lambda pool, slot, out: save(pool, (slot + 1) % pool.num_slots, out))


def states_before_the_last_step(patch: pytest.MonkeyPatch) -> None:
    save, result = StatePool.save, LocalForward.result
    before: dict[StatePool, list[Tensor]] = {}

    def remember(forward: LocalForward) -> Tensor:
        if (pool := forward.states) is not None:
            before[pool] = [torch.empty(pool.slot_bytes, dtype=torch.uint8) for _ in range(pool.num_slots)]
            for slot, content in enumerate(before[pool]):
                save(pool, slot, content)
        return result(forward)

    patch.setattr(LocalForward, "result", remember)
    patch.setattr(StatePool, "save", lambda pool, slot, out: out.copy_(before[pool][slot]))


def states_of_another_layer(patch: pytest.MonkeyPatch) -> None:
    restore = StatePool.restore
    patch.setattr(
        StatePool, "restore", lambda pool, slot, data: restore(pool, slot, data.roll(len(data) // 2))
    )


@pytest.mark.parametrize(
    "plant",
    [states_not_moved, states_of_another_slot, states_before_the_last_step, states_of_another_layer],
    ids=lambda plant: plant.__name__,
)
@pytest.mark.parametrize("architecture", ["qwen3_5", "lfm2", "mamba2"])
async def test_wrong_states_would_be_seen(
    architecture: str, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test of the test above: each planted fault changes tokens."""
    model = make_hybrid(architecture)
    prompts = prompts_of(Random(1), 5, 30, 21, 60)
    expected = [generate(model, prompt, NUM_LONG) for prompt in prompts]
    plant(monkeypatch)
    async with two_replicas(model) as fleet:
        # Several each: where a request stops is up to the machine, and one wrong state may change no token.
        received, records = await run_moving(fleet, prompts, [[9, 20], [14, 26], [7, 18], [11, 23]])
    assert "done" in {record.outcome for record in records}
    assert received != expected


# ---------------------------------------------------------------------------------------- use of what came


@asynccontextmanager
async def arrived(
    engines: Sequence[TorchEngine], request: Request, num_before: int = 8
) -> AsyncGenerator[Request]:
    """Move a request by hand up to the hand-over; yields it as it would go on."""
    source_engine, destination = engines
    async with source_engine.stream(request) as tokens:
        generated = [(await anext(tokens)).id for _ in range(num_before)]
        async with source_engine.export_kv(request.id) as source:
            stopped = await source.stop()
            async with destination.import_kv(request) as sink:
                assert sink.layout == source.layout
                await sink.reserve(stopped.num_computed)
                await sink.write(await source.read(0, stopped.num_computed))
                await sink.commit(stopped.tokens)
                generated = list(stopped.tokens[len(request.prompt) :])
                yield request.continued(generated)


@asynccontextmanager
async def decoding(engine: TorchEngine, request: Request) -> AsyncGenerator[None]:
    """Stream a request, and enter once it has its first token."""
    async with engine.stream(request) as tokens:
        await anext(tokens)
        yield


async def rest_of(engine: TorchEngine, request: Request) -> tuple[list[int], int]:
    """Return the tokens of a request, and how many it found computed."""
    async with engine.stream(request) as tokens:
        return [token.id async for token in tokens], tokens.num_reused_tokens or 0


async def test_states_that_arrived_are_used_once() -> None:
    """A second stream of the same request would find them changed by the first."""
    model = make_hybrid("qwen3_5")
    (prompt,) = prompts_of(Random(2), 37)
    expected = generate(model, prompt, NUM_TOKENS)
    async with two_engines(model) as engines, arrived(engines, ask(prompt)) as rest:
        first, second = await rest_of(engines[1], rest), await rest_of(engines[1], rest)
        assert first == (expected[len(rest.generated) :], len(rest.tokens) - 1)
        assert second == (expected[len(rest.generated) :], 0)


async def test_an_earlier_arrival_of_the_request_that_ends_late_takes_nothing_along() -> None:
    """As a restore does whose request has left the instance and comes back to it."""
    model = make_hybrid("qwen3_5")
    (prompt,) = prompts_of(Random(2), 37)
    async with two_engines(model) as engines, AsyncExitStack() as earlier:
        await earlier.enter_async_context(engines[1].import_kv(ask(prompt)))
        source_engine, destination = engines
        async with source_engine.stream(ask(prompt)) as tokens:
            await anext(tokens)
            async with source_engine.export_kv(ask(prompt).id) as source:
                stopped = await source.stop()
                async with destination.import_kv(ask(prompt)) as sink:
                    await sink.reserve(stopped.num_computed)
                    await sink.write(await source.read(0, stopped.num_computed))
                    await earlier.aclose()
                    await sink.commit(stopped.tokens)
                    rest = ask(prompt).continued(stopped.tokens[len(prompt) :])
                    found = await rest_of(destination, rest)
    assert found == (generate(model, prompt, NUM_TOKENS)[len(rest.generated) :], len(rest.tokens) - 1)


async def test_another_text_does_not_find_them() -> None:
    model = make_hybrid("qwen3_5")
    prompt, other = prompts_of(Random(3), 37, 50)
    async with two_engines(model) as engines, arrived(engines, ask(prompt)) as rest:
        assert await rest_of(engines[1], ask(other)) == (generate(model, other, NUM_TOKENS), 0)
        longer = replace(rest, prompt=(*rest.prompt[:-1], rest.prompt[-1] ^ 1))
        expected = generate(model, longer.tokens, longer.sampling.max_tokens - len(longer.generated))
        assert await rest_of(engines[1], longer) == (expected, 0)
        await rest_of(engines[1], ask(prompt, "earlier", max_tokens=2))
        another = replace(rest, id=RequestId("another"))
        assert (await rest_of(engines[1], another))[1] == 32, "what the earlier one has left"


async def test_a_prompt_whose_log_probabilities_are_asked_for_is_computed() -> None:
    """Rows that were computed elsewhere have no logits."""
    model = make_hybrid("qwen3_5")
    (prompt,) = prompts_of(Random(4), 37)
    async with two_engines(model) as engines, arrived(engines, ask(prompt)) as rest:
        scored = replace(rest, sampling=replace(rest.sampling, prompt_logprobs=1), generated=())
        scored = replace(scored, prompt=rest.tokens)
        async with engines[1].stream(scored) as tokens:
            token = await anext(tokens)
            assert tokens.num_reused_tokens == 0
    assert token.id == generate(model, rest.tokens, 1)[0]


async def test_what_is_not_taken_is_released_with_the_sink() -> None:
    model = make_hybrid("qwen3_5")
    (prompt,) = prompts_of(Random(5), 37)
    async with two_engines(model) as engines:
        async with arrived(engines, ask(prompt)) as rest:
            pass
        await until_released(engines[1])
        tokens, num_reused = await rest_of(engines[1], rest)
    assert [*rest.generated, *tokens] == generate(model, prompt, NUM_TOKENS)
    assert num_reused == 0


async def test_blocks_without_states_are_not_used() -> None:
    model = make_hybrid("qwen3_5")
    (prompt,) = prompts_of(Random(6), 37)
    request = ask(prompt)
    async with (
        two_engines(model) as (source_engine, destination),
        decoding(source_engine, request),
        source_engine.export_kv(request.id) as source,
        destination.import_kv(request) as sink,
    ):
        stopped = await source.stop()
        await sink.reserve(stopped.num_computed)
        pages = await source.read(0, stopped.num_computed)
        blocks = pages.data[: len(pages.data) - sink.layout.state_bytes]
        await sink.write(KVPages(0, stopped.num_computed, blocks))
        await sink.commit(stopped.tokens)
        rest = request.continued(stopped.tokens[len(prompt) :])
        assert await rest_of(destination, rest) == (
            generate(model, prompt, NUM_TOKENS)[len(rest.generated) :],
            0,
        )


# ---------------------------------------------------------------------------------------- room, refusals


async def test_a_move_is_refused_while_as_many_requests_have_states_as_may() -> None:
    """The request stays, and goes on with its own tokens; its place there is free again afterwards."""
    model = make_hybrid("qwen3_5")
    prompts = prompts_of(Random(7), 20, 30)
    expected = [generate(model, prompt, NUM_TOKENS) for prompt in prompts]
    async with two_engines(model, {}, {"max_requests": 1}) as (source_engine, destination):
        request = ask(prompts[0])
        async with source_engine.stream(request) as tokens:
            got = [(await anext(tokens)).id]
            async with destination.stream(ask(prompts[1], "other", max_tokens=200)) as others:
                await anext(others)
                async with destination.import_kv(request) as sink:
                    with pytest.raises(MigrationAborted, match="recurrent states") as raised:
                        await sink.reserve(20)
            assert raised.value.stage == "reserve"
            async with destination.import_kv(request) as sink:
                await sink.reserve(20)  # takes the one place, for which the other now waits
                async with destination.stream(ask(prompts[1], "other")) as others:
                    with anyio.move_on_after(0):
                        await anext(others)
                    assert destination.status().num_waiting == 1
            got += [token.id async for token in tokens]
        assert got == expected[0]
        assert await rest_of(destination, ask(prompts[1])) == (expected[1], 0)


async def test_engines_whose_states_have_another_format_refuse_each_other() -> None:
    """Of a model without attention, whose blocks have no bytes: nothing but the states differs in size."""
    model = make_hybrid("mamba2")
    (prompt,) = prompts_of(Random(8), 20)
    request = ask(prompt)
    async with two_engines(model, {}, {"dtype": torch.bfloat16}) as engines:
        layouts = [engine._models.migration_context().layout_for(request) for engine in engines]
        assert layouts[0].block_bytes == layouts[1].block_bytes == 0
        assert layouts[0].states != layouts[1].states
        async with engines[1].import_kv(request) as sink:
            await sink.reserve(20)
            with pytest.raises(MigrationAborted, match="do not fit"):
                await sink.write(KVPages(0, 20, memoryview(bytearray(layouts[0].state_bytes))))


async def test_nothing_can_be_written_to_states_that_a_request_has() -> None:
    model = make_hybrid("qwen3_5")
    (prompt,) = prompts_of(Random(9), 37)
    request, expected = ask(prompt), generate(model, prompt, NUM_TOKENS)
    async with (
        two_engines(model) as (source_engine, destination),
        decoding(source_engine, request),
        source_engine.export_kv(request.id) as source,
        destination.import_kv(request) as sink,
    ):
        stopped = await source.stop()
        await sink.reserve(stopped.num_computed)
        pages = await source.read(0, stopped.num_computed)
        await sink.write(pages)
        await sink.commit(stopped.tokens)
        rest = request.continued(stopped.tokens[len(prompt) :])
        async with destination.stream(rest) as others:
            got = [(await anext(others)).id]
            pages.data[:] = bytes(len(pages.data))
            with pytest.raises(MigrationAborted):
                await sink.write(pages)
            got += [token.id async for token in others]
        assert got == expected[len(rest.generated) :]


async def test_states_that_are_cleared_late_are_those_of_no_other_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine a call takes longer than a sink may be without one.

    Convolutions forget cleared states within a few rows of the prompt, so it is later tokens that differ,
    where two are almost equal.
    """
    model = make_hybrid("bamba")
    prompt, other = prompts_of(Random(11), 90, 40)
    expected = generate(model, prompt, NUM_LONG)
    goes_on, begun, cleared = threading.Event(), threading.Event(), threading.Event()
    clear, result = StatePool.clear, LocalForward.result

    def hold(runner: object, sequences: object) -> Pieces:
        goes_on.wait(10)
        yield from ()

    def clear_late(pool: StatePool, slot: int) -> None:
        begun.wait(10)
        clear(pool, slot)
        cleared.set()

    def compute(forward: LocalForward) -> Tensor:
        logits = result(forward)
        begun.set()
        cleared.wait(10)
        return logits

    async with two_engines(model) as (_, engine):
        monkeypatch.setattr(StatePool, "clear", clear_late)
        monkeypatch.setattr(LocalForward, "result", compute)
        async with engine.import_kv(ask(other, "other")) as sink, anyio.create_task_group() as tasks:
            assert isinstance(sink, TorchKVSink)
            engine._models.migration_context().queue_job(hold)
            tasks.start_soon(sink.reserve, len(other))
            await anyio.wait_all_tasks_blocked()
            sink._lapse()
            goes_on.set()
            assert await rest_of(engine, ask(prompt, max_tokens=NUM_LONG)) == (expected, 0)


# -------------------------------------------------------------------------------------------- links


async def test_states_that_are_larger_than_a_payload_cross_a_link() -> None:
    model = make_hybrid("qwen3_5")
    (prompt,) = prompts_of(Random(10), 37)
    request, expected = ask(prompt), generate(model, prompt, NUM_TOKENS)
    near, far = memory_channels(max_payload_bytes=4096)
    async with (
        two_engines(model) as (source_engine, destination),
        near,
        far,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(serve_sink, destination, far)
        async with (
            decoding(source_engine, request),
            source_engine.export_kv(request.id) as source,
            remote_sink(near, request) as sink,
        ):
            assert sink.layout == source.layout
            assert sink.layout.state_bytes > 4096
            stopped = await source.stop()
            await sink.reserve(stopped.num_computed)
            await sink.write(await source.read(0, stopped.num_computed))
            await sink.commit(stopped.tokens)
            rest = request.continued(stopped.tokens[len(prompt) :])
            assert await rest_of(destination, rest) == (
                expected[len(rest.generated) :],
                stopped.num_computed,
            )
        await near.aclose()


# -------------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_copies_by_a_staging_buffer_are_those_of_a_cpu(dtype: torch.dtype) -> None:
    """Other devices copy through a buffer of their own; the code is the same on any of them."""
    layers = [
        [StateShape((3, 5), dtype), StateShape((2, 4, 6), torch.float32)],
        [],
        [StateShape((7,), dtype)],
    ]
    pool, other = (StatePool(3, torch.device("cpu"), layers) for _ in range(2))
    for at, state in enumerate(pool.tensors):
        state.copy_(torch.randn(state.shape, generator=torch.Generator().manual_seed(at)))
    saved, staged = (torch.empty(pool.slot_bytes, dtype=torch.uint8) for _ in range(2))
    pool.save(1, saved)
    pool._save_staged(1, staged)
    assert saved.equal(staged)
    other.restore(0, saved)
    other._restore_staged(2, saved)
    for mine, theirs in zip(pool.tensors, other.tensors, strict=True):
        assert theirs[0].equal(mine[1])
        assert theirs[2].equal(mine[1])
        assert not theirs[1].any()
