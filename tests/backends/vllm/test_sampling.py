"""Each field of `Sampling` means on vLLM what it means on a `TorchEngine`, wherever a request goes on."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import anyio
import pytest
import torch

from hotswap import Completion, Fleet, Model, ModelId, Request, RequestId, Sampling, Token
from hotswap.backends.torch import TorchEngine
from hotswap.backends.vllm import CorePool, VllmEngine
from hotswap.errors import InvalidRequest
from hotswap.policies import LeastLoadedRouter
from hotswap.request import PromptLogprobs
from hotswap.testing.conformance.turns import TurnLoop
from tests.backends.torch.zoo import VOCABULARY, make_model
from tests.backends.vllm.support import llama, make_engine
from tests.backends.vllm.test_grammars import END, Texts
from tests.runtime.support import Idle
from tests.text_tokenizers import SPECIAL, byte_level

NUM_TOKENS = 20
STEP_TOKENS = 64  # some prompts take two steps
CLOSE = 1e-4  # between the two engines' logits, in fp32
REGEX = r"([a-f]{2,9}-[0-9]{3}\n){3}"


def pairs_in(tokens: list[int]) -> list[list[int]]:
    return [tokens[at : at + 2] for at in range(2, len(tokens) - 1)]


# Of each kind its fields, given the tokens of a greedy generation without them.
KINDS: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "greedy": lambda _: {},
    "drawn": lambda _: {"temperature": 0.8, "top_k": 30, "top_p": 0.9},
    "min_p": lambda _: {"temperature": 1.0, "min_p": 0.1},
    "min_p beside top_k": lambda _: {"temperature": 1.0, "min_p": 0.05, "top_k": 9},
    "min_p beside top_p": lambda _: {"temperature": 1.0, "min_p": 0.05, "top_p": 0.7, "top_k": 60},
    "hot": lambda _: {"temperature": 6.0, "top_p": 0.8},
    "cold": lambda _: {"temperature": 0.004},
    "suppress_tokens": lambda plain: {"suppress_tokens": [*plain[1:4]]},
    "suppress_tokens, drawn": lambda _: {"suppress_tokens": list(range(0, 400, 2)), "temperature": 1.0},
    "begin_suppress_tokens": lambda plain: {"begin_suppress_tokens": [plain[0]]},
    "bad_words_ids": lambda plain: {"bad_words_ids": [[plain[1]], *pairs_in(plain)]},
    "forced_end_tokens": lambda _: {
        "forced_end_tokens": [9, 7, 11],
        "suppress_tokens": [7],
        "bad_words_ids": [[11]],
        "presence_penalty": 0.5,
        "logit_bias": {9: 2.0},
    },
    "forced_end_tokens, drawn": lambda _: {"forced_end_tokens": [9, 7], "temperature": 1.0},
    "min_tokens": lambda plain: {
        "min_tokens": 12,
        "stop_token_ids": [*plain[3:6]],
        "forced_end_tokens": [plain[3]],
    },
    "logit_bias": lambda plain: {"logit_bias": {plain[0]: -3.0, 5: 2.5}},
    "penalties": lambda _: {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "suppress_tokens": [9],
    },
    "regex": lambda _: {"regex": REGEX, "temperature": 1.0},
    "regex with suppressed tokens": lambda _: {"regex": REGEX, "suppress_tokens": list(range(70, 73))},
}


@dataclass
class World:
    """One event loop for all tests, on which cores wait from one to the next."""

    loop: asyncio.Runner
    store: Texts = field(default_factory=Texts)
    cores: CorePool = field(default_factory=lambda: CorePool(max_idle=2))

    def __post_init__(self) -> None:
        self.model = make_model(llama(eos_token_id=END), seed=1)
        self.store.add("a", self.model)
        self.store.tokenizers = {"a": byte_level()}

    def run(self, test: Callable[[], Awaitable[None]]) -> None:
        async def limited() -> None:
            with anyio.fail_after(600):
                await test()

        self.loop.run(limited())

    def make_engine(self, name: str = "e0") -> VllmEngine:
        return make_engine(name, cores=self.cores, dtype="float32", token_budget=STEP_TOKENS)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with asyncio.Runner(loop_factory=TurnLoop) as loop:
        made = World(loop)
        yield made
        loop.run(made.cores.close())


def ask(name: str, number: int = 0, **fields: Any) -> Request:
    random = Random(f"prompt {number}")
    given: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": number} | fields
    return Request(
        id=RequestId(f"{name} {number}"),
        model=ModelId("a"),
        prompt=tuple(random.randrange(2, 300) for _ in range(random.choice([3, 90]))),
        sampling=Sampling(**given),
    )


async def generate(engine: VllmEngine | TorchEngine, request: Request) -> list[Token]:
    async with engine.stream(request) as tokens:
        return await tokens.collect()


def ids_of(tokens: list[Token]) -> list[int]:
    return [token.id for token in tokens]


async def asked(engine: VllmEngine, kind: str, number: int, **fields: Any) -> Request:
    plain = ids_of(await generate(engine, ask("plain", number)))
    return ask(kind, number, **KINDS[kind](plain) | fields)


def told(token: Token) -> dict[int, float]:
    """The log-probabilities of the tokens that can come, of the most probable ones."""
    return {top.id: top.logprob for top in token.top_logprobs if top.logprob > -60}


def assert_same_distributions(found: list[Token], expected: list[Token]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert told(one) == pytest.approx(told(other), abs=CLOSE, rel=CLOSE), one.index
        assert one.logprob == pytest.approx(told(one).get(one.id, one.logprob), abs=0)


@pytest.mark.parametrize("of", ["raw", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_field_means_what_it_means_on_a_torch_engine(world: World, kind: str, of: Any) -> None:
    """At each position both engines tell the same distribution, so all rules hold in the same order."""

    async def test() -> None:
        async with world.make_engine() as engine, TorchEngine("t", kv_bytes="8 MiB") as reference:
            for one in (engine, reference):
                await one.load(world.store.card("a"), world.store)
            for number in range(2):
                request = await asked(engine, kind, number, logprobs=8, logprobs_of=of)
                found = await generate(engine, request)
                expected: list[Token] = []
                for at in range(len(found)):
                    async with reference.stream(request.continued(ids_of(found)[:at])) as stream:
                        expected.append(await anext(stream))
                assert_same_distributions(found, expected)
                assert ids_of(found) == ids_of(expected)
                assert found[-1].finish_reason == expected[-1].finish_reason

    world.run(test)


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_holds_over_moves(world: World, kind: str) -> None:
    async def test() -> None:
        async with world.make_engine("e0") as one, world.make_engine("e1") as other:
            for engine in (one, other):
                await engine.load(world.store.card("a"), world.store)
            for number in range(2):
                request = await asked(one, kind, number, logprobs=3, logprobs_of="sampled")
                whole = await generate(one, request)
                for cut in range(1, len(whole), 3):
                    rest = await generate(other, request.continued(ids_of(whole)[:cut]))
                    assert ids_of(rest) == ids_of(whole)[cut:], cut
                    assert_same_distributions(rest, whole[cut:])

    world.run(test)


def test_rows_of_a_batch_keep_their_own_rules(world: World) -> None:
    async def test() -> None:
        async with world.make_engine() as engine:
            await engine.load(world.store.card("a"), world.store)
            requests = [
                await asked(engine, kind, number, max_tokens=13 + 3 * number, logprobs=number or None)
                for number in range(3)
                for kind in KINDS
            ]
            expected = {request.id: await generate(engine, request) for request in requests}
            got: dict[str, list[Token]] = {}

            async def read(request: Request) -> None:
                got[request.id] = await generate(engine, request)

            async with anyio.create_task_group() as tasks:
                for request in requests:
                    tasks.start_soon(read, request)
            for request in requests:
                assert ids_of(got[request.id]) == ids_of(expected[request.id]), request
                assert_same_distributions(got[request.id], expected[request.id])

    world.run(test)


@pytest.mark.parametrize("kind", ["drawn", "min_p beside top_p", "hot", "forced_end_tokens, drawn"])
def test_draws_follow_the_distribution_that_is_told(world: World, kind: str) -> None:
    count = 400

    async def test() -> None:
        drawn: Counter[int] = Counter()
        distribution: dict[int, float] = {}
        fields: dict[str, Any] = {"max_tokens": 1, "logprobs": 20, "logprobs_of": "sampled", "top_k": 12}

        async def draw(seed: int) -> None:
            (token,) = await generate(engine, ask(kind, 0, **KINDS[kind]([]) | fields | {"seed": seed}))
            drawn[token.id] += 1
            distribution.update(told(token))

        async with world.make_engine() as engine:
            await engine.load(world.store.card("a"), world.store)
            async with anyio.create_task_group() as tasks:
                for seed in range(count):
                    tasks.start_soon(draw, seed)
        assert sum(map(math.exp, distribution.values())) == pytest.approx(1.0, abs=CLOSE)
        assert drawn.keys() <= distribution.keys()
        # Pearson's statistic; of 30 degrees of freedom at most, one in a million is over 80.
        expected = {token: count * math.exp(logprob) for token, logprob in distribution.items()}
        assert sum((drawn[token] - mean) ** 2 / mean for token, mean in expected.items()) < 80

    world.run(test)


def prompt_logprobs_of(world: World, prompt: tuple[int, ...]) -> torch.Tensor:
    """The model's log-probabilities after each token, by transformers: `[tokens, vocabulary]`."""
    with torch.no_grad():
        logits: torch.Tensor = world.model(torch.tensor([prompt])).logits[0]
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize("length", [1, 2, 31, 200])
def test_log_probabilities_of_a_prompt_are_the_models(world: World, length: int) -> None:
    """A long prompt takes several steps here; one whose prefix is in the cache is computed all the same."""
    prompt = tuple(3 + place * 7 % 300 for place in range(length))
    request = Request(
        id=RequestId("r"),
        model=ModelId("a"),
        prompt=prompt,
        sampling=Sampling(max_tokens=3, prompt_logprobs=4, suppress_tokens=[5]),
    )
    expected = prompt_logprobs_of(world, prompt)

    async def test() -> None:
        async with world.make_engine() as engine:
            await engine.load(world.store.card("a"), world.store)
            for _ in range(2):
                async with engine.stream(request) as stream:
                    tokens = await stream.collect()
                    assert_model(stream.prompt_logprobs)
                assert all(token.logprob is None for token in tokens)
            async with engine.stream(request.continued([tokens[0].id])) as stream:
                assert ids_of(await stream.collect()) == ids_of(tokens)[1:]
                assert stream.prompt_logprobs == (), "they were told before"

    def assert_model(entries: Sequence[PromptLogprobs]) -> None:
        assert [entry.id for entry in entries] == list(prompt)
        assert entries[0] == PromptLogprobs(id=prompt[0])
        for place, entry in enumerate(entries[1:]):
            top = expected[place].topk(4)
            assert entry.logprob == pytest.approx(float(expected[place, entry.id]), abs=CLOSE)
            assert [one.id for one in entry.top_logprobs] == [int(id) for id in top.indices]
            for one, value in zip(entry.top_logprobs, top.values, strict=True):
                assert one.logprob == pytest.approx(float(value), abs=CLOSE)

    world.run(test)


