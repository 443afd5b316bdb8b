"""Many swaps change no token and leak no memory."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
import transformers
from torch import nn

from hotswap import InstanceState, ModelId, Request, RequestId, Sampling
from hotswap.backends.torch import TorchEngine
from hotswap.errors import InstanceLost, RequestEvicted
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import VOCABULARY, generate, make_model

PROMPT = [11, 22, 33, 44]
NUM_TOKENS = 6


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def ask(model: str, prompt: list[int] = PROMPT, max_tokens: int = NUM_TOKENS) -> Request:
    sampling = Sampling(max_tokens=max_tokens)
    return Request(id=RequestId("r"), model=ModelId(model), prompt=tuple(prompt), sampling=sampling)


async def tokens_of(engine: TorchEngine, request: Request) -> list[int]:
    async with engine.stream(request) as tokens:
        return [token.id async for token in tokens]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory as Linux tells it")
@pytest.mark.parametrize("idle_bytes", ["1 GiB", 0], ids=["pages kept", "pages returned"])
async def test_a_hundred_swaps_leak_no_memory(idle_bytes: int | str) -> None:
    # Sixteen megabytes of weights each, so that a leak of one swap in a hundred would show.
    wide: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "eos_token_id": None,
    }
    models = {
        "a": make_model(transformers.LlamaConfig(**wide, num_hidden_layers=2)),
        "b": make_model(transformers.Qwen3Config(**wide, num_hidden_layers=3, head_dim=64)),
    }
    store = DictStore()
    cards = {name: store.add(name, model) for name, model in models.items()}
    assert min(card.weight_bytes for card in cards.values()) > 16 << 20
    expected = {name: generate(model, PROMPT, NUM_TOKENS) for name, model in models.items()}
    del models
    async with TorchEngine("e0", kv_tokens=2048, idle_bytes=idle_bytes, threads=1) as engine:

        async def swap(name: str) -> None:
            await engine.evict(deadline_s=0)
            await engine.unload()
            await engine.load(cards[name], store)
            assert await tokens_of(engine, ask(name)) == expected[name]

        await engine.load(cards["a"], store)
        # Warm up the allocator: it takes some more megabytes in the first swaps, or many in a process that
        # has run other tests.
        for name in "ba" * 20:
            await swap(name)
        gc.collect()
        start = resident_bytes()
        for _ in range(100):
            await swap("b")
            await swap("a")
        assert abs(resident_bytes() - start) < 16 << 20


async def test_a_swap_to_a_known_architecture_does_not_walk_its_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The Python code of a swap delays the steps of other engines in the process."""
    store, models = DictStore(), {name: make_model("llama", seed=seed) for seed, name in enumerate("ab")}
    cards = {name: store.add(name, model) for name, model in models.items()}
    expected = generate(models["b"], PROMPT, NUM_TOKENS)
    async with TorchEngine("e0", kv_tokens=256, threads=1) as engine:
        await engine.load(cards["a"], store)
        await engine.unload()

        def walk(*_: Any, **__: Any) -> Any:
            raise AssertionError("all modules of a skeleton were looked at")

        with monkeypatch.context() as patched:
            patched.setattr(nn.Module, "named_modules", walk)
            patched.setattr(nn.Module, "modules", walk)
            await engine.load(cards["b"], store)
        assert await tokens_of(engine, ask("b")) == expected


async def test_a_hundred_disturbances_release_all_resources() -> None:
    """Evictions, preloads, aborts, losses and cancelled calls in random order; then all memory is free."""
    random = Random(7)
    names = ("llama", "gpt2", "mistral")
    store = DictStore()
    models = {name: make_model(name) for name in names}
    cards = {name: store.add(name, model) for name, model in models.items()}
    prompts = [[random.randrange(2, VOCABULARY) for _ in range(length)] for length in (3, 40, 90)]
    expected = {
        (name, at): generate(models[name], prompt, 40) for name in names for at, prompt in enumerate(prompts)
    }

    async def client(engine: TorchEngine, name: str, at: int, stay: int) -> None:
        received: list[int] = []
        try:
            async with engine.stream(ask(name, prompts[at], 40)) as tokens:
                async for token in tokens:
                    received.append(token.id)
                    if len(received) == stay:
                        break
        except (RequestEvicted, InstanceLost):
            pass
        assert received == expected[name, at][: len(received)]

    async with TorchEngine(
        "e0", kv_tokens=320, kv_block_tokens=16, token_budget=32, max_requests=8, threads=1
    ) as engine:
        await engine.load(cards["llama"], store)
        for _ in range(100):
            name = engine.status().model
            assert name is not None
            following = random.choice(names)
            async with anyio.create_task_group() as clients:
                for _ in range(random.randrange(1, 6)):
                    clients.start_soon(client, engine, name, random.randrange(3), random.choice([1, 7, 99]))
                await _disturb(engine, random)
                if random.random() < 0.5 and engine.status().state is InstanceState.SERVING:
                    await _maybe_cancelled(random, engine.preload(cards[following], store))
                if engine.status().state is InstanceState.SERVING:
                    await engine.evict(deadline_s=random.choice([0.0, 50.0]))
            await engine.unload()
            view = engine.status()
            assert (view.state, view.num_running, view.num_waiting) == (InstanceState.EMPTY, 0, 0)
            assert (view.weight_bytes > 0) == (view.preloaded is not None)
            assert view.num_kv_blocks == view.num_free_kv_blocks == store.num_lent == 0
            while engine.status().state is not InstanceState.SERVING:
                await _maybe_cancelled(random, engine.load(cards[following], store))
            assert engine.status().num_free_kv_blocks == engine.status().num_kv_blocks == 20
        await engine.unload()
        await engine.drop_preload()
        assert engine.status().weight_bytes == 0


async def _disturb(engine: TorchEngine, random: Random) -> None:
    for _ in range(random.randrange(30)):
        await anyio.lowlevel.checkpoint()
    kind = random.random()
    if kind < 0.15:
        engine.lose("a test dropped it")
    elif kind < 0.4:
        await _maybe_cancelled(random, engine.evict(deadline_s=50))


async def _maybe_cancelled(random: Random, verb: Any) -> None:
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            if random.random() < 0.4:
                tasks.start_soon(_cancel_soon, scope, random.randrange(12))
            await verb
            tasks.cancel_scope.cancel()


async def _cancel_soon(scope: anyio.CancelScope, turns: int) -> None:
    for _ in range(turns):
        await anyio.lowlevel.checkpoint()
    scope.cancel()
