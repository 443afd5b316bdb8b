"""A fleet of two engines under requests drawn at random: valid ones, invalid ones and hostile ones.

    python -m benchmarks requests                       10,000 requests
    python -m benchmarks requests --full                100,000
    python -m benchmarks requests --seed 7 --only 123   one request again, with its traceback
    python -m benchmarks requests --plain               valid ones alone, of mixed lengths: resident memory

Every request must end by itself, in tokens or in a typed error of its own; a valid one in tokens. No engine
may be lost, and requests whose answer is known must read it, whatever runs beside them. In the end all KV
blocks are free. A request depends on the seed and its number alone.
"""

from __future__ import annotations

import json
import logging
import os
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import anyio

from benchmarks.command import parser_of, save
from benchmarks.measure import machine, versions, workspace
from benchmarks.table import show

if TYPE_CHECKING:
    from hotswap import Fleet
    from hotswap.backends.torch import TorchEngine

__all__ = ["Call", "Report", "call_of", "main", "throw", "write_models"]

MODELS = ("a", "b")
_CONTEXT = 768
_CONCURRENT = 32
_PATIENCE_S = 300.0
_NUM_KNOWN = 24
_NUM_SAMPLES = 20
_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ("<s>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
_WORDS = ("never", "mind", "how", "long", "purse", "é", "世", "😀", "<|end|>", "{}", "\n")


@dataclass(slots=True)
class Call:
    """One request as a client makes it.

    Attributes:
        kind: `"known"`, `"valid"` or `"hostile"`.
        fields: Arguments of `Sampling`.
        messages: Of a chat; `None` for a prompt.
        arguments: Of `Fleet.stream`, but for `sampling`.
        leaves_after: Tokens after which the client leaves; `None` if it stays.
    """

    kind: str
    fields: dict[str, Any]
    messages: Any
    arguments: dict[str, Any]
    leaves_after: int | None = None


@dataclass(slots=True)
class Report:
    """Counts of outcomes by kind, the failures, and resident bytes as the requests went by."""

    seed: int
    num_requests: int = 0
    outcomes: Counter[str] = field(default_factory=lambda: Counter[str]())
    logged: Counter[str] = field(default_factory=lambda: Counter[str]())
    failures: list[str] = field(default_factory=lambda: list[str]())
    resident_bytes: list[tuple[int, int]] = field(default_factory=lambda: list[tuple[int, int]]())


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the requests, print the outcomes, and return 1 if any failed."""
    parser = parser_of("requests", __doc__, full="100,000 requests")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the number of one request")
    parser.add_argument("--plain", action="store_true", help="valid requests alone, of mixed lengths")
    options = parser.parse_args(arguments)
    total = 100_000 if options.full else options.requests
    numbers = range(total) if options.only is None else [options.only]
    with workspace("requests") as directory:
        write_models(directory)
        report = anyio.run(throw, directory, options.seed, numbers, options.plain)
    rows = [[outcome, f"{count:,}"] for outcome, count in sorted(report.outcomes.items())]
    show(f"{report.num_requests:,} requests at random, seed {report.seed}", ("", "requests"), rows)
    rows = [[f"{number:,}", f"{size / 1e6:,.1f}"] for number, size in report.resident_bytes]
    show("resident memory", ("requests ended", "MB"), rows)
    for line, count in report.logged.most_common():
        print(f"logged {count:,} times: {line}")
    for failure in report.failures[:10]:
        print(failure)
    print(f"{len(report.failures)} failures")
    facts = {
        "machine": machine(Path.cwd()),
        "versions": versions("torch", "transformers"),
        "seed": report.seed,
        "requests": report.num_requests,
        "plain": options.plain,
        "outcomes": dict(sorted(report.outcomes.items())),
        "resident_bytes": report.resident_bytes,
        "failures": report.failures,
    }
    save(facts, options.json)
    return 1 if report.failures else 0


# --------------------------------------------------------------------------------------- the fleet


def write_models(directory: Path) -> None:
    """Write two small models with tokenizers and chat templates to `directory / "store"`."""
    import torch
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    from hotswap.backends.stores.convert import convert

    for seed, name in enumerate(MODELS):
        vocabulary = {piece: id for id, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        words = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        words.decoder = decoders.ByteLevel()
        words.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
        words.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", words.token_to_id("<s>"))]
        )
        config: Any = transformers.LlamaConfig(
            vocab_size=264,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=_CONTEXT,
            bos_token_id=words.token_to_id("<s>"),
            eos_token_id=words.token_to_id("<|end|>"),
        )
        torch.manual_seed(seed)
        maker: Any = transformers.AutoModelForCausalLM
        module = maker.from_config(config)
        with torch.no_grad():  # or it says one token for ever
            module.lm_head.weight.mul_(30)
        checkpoint = directory / name
        module.save_pretrained(checkpoint)
        words.save(str(checkpoint / "tokenizer.json"))
        texts = {"chat_template": _TEMPLATE, "bos_token": "<s>", "eos_token": "<|end|>"}
        (checkpoint / "tokenizer_config.json").write_text(json.dumps(texts))
        convert(checkpoint, directory / "store", model_id=name)


async def throw(directory: Path, seed: int, numbers: Sequence[int], plain: bool = False) -> Report:
    """Serve the models that `write_models` wrote, and give them the requests of a seed."""
    from benchmarks.by_hand import ByHand
    from hotswap import Fleet, Model
    from hotswap.backends.stores import NvmeStore
    from hotswap.backends.torch import TorchEngine
    from hotswap.policies import LeastLoadedRouter

    report = Report(seed)
    engines = [TorchEngine(f"e{n}", threads=1, kv_tokens=8192, max_requests=16) for n in range(2)]
    async with AsyncExitStack() as stack:
        stack.enter_context(_Logged(report.logged))
        fleet = await stack.enter_async_context(
            Fleet(
                engines=engines,
                store=NvmeStore(directory / "store"),
                models=[Model(name) for name in MODELS],
                router=LeastLoadedRouter(),
                scheduler=ByHand(),
            )
        )
        for engine, name in zip(engines, MODELS, strict=True):
            await fleet.swap(engine.id, to=name)
        run = _Run(fleet, engines, report, plain)
        await run.learn()
        await run.all(numbers)
        run.settle()
    return report


class _Run:
    """Makes requests, `_CONCURRENT` at a time, and judges how each ends."""

    def __init__(self, fleet: Fleet, engines: Sequence[TorchEngine], report: Report, plain: bool) -> None:
        self._fleet, self._engines, self._report, self._plain = fleet, engines, report, plain
        self._known: list[list[int]] = []

    async def learn(self) -> None:
        """Read the known answers, one after the other on an idle fleet."""
        for number in range(_NUM_KNOWN):
            tokens: list[int] = []
            await self._read(_known(number), tokens)
            self._known.append(tokens)

    async def all(self, numbers: Sequence[int]) -> None:
        """Make the requests of these numbers."""
        remaining = iter(numbers)
        every = max(1, len(numbers) // _NUM_SAMPLES)

        async def client() -> None:
            for number in remaining:
                await self._judge(number)
                self._report.num_requests += 1
                if self._report.num_requests % every == 0:
                    self._report.resident_bytes.append((self._report.num_requests, _resident_bytes()))

        async with anyio.create_task_group() as tasks:
            for _ in range(min(_CONCURRENT, len(numbers))):
                tasks.start_soon(client)

    def settle(self) -> None:
        """Note what the requests left behind."""
        failures = self._report.failures
        failures += [f"{running.id} still runs" for running in self._fleet.view().running]
        for engine in self._engines:
            status = engine.status()
            if status.model is None:
                failures.append(f"{engine.id} is {status.state.name}")
            if status.num_free_kv_blocks != status.num_kv_blocks:
                kept = status.num_kv_blocks - status.num_free_kv_blocks
                failures.append(f"{engine.id} keeps {kept} KV blocks")
        if any(instance.num_requests for instance in self._fleet.view().instances):
            failures.append("a request is still assigned to an instance")

    async def _judge(self, number: int) -> None:
        from hotswap.errors import HotswapError, InstanceError

        call = call_of(self._report.seed, number, plain=self._plain)
        tokens: list[int] = []
        complaint = ""
        try:
            with anyio.fail_after(_PATIENCE_S):
                outcome = await self._read(call, tokens)
            if call.kind == "known" and tokens != self._known[number % _NUM_KNOWN]:
                complaint = "another answer than alone"
        except HotswapError as exc:
            outcome = type(exc).__name__
            allowed = call.kind == "hostile" or call.arguments.get("deadline_s") is not None
            if isinstance(exc, InstanceError) or not allowed:
                complaint = "".join(traceback.format_exception(exc))
        except Exception as exc:
            outcome = type(exc).__name__
            complaint = "".join(traceback.format_exception(exc))
        self._report.outcomes[f"{call.kind}: {outcome}"] += 1
        if complaint:
            self._report.failures.append(f"request {number} ({call.kind}, {outcome}): {complaint}")

    async def _read(self, call: Call, tokens: list[int]) -> str:
        """Make a request and read it into `tokens`; return how it ended."""
        from hotswap import Chat, Sampling

        arguments = dict(call.arguments)
        model, prompt = arguments.pop("model"), arguments.pop("prompt")
        if call.messages is not None:
            prompt = Chat(call.messages)
        async with self._fleet.stream(model, prompt, Sampling(**call.fields), **arguments) as stream:
            async for token in stream:
                tokens.append(token.id)
                if len(tokens) == call.leaves_after:
                    return "left"
        return "tokens"


class _Logged(logging.Handler):
    """Counts what hotswap logs from WARNING on, by its text without the arguments."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__(logging.WARNING)
        self._counts = counts

    def emit(self, record: logging.LogRecord) -> None:
        self._counts[str(record.msg)] += 1

    def __enter__(self) -> None:
        logging.getLogger("hotswap").addHandler(self)

    def __exit__(self, *exc: object) -> None:
        logging.getLogger("hotswap").removeHandler(self)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --------------------------------------------------------------------------------------- the requests


def call_of(seed: int, number: int, *, plain: bool = False) -> Call:
    """Return the request of a number: of eight one is known, three valid, four hostile; or all `plain`."""
    random = Random(f"{seed}-{number}")
    if plain:
        return _plain(random)
    if number % 8 == 0:
        return _known(number % _NUM_KNOWN)
    call = _valid(random)
    if number % 8 > 3:
        call.kind = "hostile"
        _spoil(call, random)
    return call


def _known(number: int) -> Call:
    random = Random(number)
    fields: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    if number % 3:
        fields |= {"temperature": 0.9, "seed": number}
    prompt = [random.randrange(256) for _ in range(random.choice([1, 9, 70]))]
    return Call("known", fields, None, {"model": MODELS[number % 2], "prompt": prompt})


def _plain(random: Random) -> Call:
    prompt = [random.randrange(256) for _ in range(random.randrange(1, _CONTEXT - 64))]
    fields = {"max_tokens": random.randrange(1, 64), "temperature": random.choice([0.0, 0.8])}
    return Call("valid", fields, None, {"model": random.choice(MODELS), "prompt": prompt})


def _text(random: Random, most: int) -> str:
    return " ".join(random.choice(_WORDS) for _ in range(random.randrange(1, most)))


_VALID: dict[str, tuple[Any, ...]] = {
    "min_tokens": (0, 1),
    "temperature": (0, 0.3, 1, 2.5),
    "top_k": (0, -1, 1, 5, 1000),
    "top_p": (0.01, 0.5, 1),
    "min_p": (0, 0.1, 1),
    "repetition_penalty": (0.5, 1, 1.3),
    "presence_penalty": (-2, 0.5),
    "frequency_penalty": (-1.0, 2),
    "logit_bias": ({"5": 3}, [[7, -100]], {9: 2.5}),
    "suppress_tokens": ([], [1, 2, 3]),
    "begin_suppress_tokens": ([0],),
    "forced_end_tokens": ([257],),
    "bad_words": ("he", ["in", "x"]),
    "bad_words_ids": ([[1, 2], [3]],),
    "seed": (None, 0, -1, 2**63),
    "stop": ("o", ["ab", "世"], []),
    "stop_token_ids": ([40, 50],),
    "ignore_eos": (True, False),
    "include_stop": (True, False),
    "skip_special_tokens": (True, False),
    "truncate_prompt_tokens": (1, 40),
    "logprobs": (0, 5),
    "logprobs_of": ("raw", "sampled"),
}
_GRAMMARS: tuple[dict[str, Any], ...] = (
    {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"json_schema": '{"enum": ["x", "y"]}'},
    {"regex": "[a-c]{1,5}"},
    {"grammar": 'start: "a" | "b" start'},
)


def _valid(random: Random) -> Call:
    fields: dict[str, Any] = {"max_tokens": random.choice([1, 4, 16])}
    for name in random.sample(sorted(_VALID), random.randrange(5)):
        fields[name] = random.choice(_VALID[name])
    if random.random() < 0.05:  # others might forbid all that its grammar allows
        fields = {"max_tokens": fields["max_tokens"], **random.choice(_GRAMMARS)}
    messages: Any = None
    prompt: Any = None
    match random.randrange(3):
        case 0:
            prompt = [random.randrange(264) for _ in range(random.choice([1, 3, 30, 100, 600]))]
        case 1:
            prompt = _text(random, 60)
        case _:
            roles = ["system", *("user", "assistant") * 2][: random.randrange(2, 6)]
            messages = [{"role": role, "content": _text(random, 8)} for role in roles]
    arguments: dict[str, Any] = {
        "model": random.choice(MODELS),
        "prompt": prompt,
        "priority": random.choice([0, 0, 0, 1, -3]),
    }
    if random.random() < 0.05:
        arguments["deadline_s"] = random.choice([0, 0.001, 0.05, 60])
    leaves_after = random.randrange(1, 5) if random.random() < 0.1 else None
    return Call("valid", fields, messages, arguments, leaves_after)


class _Raises:
    """A value whose every use raises."""

    def _raise(self, *arguments: object) -> Any:
        raise KeyError("hostile")

    __repr__ = __len__ = __iter__ = __bool__ = __float__ = __int__ = __index__ = __getitem__ = __call__ = (
        _raise
    )
    __eq__ = __hash__ = __lt__ = __str__ = __contains__ = keys = items = _raise


def _nested(depth: int, kind: type) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


@cache
def _values() -> tuple[Any, ...]:
    import numpy
    import torch

    cycle: list[Any] = []
    cycle.append(cycle)
    return (
        *(
            0,
            1,
            -1,
            5,
            263,
            264,
            2**31 - 1,
            2**31,
            2**63,
            2**64,
            10**30,
            10**5000,
            -(10**30),
            True,
            False,
            None,
        ),
        *(0.5, -0.5, -0.0, 1e308, 5e-324, float("nan"), float("inf"), -float("inf"), 1j, Decimal("NaN")),
        *(
            "",
            "0",
            "nan",
            "x",
            "x" * 5000,
            "y" * 300_000,
            "\ud800",
            "\0",
            "<|end|>",
            "😀" * 50,
            "null",
            "None",
        ),
        *(
            "{}",
            "[",
            '{"type": "object"}',
            '{"$ref": "#"}',
            '{"type": "strin"}',
            '{"pattern": "("}',
            "start: x",
        ),
        *(
            "(a+)+$",
            ".*" * 60,
            "a{100000}",
            "(?=a)b",
            "[",
            "\\",
            "(" * 500,
            "start: start",
            'start: "a"',
            "%",
        ),
        *(b"", b"x", bytearray(b"xy"), memoryview(b"xyz"), object(), object, len, ..., NotImplemented),
        *(
            [],
            [[]],
            [None],
            [0],
            [-1],
            [5, 7.5],
            [2**62],
            [264],
            ["a"],
            [float("nan")],
            [[0, 1], [2]],
            [0] * 2000,
        ),
        *((), ((1, 2),), {}, {"a": 1}, {"1": 1e9}, {"-1": 1}, {1: 2}, {1: None}, {None: 1}, {"1" * 9000: 1}),
        *({"type": "object"}, {"type": []}, {"$ref": "#/$defs/x"}, {"enum": []}, {"const": "\ud800"}, {1, 2}),
        *({"allOf": [{"type": "string"}, {"type": "integer"}]}, {"minLength": 10**9, "type": "string"}),
        *(
            frozenset({1}),
            range(5),
            range(10**11),
            iter([1, 2]),
            _nested(5000, list),
            _nested(5000, dict),
            cycle,
        ),
        *(numpy.int64(3), numpy.float32("nan"), numpy.zeros((2, 2)), numpy.arange(4), numpy.array("x")),
        *(torch.tensor(2), torch.tensor([1, 2]), torch.tensor(float("nan")), torch.zeros(2, 2)),
        *(_Raises(), [_Raises()], {"a": _Raises()}, {"role": "user", "content": "x"}, [{"role": "user"}]),
        *(
            [{"role": "user", "content": "x" * 4000}],
            [{"role": "user", "content": None}],
            [{"role": 1}],
            [{}],
        ),
        *([{"role": "\ud800", "content": "x"}], [{"role": "user", "content": [{"type": "image"}]}], "a", "b"),
    )


_FIELDS = (*_VALID, "max_tokens", "prompt_logprobs", "json_schema", "regex", "grammar")
_ARGUMENTS = ("model", "prompt", "messages", "adapter", "priority", "deadline_s", "add_special_tokens")


def _spoil(call: Call, random: Random) -> None:
    """Give one to three places of a request values that may not belong there."""
    values = _values()
    for _ in range(random.choice([1, 1, 2, 3])):
        value = random.choice(values)
        if random.random() < 0.6:
            call.fields[random.choice(_FIELDS)] = value
            continue
        name = random.choice(_ARGUMENTS)
        if name == "messages":
            call.messages = value
        else:
            call.arguments[name] = value