def test_prompts_whose_logits_are_too_many_for_a_step_are_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotswap.backends.vllm.params._MOST_LOGITS_BYTES", 40 * VOCABULARY * 4)

    async def test() -> None:
        async with world.make_engine() as engine:
            await engine.load(world.store.card("a"), world.store)
            request = ask("long", prompt_logprobs=0, max_tokens=1)
            long = replace(request, prompt=tuple(range(1, 200)))
            with pytest.raises(InvalidRequest, match=r"prompt_logprobs .* token_budget of at most 40"):
                await generate(engine, long)
            await generate(engine, replace(long, prompt=long.prompt[:40]))
            await generate(engine, replace(long, sampling=Sampling(max_tokens=1)))

    world.run(test)


@pytest.mark.parametrize(
    "fields",
    [
        {"suppress_tokens": list(range(VOCABULARY))},
        {"begin_suppress_tokens": list(range(VOCABULARY)), "temperature": 1.0, "logprobs": 2},
        {"bad_words_ids": [[token] for token in range(VOCABULARY)]},
        {"forced_end_tokens": [9], "suppress_tokens": [9], "max_tokens": 1},
        {"forced_end_tokens": [9], "suppress_tokens": [9], "max_tokens": 1, "temperature": 1.0},
        {"forced_end_tokens": [9], "bad_words_ids": [[9]], "max_tokens": 1},
        {"regex": "a+", "suppress_tokens": list(range(VOCABULARY))},
    ],
)
def test_a_request_without_a_token_that_may_come_ends_alone(world: World, fields: dict[str, Any]) -> None:
    async def test() -> None:
        async with world.make_engine() as engine:
            await engine.load(world.store.card("a"), world.store)
            beside = ask("beside", temperature=1.0)
            expected = ids_of(await generate(engine, beside))
            async with engine.stream(beside) as stream:
                got = [(await anext(stream)).id]
                with pytest.raises(InvalidRequest, match="no token that may come"):
                    await generate(engine, ask("none", **fields))
                got += ids_of(await stream.collect())
            assert got == expected

    world.run(test)


