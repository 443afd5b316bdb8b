"""Generations that are held to a grammar keep to it, wherever they go on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import anyio
import pytest

from hotswap import Fleet, FleetStream, Model, ModelId, Request, RequestId, Sampling
from hotswap.abc import Tokenizer
from hotswap.backends.vllm import VllmEngine
from hotswap.errors import InstanceError, InvalidRequest
from hotswap.policies import LeastLoadedRouter
from hotswap.testing.conformance.suite import until
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import make_model
from tests.backends.vllm.support import llama, make_engine, make_store
from tests.backends.vllm.test_resumption import moved, whole
from tests.runtime.support import Idle
from tests.text_tokenizers import BYTE_LEVEL_SIZE, byte_level, sentencepiece

END = 0  # the tokenizer's
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer", "maximum": 99999}, "maxItems": 4},
        "done": {"type": "boolean"},
    },
    "required": ["name", "sizes", "done"],
    "additionalProperties": False,
}
LARK = """
start: sum
sum: product ("+" product)*
product: atom ("*" atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,3}/
"""
REGEX = r"([a-f]{2,9}-[0-9]{3}\n){3}"
# JSON may have blanks in many places, and a model without sense would write all of them.
BLANKS = [token for token in range(BYTE_LEVEL_SIZE) if byte_level().decode([token]).isspace()]
TERSE = {"json_schema": json.dumps(SCHEMA), "suppress_tokens": BLANKS}
KINDS: dict[str, dict[str, Any]] = {
    "schema": TERSE,
    "schema, seeded": {**TERSE, "temperature": 1.2},
    "lark, seeded": {"grammar": LARK, "temperature": 3.0},
    "regex": {"regex": REGEX},
    "regex, seeded": {"regex": REGEX, "temperature": 1.5, "presence_penalty": 0.5},
}


def make_xgrammars(name: str) -> VllmEngine:
    """An engine whose grammars vLLM compiles by another library, as it is told."""
    terse = {"backend": "xgrammar", "disable_any_whitespace": True}
    return make_engine(name, arguments={"structured_outputs_config": terse})


class Texts(DictStore):
    """A store whose models have tokenizers."""

    tokenizers: dict[str, Tokenizer]

    async def tokenizer(self, model: ModelId) -> Tokenizer | None:
        return self.tokenizers.get(model)


def make_texts() -> Texts:
    store = Texts()
    store.tokenizers = {"a": byte_level(), "b": byte_level(), "c": sentencepiece()}
    for seed, name in enumerate("abc"):
        store.add(name, make_model(llama(eos_token_id=END), seed=seed))
    return store


def asked(kind: str, number: int) -> Request:
    return Request(
        id=RequestId(f"{kind} {number}"),
        model=ModelId("a"),
        prompt=tuple(byte_level().encode(f"some years ago {number}")),
        sampling=Sampling(max_tokens=200, seed=number, **KINDS[kind]),
    )


def assert_keeps_to_it(kind: str, tokens: list[int]) -> None:
    text = byte_level().decode(tokens)
    if kind.startswith("lark"):  # a sum has no longest length
        assert re.fullmatch(r"[0-9+*()]+", text), text
        return
    assert tokens[-1] == END, text
    if kind.startswith("schema"):  # whose strings of a length may hold characters that JSON escapes
        assert set(json.loads(text, strict=False)) == {"name", "sizes", "done"}
    else:
        assert re.fullmatch(REGEX, text), text


@pytest.mark.parametrize("make", [make_engine, make_xgrammars])
async def test_grammars_hold_over_any_number_of_moves(make: Callable[[str], VllmEngine]) -> None:
    store, random, moves = make_texts(), Random(4), list[int]()
    kinds = [kind for kind in KINDS if make is make_engine or "grammar" not in KINDS[kind]]
    requests = [asked(kind, number) for kind in kinds for number in range(4)]
    async with make("e0") as one, make("e1") as other:
        for engine in (one, other):
            await engine.load(store.card("a"), store)
        for request in requests:
            expected = await whole(one, request)
            assert_keeps_to_it(request.id, expected)
            got, num_moves = await moved([one, other], request, random)
            assert got == expected, request
            moves.append(num_moves)
    assert sum(moves) >= 2 * len(requests)


async def test_grammars_move_with_kv_blocks() -> None:
    store = make_texts()
    async with Fleet(
        engines=[make_engine("one"), make_engine("other")],
        store=store,
        models=[Model("a")],
        router=LeastLoadedRouter(),
        scheduler=Idle(),
    ) as fleet:
        for name in ("one", "other"):
            await fleet.swap(name, to="a")
        for kind in KINDS:
            request = asked(kind, 1)
            async with fleet.stream("a", request.prompt, request.sampling) as stream:
                expected = [token.id for token in await stream.collect()]
            outcomes: list[str] = []
            while "done" not in outcomes and len(outcomes) < 20:  # a short answer may end before its move
                got: list[int] = []
                async with fleet.stream("a", request.prompt, request.sampling) as stream:
                    async for token in stream:
                        got.append(token.id)
                        if len(got) == 4:
                            outcomes.append(await move(fleet, stream))
                assert got == expected
                assert_keeps_to_it(kind, got)
            assert outcomes[-1] == "done", outcomes


async def move(fleet: Fleet, stream: FleetStream) -> str:
    to = "one" if stream.hops[-1].instance == "other" else "other"
    return (await fleet.migrate(stream.request.id, to=to, method="kv")).outcome


async def test_an_invalid_grammar_fails_its_own_request_alone() -> None:
    store = make_texts()
    async with make_engine() as engine:
        await engine.load(store.card("a"), store)
        fine = asked("regex", 0)
        expected = await whole(engine, fine)
        got: list[int] = []

        async def read() -> None:
            got.extend(await whole(engine, fine))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            for wrong in (
                Sampling(regex="(a"),
                Sampling(json_schema='{"type": "no such type"}'),
                Sampling(grammar="start: missing"),
            ):
                request = Request(id=RequestId("wrong"), model=ModelId("a"), prompt=(5, 6), sampling=wrong)
                with pytest.raises(InvalidRequest):
                    await whole(engine, request)
        assert got == expected


async def test_a_grammar_that_a_core_rejects_ends_its_stream() -> None:
    """Tokens of an engine with other rules for blanks end the stream with an error; it does not hang."""
    store = make_texts()
    async with make_engine() as engine:
        await engine.load(store.card("a"), store)
        strange = asked("regex", 0).continued(byte_level().encode("zz"))
        with pytest.raises(InstanceError):
            await whole(engine, strange)
        await until(lambda: engine.status().num_waiting == 0 and engine.status().num_running == 0)
        assert_keeps_to_it("regex", await whole(engine, asked("regex", 0)))


async def test_a_grammar_ends_by_the_end_tokens_of_its_own_model() -> None:
    """A core that takes the weights of another model has its end tokens, too."""
    store, ends = make_texts(), {"a": (END,), "b": (7, 9)}
    for name in ends:
        store.manifests[name] = replace(store.manifests[name], eos_token_ids=ends[name])
    async with make_engine() as engine:
        for name in ("a", "b", "a"):
            await engine.load(store.card(name), store)
            request = replace(asked("regex, seeded", 0), model=ModelId(name))
            tokens = await whole(engine, request)
            assert tokens[-1] in ends[name]
            assert re.fullmatch(REGEX, byte_level().decode(tokens[:-1]))
            await engine.unload()


async def test_a_lark_grammar_is_refused_where_vllm_compiles_grammars() -> None:
    store = make_texts()
    async with make_xgrammars("e0") as engine:
        await engine.load(store.card("a"), store)
        with pytest.raises(InvalidRequest, match="structured_outputs_config"):
            await whole(engine, asked("lark, seeded", 0))


async def test_another_tokenizer_is_another_core() -> None:
    """Or a grammar would be held to tokens that are written otherwise."""
    store = make_texts()
    async with make_engine() as engine:
        seen: list[object] = []
        for name in "abc":
            await engine.load(store.card(name), store)
            seen.append(engine._core)
            await engine.unload()
        assert seen[0] is seen[1] is not seen[2]


async def test_without_a_tokenizer_a_grammar_is_refused() -> None:
    store = make_store()
    async with make_engine() as engine:
        await engine.load(store.card("a"), store)
        with pytest.raises(InvalidRequest, match="tokenizer"):
            await whole(engine, asked("regex", 0))


async def test_where_requests_do_not_resume_a_grammar_is_not_begun_anew() -> None:
    store = make_texts()
    async with make_engine() as engine:
        await engine.load(store.card("a"), store)
        assert isinstance(engine, VllmEngine)
        assert engine._core is not None
        engine._core.resumes = False
        assert_keeps_to_it("regex", await whole(engine, asked("regex", 0)))
        with pytest.raises(InvalidRequest, match="anew"):
            await whole(engine, asked("regex", 0).continued([70, 71]))
