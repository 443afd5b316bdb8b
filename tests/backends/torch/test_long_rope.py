"""RoPE factors for long texts: each request has those that `generate` gives it for itself alone."""

from __future__ import annotations

from functools import wraps
from random import Random
from typing import Any

import pytest
import transformers

from hotswap import ModelId, Request, RequestId, Sampling
from hotswap.backends.torch import TorchEngine
from hotswap.backends.torch.kv import KVCache
from hotswap.backends.torch.long_rope import choose_factors
from hotswap.errors import MigrationAborted
from tests.backends.torch.clients import make_client_plans, run_clients, run_until_preempted
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import COMMON, VOCABULARY, generate, make_model

LIMIT, MORE = 40, 24
# Far below the limit, growing over it, at it, one beyond, and long from the start.
LENGTHS = (3, 20, 33, LIMIT - 1, LIMIT, LIMIT + 1, 90)
ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0 + at for at in range(8)],
    "original_max_position_embeddings": LIMIT,
}
KINDS = {
    "keeps keys": lambda: transformers.LlamaConfig(**COMMON, rope_parameters=ROPE),
    "recomputes keys": lambda: transformers.Phi3Config(
        **COMMON, rope_parameters=ROPE, original_max_position_embeddings=LIMIT
    ),
}


def _prompts() -> list[list[int]]:
    """Prompts that begin alike, so that one could reuse the keys of another with other factors."""
    random = Random(1)
    start = [random.randrange(2, VOCABULARY) for _ in range(max(LENGTHS))]
    return [start[:length] for length in LENGTHS] + [
        [random.randrange(2, VOCABULARY) for _ in range(length)] for length in LENGTHS
    ]


def _engine(**options: Any) -> TorchEngine:
    return TorchEngine("e0", kv_block_tokens=16, token_budget=48, max_requests=8, threads=1, **options)


@pytest.mark.parametrize("gathers", [False, True], ids=["in place", "gathered"])
@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_equal_generate(kind: str, gathers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if gathers:
        monkeypatch.setattr(KVCache, "in_place", False)
    model, random, store = make_model(KINDS[kind]()), Random(2), DictStore()
    prompts = _prompts()
    expected = [generate(model, prompt, MORE) for prompt in prompts]
    card = store.add("m", model)
    plans = make_client_plans(random, "m", prompts, [Sampling(max_tokens=MORE)] * len(prompts))
    async with _engine(kv_tokens=208) as engine:
        await engine.load(card, store)
        await run_until_preempted(engine, plans, expected)
        assert engine.num_reused_tokens > 0
        assert await run_clients(engine, plans) == expected, "with what the first run left in the cache"


@pytest.mark.parametrize("kind", KINDS)
async def test_log_probabilities_of_a_prompt_do_not_depend_on_others(kind: str) -> None:
    store = DictStore()
    card = store.add("m", make_model(KINDS[kind]()))
    short, long = _prompts()[1], _prompts()[-1]
    told: list[list[float | None]] = []
    for beside in (False, True):
        async with _engine(kv_tokens=512) as engine:
            await engine.load(card, store)
            sampling = Sampling(max_tokens=30, prompt_logprobs=0)
            request = Request(id=RequestId("r"), model=ModelId("m"), prompt=tuple(short), sampling=sampling)
            other = Request(id=RequestId("o"), model=ModelId("m"), prompt=tuple(long), sampling=Sampling())
            async with engine.stream(other) as others:
                if beside:
                    await anext(others)
                async with engine.stream(request) as tokens:
                    assert len([token async for token in tokens]) == 30
                    assert tokens.prompt_logprobs is not None
                    told.append([entry.logprob for entry in tokens.prompt_logprobs])
    assert told[0] == told[1]


async def _exported(engine: TorchEngine) -> None:
    async with engine.export_kv(RequestId("r")):
        pass


async def test_kv_blocks_do_not_move() -> None:
    """Keys of the same tokens differ with the length of their request, which a move does not tell."""
    store = DictStore()
    card = store.add("m", make_model(KINDS["keeps keys"]()))
    async with _engine(kv_tokens=256) as engine:
        await engine.load(card, store)
        with pytest.raises(MigrationAborted, match="RoPE"):
            await _exported(engine)


def test_a_model_recomputes_keys_though_the_method_that_says_so_is_decorated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it is since transformers 5.24."""
    kind: Any = transformers.Phi3ForCausalLM
    original: Any = kind.prepare_inputs_for_generation

    @wraps(original)
    def decorated(*args: Any, **named: Any) -> Any:
        return original(*args, **named)

    monkeypatch.setattr(kind, "prepare_inputs_for_generation", decorated)
    _, long_rope = choose_factors(make_model(KINDS["recomputes keys"]()))
    assert long_rope is not None
    assert long_rope.recomputes