def test_where_vllm_takes_no_rules_what_needs_them_is_refused_by_name(world: World) -> None:
    async def test() -> None:
        async with world.make_engine() as engine:
            await engine.load(world.store.card("a"), world.store)
            assert engine._core is not None
            with pytest.raises(InvalidRequest, match="asks for bad_words"):
                await generate(engine, ask("a fleet makes ids of them", bad_words=["a"]))
            engine._core.has_rules = False
            try:
                refused: dict[str, dict[str, Any]] = {
                    "suppress_tokens": {"suppress_tokens": [1]},
                    "begin_suppress_tokens": {"begin_suppress_tokens": [1]},
                    "forced_end_tokens": {"forced_end_tokens": [1]},
                    "logprobs": {"logprobs": 1, "logprobs_of": "sampled"},
                    "min_p": {"min_p": 0.1, "top_p": 0.9, "temperature": 1.0},
                    "temperature": {"temperature": 3.0},
                    "min_tokens": {"min_tokens": 1, "ignore_eos": True},
                }
                for name, fields in refused.items():
                    with pytest.raises(InvalidRequest, match=f"asks for {name}"):
                        await generate(engine, ask("refused", **fields))
                for fields in ({"logprobs": 1}, {"min_p": 0.1, "temperature": 1.0}, {"bad_words_ids": [[5]]}):
                    assert len(await generate(engine, ask("taken", **fields))) == NUM_TOKENS
            finally:
                engine._core.has_rules = True

    world.run(test)


