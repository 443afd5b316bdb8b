"""Each field of `Sampling` means on llama.cpp what it is documented to mean, wherever a request goes on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from hotswap.backends.llamacpp import LlamaCppEngine
from hotswap.errors import InvalidRequest
from tests.backends.llamacpp.asking import answer, ask, ids
from tests.backends.llamacpp.gguf_files import CONTEXT, END, VOCABULARY, GgufStore, write_gguf

PROMPT = [1, 70, 80, 90, 80]
ALL = frozenset(range(VOCABULARY))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> GgufStore:
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    return GgufStore({"a": write_gguf(path, seed=1, kind="Q4_K")})


@asynccontextmanager
async def serving(store: GgufStore) -> AsyncGenerator[LlamaCppEngine]:
    async with LlamaCppEngine("e0", kv_tokens=CONTEXT, max_requests=1, threads=1) as made:
        await made.load(await store.card("a"), store)
        yield made


async def test_penalties_change_the_logits_of_the_tokens_that_they_name(store: GgufStore) -> None:
    """Of the twenty most probable tokens that the model tells, the best after the penalties comes."""
    async with serving(store) as engine:
        for rule in (
            {"repetition_penalty": 1.3},
            {"presence_penalty": 1.5},
            {"frequency_penalty": 0.8, "presence_penalty": -0.3},
            {"logit_bias": {85: 3.0, 11: -2.0}},
        ):
            tokens = await answer(engine, ask(PROMPT, logprobs=20, max_tokens=40, **rule))
            changed = 0
            for at, token in enumerate(tokens):
                before = [told.id for told in tokens[:at]]
                scores = {top.id: adjusted(top.logprob, top.id, before, rule) for top in token.top_logprobs}
                if (
                    "repetition_penalty" in rule
                ):  # its effect depends on the sign of logits, which are not told
                    seen = {*PROMPT, *before}
                    fresh = next(top.id for top in token.top_logprobs if top.id not in seen)
                    assert token.id == fresh or token.id in seen
                elif token.id in scores:
                    assert scores[token.id] == pytest.approx(max(scores.values()), abs=1e-3)
                changed += token.id != token.top_logprobs[0].id
            assert changed, f"{rule} is to change something"


def adjusted(logprob: float, token: int, before: list[int], rule: dict[str, Any]) -> float:
    count = Counter(before)[token]
    penalty = (count > 0) * rule.get("presence_penalty", 0.0) + count * rule.get("frequency_penalty", 0.0)
    return float(logprob - penalty + rule.get("logit_bias", {}).get(token, 0.0))


async def test_a_repetition_penalty_counts_the_prompt_and_a_presence_penalty_does_not(
    store: GgufStore,
) -> None:
    async with serving(store) as engine:
        (first,) = await ids(engine, ask(PROMPT, max_tokens=1))
        prompt = [first, *PROMPT]
        (token,) = await answer(engine, ask(prompt, max_tokens=1, logprobs=2))
        in_prompt = [token.top_logprobs[0].id, *prompt[1:]]
        plain = await ids(engine, ask(in_prompt, max_tokens=1))
        assert await ids(engine, ask([*plain, *in_prompt], max_tokens=1, presence_penalty=2.0)) == await ids(
            engine, ask([*plain, *in_prompt], max_tokens=1)
        )
        (best,) = await ids(engine, ask([*plain, *in_prompt], max_tokens=1))
        repeated = [best, *plain, *in_prompt]
        (best,) = await ids(engine, ask(repeated, max_tokens=1))
        if best in repeated:
            assert await ids(engine, ask(repeated, max_tokens=1, repetition_penalty=100.0)) != [best]


async def test_tokens_that_may_not_come_do_not_come(store: GgufStore) -> None:
    async with serving(store) as engine:
        plain = await ids(engine, ask(PROMPT))
        never = set(plain[:3])
        assert not never.intersection(await ids(engine, ask(PROMPT, suppress_tokens=sorted(never))))
        first, *_ = await ids(engine, ask(PROMPT, begin_suppress_tokens=[plain[0]]))
        assert first != plain[0]
        word = plain[4:7]
        without = await ids(engine, ask(PROMPT, bad_words_ids=[word]))
        assert without[:6] == plain[:6]
        assert without[6] != plain[6]


async def test_a_generation_ends_by_its_rules(store: GgufStore) -> None:
    async with serving(store) as engine:
        to_end: dict[str, Any] = {"logit_bias": {END: 100.0}, "ignore_eos": False}
        (token,) = await answer(engine, ask(PROMPT, **to_end))
        assert (token.id, token.finish_reason) == (END, "stop")
        later = await answer(engine, ask(PROMPT, min_tokens=5, **to_end))
        assert [token.id == END for token in later] == [False] * 5 + [True]
        ordinary = await ids(engine, ask(PROMPT, **to_end | {"ignore_eos": True}, max_tokens=7))
        assert ordinary == [END] * 7
        forced = await answer(engine, ask(PROMPT, max_tokens=4, forced_end_tokens=[33, END]))
        assert forced[-1].id in (33, END)
        plain = await ids(engine, ask(PROMPT, max_tokens=4))
        assert [token.id for token in forced[:-1]] == plain[:-1]


async def test_rules_that_leave_no_token_end_the_request_alone(store: GgufStore) -> None:
    async with serving(store) as engine:
        with pytest.raises(InvalidRequest, match="leave no token"):
            await answer(engine, ask(PROMPT, suppress_tokens=sorted(ALL)))
        assert await ids(engine, ask(PROMPT))


async def test_log_probabilities_are_the_models(store: GgufStore) -> None:
    async with serving(store) as engine:
        told = await answer(engine, ask(PROMPT, logprobs=20, logit_bias={85: 30.0}))
        bare = await answer(engine, ask(PROMPT, logprobs=0, max_tokens=1))
        assert [token.id for token in told] == [85] * len(told), "the bias decides"
        for token in told:
            assert len(token.top_logprobs) == 20
            assert sum(math.exp(top.logprob) for top in token.top_logprobs) <= 1.0001
            assert token.logprob is not None
            assert token.logprob <= token.top_logprobs[0].logprob
        assert bare[0].top_logprobs == ()
        assert bare[0].logprob == pytest.approx(told[0].top_logprobs[0].logprob, abs=1e-5)


async def test_parts_of_characters_have_log_probabilities_too(store: GgufStore) -> None:
    async with serving(store) as engine:
        plain = await answer(engine, ask(PROMPT, logprobs=20, max_tokens=1))
        part = next(top for top in plain[0].top_logprobs if 3 <= top.id < 63)
        (token,) = await answer(engine, ask(PROMPT, logprobs=20, max_tokens=1, logit_bias={part.id: 50.0}))
        assert token.id == part.id
        assert token.logprob == pytest.approx(part.logprob, abs=1e-5)
        assert [top.id for top in token.top_logprobs] == [top.id for top in plain[0].top_logprobs]


@pytest.mark.parametrize(
    "cut", [{}, {"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.8, "min_p": 0.1}]
)
async def test_tokens_are_drawn_from_the_distribution_after_temperature_and_cuts(
    store: GgufStore, cut: dict[str, Any]
) -> None:
    async with serving(store) as engine:
        temperature, draws = 0.4, 200
        (told,) = await answer(engine, ask(PROMPT, logprobs=20, max_tokens=1))
        expected = distribution([(top.id, top.logprob) for top in told.top_logprobs], temperature, **cut)
        drawn = Counter[int]()
        for seed in range(draws):
            asked = ask(PROMPT, temperature=temperature, seed=seed, max_tokens=1, **cut)
            drawn.update(await ids(engine, asked))
        for token, probability in expected.items():
            spread = math.sqrt(probability * (1 - probability) / draws)
            assert abs(drawn[token] / draws - probability) < 5 * spread + 0.02, token
        if cut:
            assert set(drawn) <= set(expected)


def distribution(
    logprobs: list[tuple[int, float]],
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> dict[int, float]:
    """Of the most probable tokens, which have nearly all of it where there is no cut."""
    weights = [(token, math.exp(logprob / temperature)) for token, logprob in logprobs]
    # What the tokens that are not told have is left out: cuts that keep few tokens do not see it.
    weights = weights[: top_k or None]
    whole = sum(weight for _, weight in weights)
    kept, reached = list[tuple[int, float]](), 0.0
    for token, weight in weights:
        if kept and (reached >= top_p * whole or weight < min_p * weights[0][1]):
            break
        kept.append((token, weight))
        reached += weight
    return {token: weight / reached for token, weight in kept}


async def test_a_seed_repeats_and_a_cut_changes_nothing(store: GgufStore) -> None:
    async with serving(store) as engine:
        asked = ask(PROMPT, temperature=1.2, top_p=0.95, seed=2**64 - 1, max_tokens=30)
        whole = await ids(engine, asked)
        assert whole != await ids(engine, ask(PROMPT, temperature=1.2, top_p=0.95, seed=3, max_tokens=30))
        for cut in (1, 8, 29):
            assert await ids(engine, asked.continued(whole[:cut])) == whole[cut:]
