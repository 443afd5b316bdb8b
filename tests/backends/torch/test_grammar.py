"""Requests with a JSON schema, a regular expression or a Lark grammar, on a torch engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import anyio
import pytest
import torch

from benchmarks.json_schemas import fault, random_schema
from hotswap import ModelId, Request, RequestId, Sampling, Token
from hotswap.abc import Tokenizer
from hotswap.backends.torch import SkeletonCache, TorchEngine
from hotswap.errors import InvalidRequest, RequestEvicted
from tests.backends.torch.clients import make_client_plans, run_clients
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import VOCABULARY, make_model
from tests.text_tokenizers import BYTE_LEVEL_SIZE, SPECIAL, byte_level

pytest.importorskip("llguidance")
grammar = pytest.importorskip("hotswap.backends.torch.grammar")
grammars = pytest.importorskip("hotswap.backends.grammars")

END = byte_level().id_of(SPECIAL) or 0
SKELETONS = SkeletonCache()
NUM_SCHEMAS = 192
# So that texts of random models vary, and do not go on for ever.
RANDOM: dict[str, Any] = {"temperature": 4.0, "max_tokens": 600}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "é"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = r"(\d{3}-)+[a-f]{2,4}(é|ü)?"
LARK = """
start: sum
sum: product ("+" product)*
product: atom ("*" atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,3}/
"""
# All rules may begin at the first character, so that a row of its parser has thousands of items.
RULES = f"start: {'|'.join(f'r{at}' for at in range(2000))}\n" + "\n".join(
    f'r{at}: "a" r{(at * 7 + 1) % 2000}? r{at * 3 % 2000}?' for at in range(2000)
)


@dataclass
class TextStore(DictStore):
    """A `DictStore` with the byte-level tokenizer for every model."""

    async def tokenizer(self, model: ModelId) -> Tokenizer | None:
        return byte_level()


def make_store(*names: str) -> TextStore:
    store = TextStore()
    for seed, name in enumerate(names):
        store.add(name, make_model("llama", seed=seed), eos_token_ids=(END,))
    return store


def ask(
    name: str = "r", *, model: str = "m", prompt: tuple[int, ...] = (5, 6, 7), **sampling: Any
) -> Request:
    return Request(
        id=RequestId(name), model=ModelId(model), prompt=prompt, sampling=Sampling(**RANDOM | sampling)
    )


@asynccontextmanager
async def serving(
    store: DictStore | None = None, id: str = "e0", **options: Any
) -> AsyncGenerator[TorchEngine]:
    store = make_store("m") if store is None else store
    chosen: dict[str, Any] = {"kv_tokens": 8192, "kv_block_tokens": 16, "threads": 1, "skeletons": SKELETONS}
    async with TorchEngine(id, **chosen | options) as engine:
        await engine.load(store.card("m"), store)
        yield engine


async def collect(engine: TorchEngine, request: Request) -> list[Token]:
    async with engine.stream(request) as tokens:
        return [token async for token in tokens]


def text_of(tokens: list[Token]) -> str:
    """The text of a generation that ended by itself."""
    assert tokens[-1].finish_reason == "stop", byte_level().decode([token.id for token in tokens])
    assert tokens[-1].id == END
    return byte_level().decode([token.id for token in tokens[:-1]], skip_special_tokens=False)


def kinds(seed: int) -> tuple[dict[str, Any], ...]:
    """One request of each kind, and one without a grammar."""
    return (
        {"json_schema": SCHEMA, "seed": seed},
        {"regex": REGEX, "seed": seed, "top_p": 0.9},
        {"grammar": LARK, "seed": seed, "top_k": 50},
        {"seed": seed, "max_tokens": 60, "ignore_eos": True},
    )


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0, "ignore_eos": True}])
async def test_generations_are_of_their_grammar_and_end_with_it(sampling: dict[str, Any]) -> None:
    """Also with `ignore_eos`: no text may follow."""
    async with serving() as engine:
        for seed in range(5):
            made = text_of(await collect(engine, ask(json_schema=SCHEMA, seed=seed, **sampling)))
            assert not fault(made, SCHEMA), made
            bounded = r"(\d{3}-){1,4}[a-f]{2,4}(é|ü)?"
            found = text_of(await collect(engine, ask(regex=bounded, seed=seed, **sampling)))
            assert re.fullmatch(bounded, found), found
            grammar = 'start: "(" NAME ("," NAME)? ")"\nNAME: /[a-z]{2,5}/'
            found = text_of(await collect(engine, ask(grammar=grammar, seed=seed, **sampling)))
            assert re.fullmatch(r"\([a-z]{2,5}(,[a-z]{2,5})?\)", found), found


async def test_generations_are_of_any_schema() -> None:
    """In batches, so that requests of different schemas and lengths share steps.

    Here a part of the thousand schemas of `python -m benchmarks grammar --full`.
    """
    made = [random_schema(Random(seed)) for seed in range(NUM_SCHEMAS)]
    found: dict[int, list[Token]] = {}

    async def client(at: int) -> None:
        request = ask(f"r{at}", prompt=(7 + at % 300, 9), json_schema=made[at], seed=at)
        found[at] = await collect(engine, request)

    async with serving() as engine:
        for begin in range(0, NUM_SCHEMAS, 32):
            async with anyio.create_task_group() as tasks:
                for at in range(begin, min(begin + 32, NUM_SCHEMAS)):
                    tasks.start_soon(client, at)
    finished = [at for at in found if found[at][-1].finish_reason == "stop"]
    faults = {at: fault(text_of(found[at]), made[at]) for at in finished}
    assert not {at: (made[at], text) for at, text in faults.items() if text}
    assert len(finished) >= 0.95 * NUM_SCHEMAS  # a random model may fill 600 tokens with digits


async def test_tokens_do_not_depend_on_the_batch_preemption_and_continuation() -> None:
    random = Random(0)
    samplings = [
        Sampling(**RANDOM | {"max_tokens": 90} | kind | {"repetition_penalty": penalty})
        for seed, penalty in ((1, 1.0), (2, 1.2), (3, 1.0))
        for kind in kinds(seed)
    ]
    prompts = [
        [random.randrange(2, BYTE_LEVEL_SIZE) for _ in range(random.choice([3, 40]))] for _ in samplings
    ]
    plans = make_client_plans(random, "m", prompts, samplings)
    async with serving() as engine:
        alone = [[t.id for t in await collect(engine, plan.request)] for plan in plans]
    async with serving(kv_tokens=256, token_budget=24, max_requests=8) as engine:
        assert await run_clients(engine, plans) == alone
        assert engine.num_preempted > 0


async def test_tokens_do_not_depend_on_swaps() -> None:
    store = make_store("m", "other")
    async with serving(store) as engine:
        for kind in kinds(5)[:3]:
            request = ask(**kind | {"max_tokens": 60})
            undisturbed = [token.id for token in await collect(engine, request)]
            received: list[int] = []
            while len(received) < len(undisturbed):
                async with engine.stream(request.continued(received)) as tokens:
                    num_read = min(4, len(undisturbed) - len(received))
                    received += [(await anext(tokens)).id for _ in range(num_read)]
                await engine.evict(deadline_s=0)
                await engine.unload()
                await engine.load(store.card("other"), store)
                with pytest.raises(RequestEvicted):
                    await collect(engine, request)
                await engine.unload()
                await engine.load(store.card("m"), store)
            assert received == undisturbed


async def test_tokens_do_not_depend_on_a_move_with_kv_blocks() -> None:
    store = make_store("m")
    async with serving(store) as source, serving(store, id="e1") as destination:
        for kind in kinds(5)[:3]:
            request = ask(prompt=tuple(range(2, 40)), **kind | {"max_tokens": 90})
            undisturbed = [token.id for token in await collect(source, request)]
            num_read = len(undisturbed) // 2
            async with source.stream(request) as tokens:
                read = [(await anext(tokens)).id for _ in range(num_read)]
                async with (
                    source.export_kv(request.id) as exported,
                    destination.import_kv(request.continued(read)) as imported,
                ):
                    stopped = await exported.stop()
                    await imported.reserve(stopped.num_computed)
                    await imported.write(await exported.read(0, stopped.num_computed))
                    await imported.commit(stopped.tokens)
                    received = list(stopped.tokens[len(request.prompt) :])
                    async with destination.stream(request.continued(received)) as rest:
                        received += [token.id for token in await rest.collect()]
                        assert rest.num_reused_tokens == stopped.num_computed
            assert received == undisturbed


def test_a_grammar_is_kept_compiled_until_many_others_were_used() -> None:
    compiler = grammar.GrammarCompiler(byte_level(), VOCABULARY, (END,))
    made = compiler._compiled("regex", "a{0}")
    for count in range(1, 200):
        assert compiler._compiled("regex", "a{0}") is made
        compiler.compile(Sampling(regex=f"a{{{count}}}"), ())
    for count in range(1, 200):
        compiler.compile(Sampling(regex=f"a{{{count}}}"), ())
        assert len(compiler._kept) <= 32
    assert compiler._compiled("regex", "a{0}") is not made


def test_grammars_that_are_kept_are_short_in_all() -> None:
    compiler = grammar.GrammarCompiler(byte_level(), VOCABULARY, (END,))
    for count in range(20):
        compiler.compile(Sampling(regex=chr(ord("a") + count) * 60_000), ())
        assert sum(len(text) for _, text in compiler._kept) <= 1 << 18
    assert len(compiler._kept) == 4


def test_a_request_is_not_ended_by_what_others_of_its_grammar_have_generated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their lexer has a limit of states, which their texts reach together."""

    def walk(seed: int) -> tuple[list[int], bool]:
        held = compiler.compile(Sampling(regex="([a-z]{1,40}[0-9]{1,40}){1,50}"), ())
        random, words, tokens = Random(seed), torch.zeros(-(-VOCABULARY // 32), dtype=torch.int32), []
        for _ in range(60):
            words.zero_()
            held.fill(words)
            allowed = [token for token in range(VOCABULARY) if words[token // 32] >> (token % 32) & 1]
            tokens.append(random.choice(allowed))
            held.add_token(tokens[-1])
        return tokens, held._shared

    compiler = grammar.GrammarCompiler(byte_level(), VOCABULARY, (END,))
    right = [walk(seed) for seed in range(6)]
    monkeypatch.setattr(grammar, "_MAX_SHARED_STATES", 150)
    compiler = grammar.GrammarCompiler(byte_level(), VOCABULARY, (END,))
    found = [walk(seed) for seed in range(6)]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in right]
    assert all(shared for _, shared in right)
    assert not any(shared for _, shared in found)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"regex": "a("}, "regex cannot be used.*unclosed group"),
        ({"json_schema": {"type": "nonsense"}}, "json_schema cannot be used.*nonsense"),
        ({"json_schema": {"$ref": "#/missing"}}, "json_schema cannot be used.*missing"),
        ({"json_schema": {"type": "object", "if": {}}}, 'json_schema cannot be used.*"if"'),
        ({"grammar": "start: missing"}, "grammar cannot be used.*missing"),
        ({"grammar": "start: " + "(a|" * 10_000 + "a" + ")" * 10_000 + "\na: /x/"}, "grammar cannot be used"),
        ({"regex": "(a{1000}){1000}"}, "regex is too complex"),
        ({"regex": "a{1000000000}"}, "regex is too complex"),
        ({"json_schema": {"type": "string", "pattern": "^(a{1000}){1000}$"}}, "json_schema is too complex"),
        ({"grammar": RULES}, "grammar is too complex"),
        ({"regex": r"[^\s\S]"}, "regex matches no text"),
        ({"json_schema": {"$ref": "#"}}, "json_schema matches no text"),
        ({"grammar": "start: start"}, "grammar matches no text"),
    ],
)
async def test_a_damaged_grammar_is_refused_before_it_is_admitted_by_its_field_and_others_go_on(
    sampling: dict[str, Any], message: str
) -> None:
    async with serving() as engine:
        request = ask("beside", json_schema=SCHEMA, seed=3)
        alone = await collect(engine, request)
        async with engine.stream(request) as tokens:
            received = [await anext(tokens)]
            with pytest.raises(InvalidRequest, match=message) as caught:
                async with engine.stream(ask("damaged", **sampling)):
                    pytest.fail("it was admitted")
            assert len(str(caught.value)) < 1000
            received += [token async for token in tokens]
        assert received == alone