def test_a_fleet_over_vllm_has_the_fields_of_text(world: World) -> None:
    """Bad words as texts, kept stop strings, texts of special tokens, and prompts cut to their end."""

    async def test() -> None:
        async with Fleet(
            engines=[world.make_engine()],
            store=world.store,
            models=[Model("a")],
            router=LeastLoadedRouter(),
            scheduler=Idle(),
        ) as fleet:
            await fleet.swap("e0", to="a")

            async def ask_for(prompt: Any = "some years ago", **fields: Any) -> Completion:
                given: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True} | fields
                return await fleet.generate("a", prompt, Sampling(**given))

            plain = await ask_for()
            ids, encode = [token.id for token in plain.tokens], byte_level().encode
            word = next(text for id in ids if list(encode(text := byte_level().decode([id]))) == [id])
            without = await ask_for(bad_words=[word])
            assert encode(word)[0] in ids
            assert encode(word)[0] not in [token.id for token in without.tokens]
            before = plain.text[: plain.text.index(word)]
            assert (await ask_for(stop=[word])).text == before
            assert (await ask_for(stop=[word], include_stop=True)).text == before + word
            kept = await ask_for(truncate_prompt_tokens=3)
            assert kept.text == (await ask_for(encode("some years ago")[-3:])).text != plain.text
            assert kept.usage.prompt_tokens == 3
            end: dict[str, Any] = {"forced_end_tokens": [END], "max_tokens": 3}
            hidden, shown = await ask_for(**end), await ask_for(**end, skip_special_tokens=False)
            assert shown.text == hidden.text + SPECIAL

    world.run(test)
