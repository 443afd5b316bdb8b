"""Models with recurrent states get the tokens of `generate`, and keep no state of other requests."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
import torch
from torch import nn

from hotswap import Adapter, AdapterId, InstanceState, ModelId, Request, RequestId, Sampling
from hotswap.backends.stores import NvmeStore
from hotswap.backends.torch import SkeletonCache, TorchEngine, attention
from hotswap.backends.torch.forward import LocalForward
from hotswap.backends.torch.kv import KVCache
from hotswap.backends.torch.recurrent import StatePool
from hotswap.backends.torch.recurrent.mixers import attach
from hotswap.errors import InstanceError, InstanceLost, MigrationAborted, OutOfMemory
from tests.backends.torch.adapters.files import merged, write
from tests.backends.torch.clients import make_client_plans, run_until_preempted
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.hybrids import HYBRIDS, make_hybrid
from tests.backends.torch.logprobs import LOGPROBS, check_engine
from tests.backends.torch.parallel.support import add, card_of
from tests.backends.torch.zoo import VOCABULARY, generate, make_model

NUM_REQUESTS = 8
SKELETONS = SkeletonCache()


def prompts_of(random: Random, *lengths: int) -> list[list[int]]:
    return [[random.randrange(2, VOCABULARY) for _ in range(length)] for length in lengths]


def ask(prompt: list[int], *, name: str = "r", model: str = "m", **sampling: Any) -> Request:
    return Request(
        id=RequestId(name), model=ModelId(model), prompt=tuple(prompt), sampling=Sampling(**sampling)
    )


async def tokens_of(engine: TorchEngine, request: Request) -> list[int]:
    async with engine.stream(request) as tokens:
        return [token.id async for token in tokens]


@asynccontextmanager
async def serving(model: Any, **options: Any) -> AsyncGenerator[TorchEngine]:
    store = DictStore()
    card = store.add("m", model)
    settings: dict[str, Any] = {"kv_tokens": 512, "kv_block_tokens": 16, "threads": 1, "skeletons": SKELETONS}
    async with TorchEngine("e0", **settings | options) as engine:
        await engine.load(card, store)
        yield engine


# ----------------------------------------------------------------------------------------------- tokens


async def compare(architecture: str, *, skeletons: SkeletonCache = SKELETONS, device: str = "cpu") -> None:
    """Compare random clients, which abort and continue, with `generate`; requests are preempted meanwhile."""
    random, model = Random(1), make_hybrid(architecture)
    prompts = prompts_of(random, *(random.choice([1, 2, 5, 17, 30, 60]) for _ in range(NUM_REQUESTS)))
    counts = [random.choice([1, 60, 70, 70]) for _ in range(NUM_REQUESTS)]
    expected = [generate(model, prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
    assert len(set(itertools.chain(*expected))) > sum(counts) / 8, "repetitive text could hide a mistake"
    samplings = [Sampling(max_tokens=count) for count in counts]
    options: dict[str, Any] = {
        "kv_tokens": 144,
        "token_budget": 48,
        "max_requests": 6,
        "skeletons": skeletons,
    }
    async with serving(model, device=device, **options) as engine:
        await run_until_preempted(engine, make_client_plans(random, "m", prompts, samplings), expected)


@pytest.mark.parametrize("architecture", HYBRIDS)
async def test_tokens_equal_generate(architecture: str) -> None:
    await compare(architecture)


# Each function of `groups` once.
@pytest.mark.parametrize("architecture", ["lfm2", "qwen3_next", "kimi_linear", "bamba", "jamba"])
async def test_tokens_equal_generate_on_devices_without_kernels(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVCache, "in_place", False)
    monkeypatch.setattr(attention, "attend", None)
    monkeypatch.setattr(StatePool, "uses_kernels", False)
    await compare(architecture, skeletons=SkeletonCache())


async def test_requests_go_on_when_a_step_failed_that_had_changed_their_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, result = make_hybrid("qwen3_5"), LocalForward.result
    good = [[1, 2, 3], [4, 5, 6, 7]]
    expected = {at: generate(model, prompt, 20) for at, prompt in enumerate(good)}
    generated = {token for tokens in expected.values() for token in tokens}
    poison = next(token for token in range(8, VOCABULARY) if token not in generated)

    def fail(self: LocalForward) -> torch.Tensor:
        made = result(self)
        if any(poison in piece.tokens for piece in self.work.pieces):
            raise RuntimeError("the device fell off")
        return made

    prompts = [*good, [1, 2, 3] * 20 + [poison]]
    got: dict[int, list[int]] = {}
    failed: list[Exception] = []
    async with serving(model, token_budget=24, max_requests=4) as engine:
        monkeypatch.setattr(LocalForward, "result", fail)

        async def run(at: int) -> None:
            try:
                got[at] = await tokens_of(engine, ask(prompts[at], name=f"r{at}", max_tokens=20))
            except InstanceError as exc:
                failed.append(exc)

        async with anyio.create_task_group() as tasks:
            for at in range(3):
                tasks.start_soon(run, at)
        assert got == expected
        assert [type(exc) for exc in failed] == [InstanceError]
        assert engine.status().state is InstanceState.SERVING


async def test_a_step_that_finds_no_rank_to_compute_it_loses_the_instance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A retry without one request would end that request for good."""

    def fail(self: LocalForward) -> torch.Tensor:
        raise InstanceLost("rank 1 has ended")

    async with serving(make_hybrid("lfm2")) as engine:
        monkeypatch.setattr(LocalForward, "result", fail)
        with pytest.raises(InstanceLost, match="has ended"):
            await tokens_of(engine, ask([1, 2, 3], max_tokens=2))
        assert engine.status().state is InstanceState.LOST


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("qwen3_5", ("in_proj_qkv", "in_proj_z", "in_proj_b", "out_proj", "q_proj", "down_proj")),
        ("bamba", ("in_proj", "out_proj", "v_proj")),
        ("lfm2", ("in_proj", "out_proj", "w1")),
    ],
)
async def test_adapters_of_recurrent_layers_give_the_tokens_of_the_merged_model(
    architecture: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    random, model = Random(2), make_hybrid(architecture)
    adapter = Adapter("a", "m", write(tmp_path / "a", model, seed=1, size=4.0, names=names, r=8))
    models = {None: model, AdapterId("a"): merged(model, tmp_path / "a")}
    prompts = prompts_of(random, 1, 5, 40, 70)
    expected = {
        (name, at): generate(each, prompt, 12)
        for name, each in models.items()
        for at, prompt in enumerate(prompts)
    }
    assert all(expected[None, at] != expected[AdapterId("a"), at] for at in range(len(prompts)))
    got: dict[tuple[AdapterId | None, int], list[int]] = {}
    async with serving(model, token_budget=48, max_requests=8) as engine:
        await engine.load_adapter(adapter)

        async def run(name: AdapterId | None, at: int) -> None:
            request = Request(
                id=RequestId(f"{name} {at}"),
                model=ModelId("m"),
                prompt=tuple(prompts[at]),
                adapter=name,
                sampling=Sampling(max_tokens=12),
            )
            got[name, at] = await tokens_of(engine, request)

        async with anyio.create_task_group() as tasks:
            for name, at in expected:
                tasks.start_soon(run, name, at)
    assert got == expected


async def test_log_probabilities_are_those_of_transformers() -> None:
    """Also of prompts, of which every row is computed."""
    model = make_hybrid("qwen3_5")
    async with serving(model, token_budget=48, max_requests=4) as engine, anyio.create_task_group() as tasks:
        for prompt in prompts_of(Random(3), 5, 40, 90):
            tasks.start_soon(check_engine, engine, model, "m", prompt, replace(LOGPROBS, max_tokens=8))


@pytest.mark.parametrize("architecture", ["qwen3_5", "bamba"])
async def test_weights_that_stay_quantized_give_the_tokens_of_dequantized_ones(
    architecture: str, tmp_path: Path
) -> None:
    add(tmp_path / "store", "m", make_hybrid(architecture), quantize="fp8-e4m3")
    prompts = prompts_of(Random(1), 3, 40)
    got: list[list[list[int]]] = []
    async with NvmeStore(tmp_path / "store") as store:
        card = await card_of(store, "m")
        for keep_fp8 in (True, False):
            async with TorchEngine("e0", keep_fp8=keep_fp8, threads=1, kv_tokens=512) as engine:
                await engine.load(card, store)
                got.append([await tokens_of(engine, ask(prompt, max_tokens=10)) for prompt in prompts])
    assert got[0] == got[1]


# ----------------------------------------------------------------------------------------------- moves


async def test_what_ended_requests_leave_is_listed_up_to_their_last_snapshot() -> None:
    """Keys and values alone would continue them wrongly."""
    prompt = list(range(2, 90))
    async with serving(make_hybrid("qwen3_5")) as engine:
        generated = await tokens_of(engine, ask(prompt, max_tokens=20))
        await tokens_of(engine, ask([*prompt[:40], *[5] * 4], max_tokens=2))
        listed = {cached.tokens: cached for cached in await engine.cached_kv()}
        whole = (*prompt, *generated)[:96]
        assert set(listed) == {whole}, "the other has no block of its own"
        layout = listed[whole].layout
        with_states = await listed[whole].read(4, 32)
        assert len(with_states.data) == 2 * layout.block_bytes + layout.state_bytes
        without = await listed[whole].read(0, 64)
        assert len(without.data) == 4 * layout.block_bytes
        snapshots = engine._models.migration_context().runner.batcher.snapshots
        assert snapshots is not None
        snapshots.drop(list(snapshots._slots))
        with pytest.raises(MigrationAborted, match="states"):
            await listed[whole].read(0, 96)
        assert await engine.cached_kv() == []


# ----------------------------------------------------------------------------------------------- memory


async def test_states_are_in_the_budget_and_free_after_an_unload() -> None:
    hybrid, plain = make_hybrid("qwen3_5"), make_model("llama")
    store = DictStore()
    cards = {"hybrid": store.add("hybrid", hybrid), "plain": store.add("plain", plain)}
    expected = {"hybrid": generate(hybrid, [5, 6, 7], 5), "plain": generate(plain, [5, 6, 7], 5)}
    async with TorchEngine(
        "e0", kv_tokens=512, max_requests=4, memory_bytes="64 MiB", threads=1, skeletons=SKELETONS
    ) as engine:
        sizes: set[tuple[str, int]] = set()
        for name in ["hybrid", "plain"] * 50:
            await engine.load(cards[name], store)
            assert await tokens_of(engine, ask([5, 6, 7], model=name, max_tokens=5)) == expected[name]
            sizes.add((name, engine._models.cache_bytes))
            await engine.unload()
            assert engine._models.cache_bytes == 0
            assert engine.status().weight_bytes == 0
        assert len(sizes) == 2
    # Two linear layers: 4 heads of 16 by 16, and 3 rows of 128 channels, for each request and each snapshot.
    # One block of keys and values is spare.
    states = (4 + 4) * 2 * 4 * (4 * 16 * 16 + 3 * 128)
    keys_and_values = 4 * (512 + 32) * 2 * 2 * 32
    assert ("hybrid", states + keys_and_values) in sizes


async def test_too_many_states_are_refused_with_their_size() -> None:
    store = DictStore()
    card = store.add("m", make_hybrid("qwen3_5"))
    async with TorchEngine(
        "e0", kv_tokens=512, max_requests=256, memory_bytes="3 MiB", threads=1, skeletons=SKELETONS
    ) as engine:
        with pytest.raises(
            OutOfMemory,
            match=r"leaves [\d,]+ bytes for recurrent states of 256 requests.*, and for KV blocks",
        ):
            await engine.load(card, store)
        assert engine.status().state is InstanceState.EMPTY


# ----------------------------------------------------------------------------------------------- mixers


def test_no_mixer_is_replaced_if_one_keeps_states_in_another_way() -> None:
    class Other(nn.Module):
        layer_idx = 1

        def forward(self, hidden_states: Any, cache_params: Any = None) -> Any:
            return cache_params.update_conv_state(hidden_states, self.layer_idx)

    model = make_hybrid("lfm2")
    assert len(attach(model)) == 2
    model.other = Other()
    for module in model.modules():
        vars(module).pop("forward", None)
    assert attach(model) == ()
    assert not any("forward" in vars(module) for module in model.modules())


def test_mixers_are_known_by_each_name_of_their_cache() -> None:
    """The last is that of transformers 5.24, which decorates what has it."""

    def make(name: str) -> Any:
        space: dict[str, Any] = {"causal_conv1d_fn": None}
        source = f"def forward(self, hidden, {name}=None):\n"
        source += f"    return {name}.update_conv_state(causal_conv1d_fn(hidden), self.layer_idx)"
        exec(source, space)

        @wraps(space["forward"])
        def decorated(*args: Any, **named: Any) -> Any:
            return space["forward"](*args, **named)

        return type("Mixer", (nn.Module,), {"forward": decorated, "layer_idx": 0})()

    assert [len(attach(make(name))) for name in ("cache_params", "past_key_values", "cache")] == [1, 1, 1]
