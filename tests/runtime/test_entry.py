"""A request that its model could never serve is refused where it enters, before a swap is made for it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from hotswap import Fleet, Model, Sampling
from hotswap.abc import Engine, WrapperEngine
from hotswap.backends.sim import SimStore, sim_manifest
from hotswap.backends.stores import NvmeStore
from hotswap.backends.torch import TorchEngine
from hotswap.errors import InvalidRequest, QueueFull
from hotswap.offline.virtual_time import virtual_time
from hotswap.policies import LeastLoadedRouter, WeightedLoadSwap
from tests.runtime import alphabet
from tests.runtime.support import WEIGHT_BYTES, Idle, engine_of, idle, sim_fleet

VOCABULARY = 500
BEYOND: dict[str, Any] = {
    "logit_bias": {VOCABULARY: 1.0},
    "suppress_tokens": [1, VOCABULARY],
    "begin_suppress_tokens": [VOCABULARY],
    "forced_end_tokens": [VOCABULARY],
    "bad_words_ids": [[1], [2, VOCABULARY]],
    "stop_token_ids": [VOCABULARY],
}


def serving(config: str) -> Fleet:
    """A fleet whose engines are EMPTY, and swap when a request waits."""
    manifest = sim_manifest("a", WEIGHT_BYTES, max_context_tokens=4096, config=config)
    return sim_fleet("a", store=SimStore([manifest]))


@virtual_time
async def test_log_probabilities_of_a_prompt_that_would_fill_memory_cost_no_swap() -> None:
    manifest = sim_manifest("a", WEIGHT_BYTES, max_context_tokens=200_000)
    async with sim_fleet("a", store=SimStore([manifest])) as fleet:
        prompt = (1,) * 128_000
        for count in (20, 8):
            with pytest.raises(InvalidRequest, match=f"prompt_logprobs of {count} .* ask for fewer"):
                await fleet.generate("a", prompt, Sampling(prompt_logprobs=count))
        assert not fleet.swaps


@virtual_time
async def test_prompts_whose_log_probabilities_are_kept_together_are_bounded() -> None:
    """Waiting requests count, too; another is taken once one has ended."""
    manifest = sim_manifest("a", WEIGHT_BYTES, max_context_tokens=1 << 20)
    prompt = (1,) * (1 << 19)
    sampling = Sampling(prompt_logprobs=1)
    engine = engine_of("e0", kv_blocks=1 << 16)
    async with (
        sim_fleet("a", engines=[engine], store=SimStore([manifest]), scheduler=Idle()) as fleet,
        AsyncExitStack() as others,
    ):
        for _ in range(7):
            await others.enter_async_context(fleet.stream("a", prompt, sampling))
        async with fleet.stream("a", prompt, sampling):
            with pytest.raises(QueueFull, match=r"1,048,576 .* 8,388,608 of the 8,388,608 .* once") as caught:
                await fleet.generate("a", prompt, sampling)
            with pytest.raises(QueueFull, match="prompt_logprobs of the request are 1 "):
                await fleet.generate("a", prompt[:1], Sampling(prompt_logprobs=0))
            assert caught.value.retry_after_s > 0
            async with fleet.stream("a", prompt):  # a request for none of them is nothing to it
                assert len(fleet.view().waiting) == 9
        async with fleet.stream("a", prompt, sampling):
            assert len(fleet.view().waiting) == 8


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return alphabet.checkpoint(tmp_path / "alphabet")


def on_torch(source: Path, *more: Engine) -> Fleet:
    return Fleet(
        engines=[TorchEngine("e0", threads=1, kv_tokens=512), *more],
        store=NvmeStore(source.parent / "store"),
        models=[Model("m", source)],
        router=LeastLoadedRouter(),
        scheduler=WeightedLoadSwap(t1=0, t2=4, b=1, sigmas=0),
        interval_s=0.1,
    )


@pytest.mark.parametrize(
    "config", [f'{{"vocab_size": {VOCABULARY}}}', '{"text_config": {"vocab_size": 500}}']
)
@virtual_time
async def test_token_ids_outside_of_the_vocabulary_cost_no_swap(config: str) -> None:
    async with serving(config) as fleet:
        for name, value in BEYOND.items():
            with pytest.raises(InvalidRequest, match=rf"{name} .* token 500, .* largest id .* 499"):
                await fleet.generate("a", (1, 2), Sampling(**{name: value}))
        with pytest.raises(InvalidRequest, match=r"prompt .* token 500"):
            await fleet.generate("a", (1, VOCABULARY))
        assert not fleet.swaps
        inside = Sampling(max_tokens=2, logit_bias={499: 1.0}, suppress_tokens=[499], stop_token_ids=[499])
        assert (await fleet.generate("a", (1, 499), inside)).tokens
        idle(fleet)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "a("}, "regex cannot be used.*unclosed group"),
        ({"grammar": "start: missing"}, "grammar cannot be used"),
        ({"json_schema": {"type": "objct"}}, "json_schema cannot be used.*objct"),
    ],
)
async def test_a_wrong_grammar_costs_no_swap(source: Path, fields: dict[str, Any], message: str) -> None:
    async with on_torch(source) as fleet:
        with pytest.raises(InvalidRequest, match=message):
            await fleet.generate("m", "a", Sampling(**fields))
        assert not fleet.swaps
        assert (await fleet.generate("m", "a", Sampling(max_tokens=3, regex="[b-z]+"))).text == "bcd"


async def test_a_grammar_for_a_model_without_a_tokenizer_costs_no_swap(source: Path) -> None:
    (source / "tokenizer.json").unlink()
    async with on_torch(source) as fleet:
        with pytest.raises(InvalidRequest, match="'m' has no tokenizer, which json_schema takes"):
            await fleet.generate("m", (1, 2), Sampling(json_schema={"type": "object"}))
        assert not fleet.swaps


async def test_a_grammar_is_left_to_the_engine_where_one_cannot_say(source: Path) -> None:
    async with on_torch(source, WrapperEngine(TorchEngine("e1", threads=1))) as fleet:
        with pytest.raises(InvalidRequest, match="regex cannot be used"):
            await fleet.generate("m", "a", Sampling(regex="a("))
        assert fleet.swaps


@pytest.mark.parametrize("config", ["", "{}", "[]", '{"vocab_size": "many"}', '{"text_config": 1}'])
@virtual_time
async def test_a_config_that_tells_no_vocabulary_leaves_the_check_to_the_engine(config: str) -> None:
    async with serving(config) as fleet:
        with pytest.raises(InvalidRequest, match=r"stop_token_ids .* largest id .* 31999"):
            await fleet.generate("a", (1,), Sampling(stop_token_ids=[32_000]))
        assert len(fleet.swaps) == 1
