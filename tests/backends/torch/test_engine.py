"""Behaviour of the torch engine for its clients, beyond the conformance suite."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import anyio
import pytest
import torch

from hotswap import InstanceState, ModelId, Request, RequestId, Sampling, Token
from hotswap.backends.torch import SkeletonCache, TorchEngine
from hotswap.backends.torch.adapters.pool import AdapterPool
from hotswap.backends.torch.buffers import FlatBuffers
from hotswap.backends.torch.forward import LocalForward
from hotswap.backends.torch.packed_cache import PackedCache
from hotswap.backends.torch.runner import Runner
from hotswap.errors import (
    ConfigError,
    InstanceError,
    InstanceLost,
    InvalidRequest,
    OutOfMemory,
    PromptTooLong,
)
from tests.backends.torch.clients import make_client_plans, run_clients
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.hybrids import make_hybrid
from tests.backends.torch.zoo import VOCABULARY, generate, make_model

SKELETONS = SkeletonCache()


def ask(prompt: list[int], *, model: str = "m", **sampling: Any) -> Request:
    return Request(
        id=RequestId("r"), model=ModelId(model), prompt=tuple(prompt), sampling=Sampling(**sampling)
    )


async def collect(engine: TorchEngine, request: Request) -> list[Token]:
    async with engine.stream(request) as tokens:
        return await tokens.collect()


@asynccontextmanager
async def serving(
    model: Any, *, card: dict[str, Any] | None = None, **options: Any
) -> AsyncGenerator[TorchEngine]:
    store = DictStore()
    added = store.add("m", model)
    settings: dict[str, Any] = {"kv_tokens": 512, "kv_block_tokens": 16, "threads": 1, "skeletons": SKELETONS}
    async with TorchEngine("e0", **settings | options) as engine:
        await engine.load(replace(added, **card or {}), store)
        yield engine


async def test_end_tokens_end_a_generation_once_it_is_long_enough() -> None:
    model, prompt = make_model("llama"), [5, 6, 7]
    greedy = generate(model, prompt, 30)
    stop = greedy[4]
    first = greedy.index(stop)
    async with serving(model, card={"eos_token_ids": (stop,)}) as engine:
        tokens = await collect(engine, ask(prompt, max_tokens=30))
        assert [t.id for t in tokens] == greedy[: first + 1]
        assert [t.finish_reason for t in tokens] == [None] * first + ["stop"]
        ignored = await collect(engine, ask(prompt, max_tokens=30, ignore_eos=True))
        assert [t.id for t in ignored] == greedy
        assert ignored[-1].finish_reason == "length"
        own = await collect(engine, ask(prompt, max_tokens=30, ignore_eos=True, stop_token_ids=(greedy[2],)))
        assert [t.id for t in own] == greedy[: greedy.index(greedy[2]) + 1]
        late = await collect(engine, ask(prompt, max_tokens=30, min_tokens=20))
        assert len(late) > 20
        assert stop not in [t.id for t in late[:20]]


async def test_a_generation_ends_with_the_context() -> None:
    model, prompt = make_model("gpt2"), list(range(2, 12))
    async with serving(model, card={"max_context_tokens": 16}) as engine:
        tokens = await collect(engine, ask(prompt, max_tokens=100))
        assert [t.id for t in tokens] == generate(model, prompt, 6)
        assert tokens[-1].finish_reason == "length"


async def test_a_request_larger_than_all_blocks_is_refused_at_once() -> None:
    async with serving(make_model("llama"), kv_tokens=64) as engine:
        assert engine.status().max_tokens == 64
        with pytest.raises(PromptTooLong, match="max_tokens"):
            await collect(engine, ask([1] * 60, max_tokens=6))
        assert len(await collect(engine, ask([1] * 60, max_tokens=5))) == 5


async def test_invalid_requests_are_refused_and_the_engine_still_serves() -> None:
    async with serving(make_model("llama")) as engine:
        for prompt in ([1, VOCABULARY], [-1]):
            with pytest.raises(InvalidRequest, match="vocabulary"):
                await collect(engine, ask(prompt))
        with pytest.raises(InvalidRequest):
            await collect(engine, ask([1], max_tokens=1).continued([2]))
        assert engine.status().state is InstanceState.SERVING


async def test_sampled_tokens_do_not_depend_on_preemption_and_continuation() -> None:
    model = make_model("qwen3")
    random = Random(0)
    prompts = [[random.randrange(2, VOCABULARY) for _ in range(random.choice([3, 40]))] for _ in range(8)]
    samplings = [
        Sampling(
            max_tokens=48,
            temperature=random.choice([0.8, 1.5]),
            top_k=random.choice([0, 40]),
            top_p=random.choice([1.0, 0.9]),
            repetition_penalty=random.choice([1.0, 1.3]),
            presence_penalty=random.choice([0.0, 0.7]),
            frequency_penalty=random.choice([0.0, 0.4]),
            logit_bias=random.choice([(), ((7, 2.5), (11, -3.0))]),
            seed=seed,
        )
        for seed in range(len(prompts))
    ]
    plans = make_client_plans(random, "m", prompts, samplings)
    async with serving(model) as engine:
        alone = [[t.id for t in await collect(engine, plan.request)] for plan in plans]
    async with serving(model, kv_tokens=128, token_budget=24, max_requests=6) as engine:
        assert await run_clients(engine, plans) == alone
        assert engine.num_preempted > 0


async def test_a_failed_step_loses_the_instance_and_unload_restarts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: Runner) -> None:
        raise RuntimeError("the device fell off")

    model = make_model("llama")
    store = DictStore()
    card = store.add("m", model)
    async with TorchEngine("e0", kv_tokens=512, threads=1, skeletons=SKELETONS) as engine:
        await engine.load(card, store)
        with monkeypatch.context() as patch:
            patch.setattr(Runner, "step", fail)
            with pytest.raises(InstanceLost, match="the device fell off") as caught:
                await collect(engine, ask([1, 2, 3]))
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert engine.status().state is InstanceState.LOST
        await engine.unload()
        await engine.load(card, store)
        assert [t.id for t in await collect(engine, ask([1, 2, 3], max_tokens=5))] == generate(
            model, [1, 2, 3], 5
        )


async def test_a_request_that_fails_its_step_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, result = make_model("llama"), LocalForward.result
    good = [[1, 2, 3], [4, 5, 6, 7]]
    expected = {at: generate(model, prompt, 20) for at, prompt in enumerate(good)}
    generated = {token for tokens in expected.values() for token in tokens}
    poison = next(token for token in range(8, VOCABULARY) if token not in generated)

    def fail(self: LocalForward) -> torch.Tensor:
        if any(poison in piece.tokens for piece in self.work.pieces):
            raise RuntimeError("the device fell off")
        return result(self)

    prompts = [*good, [1, 2, 3] * 12 + [poison]]
    got: dict[int, list[int]] = {}
    failed: list[Exception] = []
    async with serving(model) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(LocalForward, "result", fail)

            async def run(at: int) -> None:
                try:
                    got[at] = [t.id for t in await collect(engine, ask(prompts[at], max_tokens=20))]
                except InstanceError as exc:
                    failed.append(exc)

            async with anyio.create_task_group() as tasks:
                for at in range(3):
                    tasks.start_soon(run, at)
        assert got == expected
        assert [type(exc) for exc in failed] == [InstanceError]
        assert isinstance(failed[0].__cause__, RuntimeError)
        assert engine.status().state is InstanceState.SERVING
        # Of the failed step nothing is reused.
        again = await collect(engine, ask(prompts[2], max_tokens=20))
        assert [t.id for t in again] == generate(model, prompts[2], 20)
    assert engine.status().num_kv_blocks == 0


@pytest.mark.parametrize("architecture", ["llama", "lfm2"])
async def test_steps_that_run_out_of_memory_are_smaller_and_no_request_ends(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(architecture) if architecture == "llama" else make_hybrid(architecture)
    result, sizes = LocalForward.result, list[int]()

    def fail(self: LocalForward) -> torch.Tensor:
        sizes.append(self.work.num_tokens)
        if sizes[-1] > 30:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return result(self)

    random = Random(3)
    prompts = [[random.randrange(2, VOCABULARY) for _ in range(length)] for length in (70, 5, 33)]
    samplings = [Sampling(max_tokens=12, prompt_logprobs=2 * (at == 0) or None) for at in range(3)]
    plans = make_client_plans(random, "m", prompts, samplings)
    monkeypatch.setattr(LocalForward, "result", fail)
    async with serving(model, token_budget=64, max_requests=4) as engine:
        received = await run_clients(engine, plans)
        assert engine.status().state is InstanceState.SERVING
        assert engine.token_budget < 64
    assert received == [generate(model, prompt, 12) for prompt in prompts]
    assert max(sizes) > 30, "a step did run out of memory"


async def test_an_engine_whose_every_step_fails_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: LocalForward) -> torch.Tensor:
        raise RuntimeError("the device fell off")

    async with serving(make_model("llama")) as engine:
        monkeypatch.setattr(LocalForward, "result", fail)
        errors: list[type[Exception]] = []
        while engine.status().state is not InstanceState.LOST:
            with pytest.raises(InstanceError) as caught:
                await collect(engine, ask([1, 2, 3]))
            errors.append(caught.type)
    assert errors == [InstanceError] * 3 + [InstanceLost]


async def test_engines_of_one_process_have_separate_batches() -> None:
    names = ("llama", "qwen3", "gpt2")
    store, skeletons = DictStore(), SkeletonCache()
    models = {name: make_model(name) for name in names}
    cards = {name: store.add(name, model) for name, model in models.items()}
    options: dict[str, Any] = {"kv_tokens": 512, "threads": 1, "skeletons": skeletons}
    async with (
        TorchEngine("e0", **options) as a,
        TorchEngine("e1", **options) as b,
        TorchEngine("e2", **options) as c,
    ):
        engines = dict(zip(names, (a, b, c), strict=True))
        for name, engine in engines.items():
            await engine.load(cards[name], store)
        got: dict[str, list[int]] = {}

        async def run(name: str) -> None:
            got[name] = [
                t.id for t in await collect(engines[name], ask([9, 8, 7], model=name, max_tokens=40))
            ]

        async with anyio.create_task_group() as tasks:
            for name in names:
                tasks.start_soon(run, name)
    assert got == {name: generate(models[name], [9, 8, 7], 40) for name in names}


async def test_weights_can_be_served_in_another_dtype() -> None:
    stored = make_model("llama", dtype=torch.bfloat16)
    prompt = [3, 1, 4, 1, 5]
    async with serving(stored, dtype=torch.float32) as engine:
        tokens = [t.id for t in await collect(engine, ask(prompt, max_tokens=20))]
    for parameter in stored.parameters():
        parameter.data = parameter.data.float()
    assert tokens == generate(stored, prompt, 20)


async def test_kv_blocks_take_no_more_than_the_memory_has() -> None:
    model = make_model("llama")
    store = DictStore()
    card = store.add("m", model)
    block_bytes = 16 * 3 * 2 * (16 + 16) * 4  # tokens, layers, heads, key and value, fp32
    room = card.weight_bytes + 10 * block_bytes
    async with TorchEngine(
        "e0", kv_block_tokens=16, memory_bytes=room, threads=1, skeletons=SKELETONS
    ) as engine:
        await engine.load(card, store)
        assert engine.status().num_kv_blocks == 9, "one block is for padding"
    async with TorchEngine("e0", memory_bytes=card.weight_bytes, threads=1, skeletons=SKELETONS) as engine:
        with pytest.raises(OutOfMemory, match="KV blocks"):
            await engine.load(card, store)
        assert engine.status().weight_bytes == 0


async def test_memory_is_not_freed_by_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing gigabytes takes as long as many steps."""
    freeing = {
        (PackedCache, "fit"),
        (PackedCache, "release"),
        (PackedCache, "clear"),
        (FlatBuffers, "release"),
        (FlatBuffers, "clear"),
    }
    freeing |= {(AdapterPool, "close")}
    seen: dict[tuple[type, str], bool] = {}
    here = threading.get_ident()

    def watch(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            seen[owner, name] = seen.get((owner, name), True) and threading.get_ident() != here
            return original(*arguments)

        monkeypatch.setattr(owner, name, call)

    for owner, name in freeing:
        watch(owner, name)
    async with serving(make_model("llama")) as engine:
        await collect(engine, ask([5, 6, 7], max_tokens=3))
        await engine.unload()
    assert seen == dict.fromkeys(freeing, True)


@pytest.mark.parametrize(
    "options",
    [{"kv_block_tokens": 24}, {"max_requests": 0}, {"token_budget": 8}, {"kv_tokens": 8}, {"threads": 0}],
    ids=str,
)
def test_settings_that_cannot_work_are_refused_by_name(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        TorchEngine("e0", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "what"),
    [("cuda:99", "install PyTorch for CUDA|CUDA_VISIBLE_DEVICES"), ("gpu", "must be 'cpu'")],
)
def test_a_device_that_is_not_there_is_refused_with_what_to_do(device: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        TorchEngine("e0", device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_is_refused_where_there_is_none() -> None:
    with pytest.raises(ConfigError, match="sees no GPU; install PyTorch for CUDA and a driver"):
        TorchEngine("e0", device="cuda")


@pytest.mark.parametrize(
    ("options", "what"),
    [({"device": "cuda:1"}, "CUDA_VISIBLE_DEVICES"), ({"device": "cuda:0", "tp": 2}, "lower tp or pp")],
    ids=str,
)
def test_more_gpus_than_there_are_are_refused(
    options: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=what):
        TorchEngine("e0", **options)


def test_another_event_loop_than_asyncios_is_refused_at_once() -> None:
    """As trio's: a coroutine is run by hand here, where no loop of asyncio runs."""
    with pytest.raises(ConfigError, match="runs on asyncio alone"):
        TorchEngine("e0").__aenter__().send(None)