def test_a_refused_grammar_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = grammar.GrammarCompiler(byte_level(), VOCABULARY, (END,))
    sampling = Sampling(regex="(a{1000}){1000}")
    with pytest.raises(InvalidRequest) as first:
        compiler.compile(sampling, ())
    monkeypatch.setattr(grammar, "LLMatcher", None)
    with pytest.raises(InvalidRequest) as second:
        compiler.compile(sampling, ())
    assert str(second.value) == str(first.value)


def test_refused_grammars_are_few_and_others_stay_kept() -> None:
    compiler = grammar.GrammarCompiler(byte_level(), VOCABULARY, (END,))
    made = compiler._compiled("regex", "a")
    for count in range(40):
        with pytest.raises(InvalidRequest):
            compiler.compile(Sampling(regex="(" * (count + 1)), ())
    assert len(compiler._refused) <= 32
    assert compiler._compiled("regex", "a") is made


@pytest.mark.parametrize("generated", ["", "2", "25"])
def test_the_first_mask_is_computed_before_a_step_asks_for_it(generated: str) -> None:
    compiler = grammar.GrammarCompiler(byte_level(), VOCABULARY, (END,))
    tokens = [byte_level().id_of(digit) or 0 for digit in generated]
    held = compiler.compile(Sampling(regex="[0-9]{2}x"), tokens)
    held._matcher = None
    words = torch.zeros(-(-VOCABULARY // 32), dtype=torch.int32)
    held.fill(words)
    allowed = {token for token in range(VOCABULARY) if words[token // 32] >> (token % 32) & 1}
    texts = {byte_level().decode([token]) for token in allowed}
    assert {text[:1] for text in texts} == ({"x"} if len(generated) == 2 else set("0123456789"))


def test_a_mask_has_a_limit_of_work_also_after_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that is forced is followed to its end within one mask, which a step waits for."""

    def follow() -> int:
        compiler = grammar.GrammarCompiler(byte_level(), VOCABULARY, (END,))
        held = compiler.compile(Sampling(regex="(c|d)(a{200}){200}"), ())
        held.add_token(byte_level().id_of("c") or 0)
        for count in range(3):
            words = torch.zeros(-(-VOCABULARY // 32), dtype=torch.int32)
            try:
                held.fill(words)
            except InvalidRequest:
                return count
            allowed = [token for token in range(VOCABULARY) if words[token // 32] >> (token % 32) & 1]
            held.add_token(allowed[0])
        return 3

    assert follow() < 3
    monkeypatch.setattr(grammars, "_MASK_FUEL", 200_000)
    assert follow() == 3


async def test_a_request_whose_grammar_leaves_no_token_ends_alone() -> None:
    async with serving() as engine:
        request = ask("beside", json_schema=SCHEMA, seed=3)
        alone = await collect(engine, request)
        async with engine.stream(request) as tokens:
            received = [await anext(tokens)]
            a = byte_level().id_of("a") or 0
            with pytest.raises(InvalidRequest, match="no token"):
                await collect(engine, ask("stuck", regex="[ab]", suppress_tokens=(a, a + 1)))
            with pytest.raises(InvalidRequest, match="regex is too complex"):
                await collect(engine, ask("heavy", regex="[a-z]{1,2000}" * 2000))
            received += [token async for token in tokens]
        assert received == alone


async def test_a_grammar_goes_before_forced_end_tokens() -> None:
    """Where it may not end yet, the answer is cut off within the grammar instead of ended outside of it."""
    forced: dict[str, Any] = {"forced_end_tokens": (END,), "max_tokens": 6}
    async with serving() as engine:
        for seed in range(3):
            tokens = await collect(engine, ask(regex="[ab]{40}", seed=seed, **forced))
            assert tokens[-1].finish_reason == "length"
            assert re.fullmatch("[ab]{6,}", byte_level().decode([token.id for token in tokens]))
            tokens = await collect(engine, ask(regex="[ab]+", seed=seed, **forced))
            assert re.fullmatch("[ab]+", text_of(tokens))


async def test_tokens_so_far_that_are_not_of_the_grammar_are_refused() -> None:
    async with serving() as engine:
        with pytest.raises(InvalidRequest, match="tokens so far are not of regex"):
            await collect(engine, ask(regex="[0-9]+").continued([byte_level().id_of("a") or 0]))


async def test_a_model_without_a_tokenizer_or_an_end_token_refuses_grammars() -> None:
    plain = DictStore()
    plain.add("m", make_model("llama"), eos_token_ids=(END,))
    async with serving(plain) as engine:
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            await collect(engine, ask(regex="a"))
    endless = make_store()
    endless.add("m", make_model("llama"), eos_token_ids=(VOCABULARY - 1,))
    async with serving(endless) as engine:
        with pytest.raises(InvalidRequest, match="end tokens"):
            await collect(engine, ask(regex="a"))


def test_without_the_library_the_engine_works_and_names_the_extra() -> None:
    program = """
import sys
sys.modules["llguidance"] = None
import anyio
from hotswap.errors import BackendMissing
from tests.backends.torch import test_grammar as t

async def main():
    async with t.serving() as engine:
        print(len(await t.collect(engine, t.ask(max_tokens=3, ignore_eos=True))))
        try:
            await t.collect(engine, t.ask(regex="a"))
        except BackendMissing as error:
            print(error)

anyio.run(main)
""".replace("from tests", "import pytest; pytest.importorskip = lambda name: None\nfrom tests", 1)
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.startswith("3\n")
    assert "pip install 'hotswap[torch]'" in said


# In a process of its own, which a stack that overflows ends.
COMPILE = """
import sys
from hotswap import Sampling
from hotswap.backends.grammars import wrong
from hotswap.backends.torch.grammar import GrammarCompiler
from hotswap.errors import InvalidRequest
from tests.text_tokenizers import BYTE_LEVEL_SIZE, SPECIAL, byte_level
field, text = sys.argv[1], sys.stdin.read()
try:
    sampling = Sampling(max_tokens=4, **{field: text})
    said = wrong(*sampling.grammar_field)
    end = byte_level().id_of(SPECIAL) or 0
    GrammarCompiler(byte_level(), BYTE_LEVEL_SIZE, (end,)).compile(sampling, ())
    print("compiled", said)
except InvalidRequest as exc:
    print("refused", exc)
"""
LINKS = 128 * 1024 // 12


def lark_chain() -> str:
    names = [f"r{at:x}" for at in range(LINKS)]
    return "start:r0\n" + "".join(f"{name}:{after}\n" for name, after in pairwise(names)) + f'{names[-1]}:"a"'


def schema_chain() -> str:
    links = {f"{at:x}": {"$ref": f"#/$defs/{at + 1:x}"} for at in range(LINKS // 3)}
    last = {f"{len(links):x}": {"type": "integer"}}
    return json.dumps({"$ref": "#/$defs/0", "$defs": links | last}, separators=(",", ":"))


@pytest.mark.parametrize(("field", "text"), [("grammar", lark_chain()), ("json_schema", schema_chain())])
def test_the_longest_chain_of_references_ends_no_process(field: str, text: str) -> None:
    assert 2**16 < len(text) <= 2**17
    command = [sys.executable, "-c", COMPILE, field]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[:1]) in [(0, ["compiled"]), (0, ["refused"])], done.stderr


# The limit is set once everything is loaded, so that only what is taken from then on meets it.
NO_THREAD = """
import resource, sys
from hotswap import Sampling
from hotswap.backends.grammars import wrong
from hotswap.backends.torch.grammar import GrammarCompiler
from hotswap.errors import InstanceError
from tests.text_tokenizers import BYTE_LEVEL_SIZE, SPECIAL, byte_level
compiler = GrammarCompiler(byte_level(), BYTE_LEVEL_SIZE, (byte_level().id_of(SPECIAL) or 0,))
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
for limit in (taken + (64 << 20), soft):
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    for call in (lambda: wrong("regex", "a+"), lambda: compiler.compile(Sampling(regex="a+"), ())):
        try:
            call()
            print("compiled")
        except InstanceError as exc:
            print("refused", exc)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited and read as on Linux")
def test_without_memory_for_a_thread_a_grammar_is_refused_and_taken_once_there_is() -> None:
    command = [sys.executable, "-c", NO_THREAD]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[0] for line in said] == ["refused", "refused", "compiled", "compiled"]
    assert all("ulimit -v" in line for line in said[:2])
