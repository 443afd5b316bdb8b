"""Samples of one request on vLLM: its prefix cache has the prompt when all but the first begin."""

from __future__ import annotations

from hotswap import Fleet, Model, Sampling
from hotswap.policies import LeastLoadedRouter
from tests.backends.vllm.support import make_engine, make_store
from tests.runtime.support import Idle

BLOCK = 32
PROMPT = [2 + 7 * at % 500 for at in range(300)]


async def test_the_prompt_of_samples_is_computed_once() -> None:
    fleet = Fleet(
        engines=[make_engine("e0", kv_block_tokens=BLOCK)],
        store=make_store(),
        models=[Model("a")],
        router=LeastLoadedRouter(),
        scheduler=Idle(),
    )
    async with fleet:
        await fleet.swap("e0", to="a")
        asked = Sampling(n=8, temperature=1.0, seed=3, max_tokens=16, ignore_eos=True)
        done = await fleet.generate("a", PROMPT, asked)
    computed = [sample.usage.prompt_tokens - sample.usage.reused_tokens for sample in done.samples]
    assert computed[0] == len(PROMPT)
    assert max(computed[1:]) <= BLOCK
    assert len({tuple(token.id for token in sample.tokens) for sample in done.samples}) == 8
    assert [sample.seed for sample in done.samples] == list(range(3, 11))
