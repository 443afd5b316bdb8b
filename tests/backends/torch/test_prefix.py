"""Blocks of earlier requests are reused, change no token, and are dropped with their weights."""

from __future__ import annotations

import anyio

from hotswap.backends.torch import SkeletonCache, TorchEngine
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.test_engine import ask, collect, serving
from tests.backends.torch.zoo import generate, make_model

PROMPT = [(37 * at) % 500 + 2 for at in range(90)]


async def read(engine: TorchEngine, prompt: list[int], count: int = 12) -> tuple[list[int], int]:
    """Return a request's tokens, and the number of its tokens that were reused."""
    async with engine.stream(ask(prompt, max_tokens=count)) as tokens:
        return [token.id async for token in tokens], tokens.num_reused_tokens


async def test_a_prompt_is_computed_from_where_it_differs_and_gives_the_same_tokens() -> None:
    model = make_model("mistral")  # its window is shorter than the shared prefix
    answer = generate(model, PROMPT, 12)
    async with serving(model) as engine:
        assert await read(engine, PROMPT) == (answer, 0)
        assert await read(engine, PROMPT) == (answer, 89)
        other = [*PROMPT[:75], 3, 3, 3]
        assert await read(engine, other) == (generate(model, other, 12), 75)
        following = [*PROMPT, *answer, 9, 9]
        # What was sampled last was never computed.
        assert await read(engine, following) == (generate(model, following, 12), len(PROMPT) + 11)
        view = engine.status()
        assert view.num_free_kv_blocks == view.num_kv_blocks, "cached blocks count as free"
        assert engine.num_reused_tokens == 89 + 75 + len(PROMPT) + 11
        assert "0 of them cached" not in repr(engine)


async def test_concurrent_requests_share_common_prefixes() -> None:
    model = make_model("llama")
    prompts = [[*PROMPT, at] for at in range(6)]
    got: dict[int, list[int]] = {}
    # Without sharing, at most two requests would fit.
    async with serving(model, kv_tokens=256, token_budget=128) as engine:

        async def run(at: int) -> None:
            got[at], _ = await read(engine, prompts[at], 20)

        async with anyio.create_task_group() as tasks:
            for at in range(len(prompts)):
                tasks.start_soon(run, at)
        assert engine.num_reused_tokens >= 4 * 80, "all but those of the first step"
    assert got == {at: generate(model, prompt, 20) for at, prompt in enumerate(prompts)}


async def test_nothing_is_reused_if_prefix_reuse_is_disabled() -> None:
    async with serving(make_model("llama"), prefix_reuse=False) as engine:
        assert await read(engine, PROMPT) == await read(engine, PROMPT)
        assert engine.num_reused_tokens == 0


async def test_blocks_of_unloaded_weights_are_never_reused() -> None:
    old, new = make_model("llama", seed=1), make_model("llama", seed=2)
    stores = {}
    for name, model in (("old", old), ("new", new)):
        stores[name] = DictStore()
        stores[name].add("m", model)  # the same name, architecture and layout
    expected = {"old": generate(old, PROMPT, 12), "new": generate(new, PROMPT, 12)}
    assert expected["old"] != expected["new"]
    async with TorchEngine("e0", kv_tokens=512, threads=1, skeletons=SkeletonCache()) as engine:
        for name in ("old", "new", "old"):
            await engine.load(stores[name].card("m"), stores[name])
            assert await read(engine, PROMPT) == (expected[name], 0)
            assert await read(engine, PROMPT) == (expected[name], 89)
            await engine.unload()


async def test_a_penalty_counts_reused_tokens_as_seen() -> None:
    async with serving(make_model("llama")) as engine:
        request = ask(PROMPT, max_tokens=12, temperature=0.8, repetition_penalty=1.3, seed=5)
        answers = [[token.id for token in await collect(engine, request)] for _ in range(2)]
        assert answers[0] == answers[1]
        assert engine.num_reused_tokens == 89


async def test_the_token_budget_is_measured_for_an_itl_target() -> None:
    model = make_model("llama")
    async with serving(model, itl_target_s=1e-6, max_requests=8, token_budget=100) as engine:
        assert engine.token_budget == 8 + 16, "it begins with the smallest budget"
        assert (await read(engine, PROMPT))[0] == generate(model, PROMPT, 12)
        assert engine.token_budget == 8 + 16, "and cannot go below it"
    async with serving(model, itl_target_s=1e3, max_requests=8, token_budget=100) as engine:
        assert (await read(engine, PROMPT * 4))[0] == generate(model, PROMPT * 4, 12)
        assert engine.token_budget == 100
        assert "budget: 100 tokens" in repr(engine)
