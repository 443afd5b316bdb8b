"""What grammars cost: a step of 32 requests that are held to JSON schemas, beside the same step without.

    python -m benchmarks grammar --json grammar.json      a small model, a hundred schemas
    python -m benchmarks grammar --full                   hidden 1024, 12 layers, a thousand schemas

`step`: a `TorchEngine` decodes 32 requests of a random Llama in bf16 with a vocabulary of 128,256, on all
cores, by turns with 32 different schemas and without; seconds from token to token, once all have their first,
by the clock and of the processor. The latter counts masks in full, though they are computed beside the step.
`sampling`: a token for each of 32 rows of random logits, on one thread, with the masks of 32 states of a
schema and without. `masks`: seconds to compile a schema, to copy it for another
request, and to compute the masks of 32 requests, in states that no request had before and again. `schemas`:
answers to random schemas, of which jsonschema has to find each finished one right.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import anyio
import torch
from torch import Tensor

from benchmarks.command import parser_of, save
from benchmarks.json_schemas import fault, random_schema
from benchmarks.measure import Summary, brief, machine, ratios, rounds, timed_rounds, versions, workspace
from benchmarks.models import write_llama
from benchmarks.prompts import prompts
from benchmarks.table import show
from benchmarks.tokenizers import END, train
from hotswap import Model, ModelId, Request, RequestId, Sampling
from hotswap.abc import ModelCard
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.tokenizer import HfTokenizer
from hotswap.backends.torch import TorchEngine
from hotswap.backends.torch.distribution import Workspace
from hotswap.backends.torch.grammar import Grammar, GrammarCompiler
from hotswap.backends.torch.masks import Mask, Masks, MaskThread
from hotswap.backends.torch.sampling import Sampler, sample

ROWS, VOCABULARY, PROMPT = 32, 128_256, 16
MODEL = ModelId("m")
LIMIT = 1.3
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
}
HELD, FREE = "with schemas", "without"
ANSWER = (
    '{"name 0": "Ishmael", "people": [{"age": 42, "kind": "gamma", "score": -3.5e2, "words": "Call me so."}, '
    '{"age": 7, "kind": "beta", "score": 0.25, "words": "some years ago, never mind how long"}]}'
)


def main(arguments: Sequence[str]) -> int:
    """Measure, print and perhaps write the report; 1 if a limit is missed or an answer is wrong."""
    parser = parser_of("grammar", __doc__, full="hidden 1024, 12 layers, a thousand schemas; not 256, 4, 100")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=9)
    chosen = parser.parse_args(arguments)
    hidden, layers, schemas = (1024, 12, 1000) if chosen.full else (256, 4, 100)
    settings = {
        "rows": ROWS,
        "vocabulary": VOCABULARY,
        "hidden": hidden,
        "layers": layers,
        "threads": torch.get_num_threads(),
        "steps": chosen.steps,
        "schemas": schemas,
    }
    report = anyio.run(measure, settings, chosen.repeats)
    _show(report)
    save(brief(report), chosen.json)
    steps = Summary.of(ratios(report["step_s"][HELD], report["step_s"][FREE]))
    return int(steps.median > LIMIT or bool(report["schemas"]["wrong"]))


async def measure(settings: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Return the report."""
    tokenizer = train(settings["vocabulary"])
    with workspace("grammar") as directory:
        steps, spent, schemas = await _engine(directory, tokenizer, settings, repeats)
        found = machine(directory)
    compiler = GrammarCompiler(tokenizer, settings["vocabulary"], (END,))
    masks, measured = _masks(compiler, tokenizer, settings["rows"])
    return {
        "machine": found,
        "versions": versions("torch", "llguidance", "jsonschema"),
        "settings": settings,
        "step_s": steps,
        "step_processor_s": spent,
        "sampling_s": _sampling(settings, masks, repeats),
        "masks_s": measured,
        "schemas": schemas,
    }


def people(number: int) -> dict[str, Any]:
    """Return a schema whose answers are long; each number has one of its own."""
    person: dict[str, Any] = {
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
        "score": {"type": "number"},
        "words": {"type": "string", "maxLength": 40},
    }
    items = {"type": "object", "properties": person, "required": list(person), "additionalProperties": False}
    name = f"name {number}"
    return {
        "type": "object",
        "properties": {
            name: {"type": "string", "maxLength": 20},
            "people": {"type": "array", "items": items, "minItems": 100},
        },
        "required": [name, "people"],
        "additionalProperties": False,
    }


# ------------------------------------------------------------------------------------------ in an engine


async def _engine(
    directory: Path, tokenizer: HfTokenizer, settings: dict[str, Any], repeats: int
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, Any]]:
    size_bytes = write_llama(
        directory,
        hidden=settings["hidden"],
        layers=settings["layers"],
        vocabulary=settings["vocabulary"],
        dtype="bfloat16",
        tokenizer=tokenizer.text,
        end_token=END,
    )
    steps: dict[str, list[float]] = {HELD: [], FREE: []}
    spent: dict[str, list[float]] = {HELD: [], FREE: []}
    async with (
        TieredStore(PinnedStore(2 * size_bytes), NvmeStore(directory / "store")) as store,
        TorchEngine("e0", kv_tokens=64 * 1024, packed_bytes=4 * size_bytes) as engine,
    ):
        await engine.load(ModelCard.of(Model(MODEL), await store.manifest(MODEL)), store)
        for turn, name in enumerate(rounds(list(steps), repeats + 1)):
            step_s, processor_s = await _step(engine, settings, held=name is HELD)
            if turn >= len(steps):  # the first round packs weights and prepares the tokenizer
                steps[name].append(step_s)
                spent[name].append(processor_s)
        return steps, spent, await _schemas(engine, tokenizer, settings["schemas"])


async def _step(engine: TorchEngine, settings: dict[str, Any], *, held: bool) -> tuple[float, float]:
    """Return the mean seconds of a step of decodes, by the clock and of the processor."""
    rows, num_tokens = settings["rows"], settings["steps"] + 2
    arrived: list[list[tuple[float, float]]] = [[] for _ in range(rows)]

    async def one(row: int, prompt: Sequence[int]) -> None:
        held_to: dict[str, Any] = {"json_schema": people(row)} if held else {}
        sampling = Sampling(temperature=0.8, seed=row, max_tokens=num_tokens, ignore_eos=True, **held_to)
        async with engine.stream(_request(row, prompt, sampling)) as tokens:
            async for _ in tokens:
                arrived[row].append((time.perf_counter(), time.process_time()))

    async with anyio.create_task_group() as tasks:
        for row, prompt in enumerate(prompts(rows, PROMPT)):
            tasks.start_soon(one, row, prompt)
    assert all(len(times) == num_tokens for times in arrived), "an answer was shorter than its schema says"
    begin, end = max(times[0] for times in arrived), min(times[-1] for times in arrived)
    within = [at for at in arrived[0] if begin <= at <= end]
    num_steps = len(within) - 1
    return (within[-1][0] - within[0][0]) / num_steps, (within[-1][1] - within[0][1]) / num_steps


async def _schemas(engine: TorchEngine, tokenizer: HfTokenizer, count: int) -> dict[str, Any]:
    """Return what became of the answers to random schemas."""
    made = [random_schema(Random(seed)) for seed in range(count)]
    kinds = {"count": count, "right": 0, "unfinished": 0}
    wrong: dict[str, str] = {}

    async def one(at: int) -> None:
        sampling = Sampling(temperature=1.5, seed=at, max_tokens=600, json_schema=made[at])
        async with engine.stream(_request(at, [at % 500 + 3, 9], sampling)) as tokens:
            found = await tokens.collect()
        if found[-1].finish_reason != "stop":
            kinds["unfinished"] += 1
        elif said := fault(tokenizer.decode([token.id for token in found[:-1]]), made[at]):
            wrong[str(at)] = said
        else:
            kinds["right"] += 1

    async with anyio.create_task_group() as tasks:
        for at in range(count):
            tasks.start_soon(one, at)
    return {**kinds, "wrong": wrong}


def _request(at: int, prompt: Sequence[int], sampling: Sampling) -> Request:
    return Request(id=RequestId(f"r{at}"), model=MODEL, prompt=tuple(prompt), sampling=sampling)


# ------------------------------------------------------------------------------------------ by themselves


def _masks(
    compiler: GrammarCompiler, tokenizer: HfTokenizer, rows: int
) -> tuple[Masks, dict[str, list[float]]]:
    """Return masks of different states of a schema, and what they and the schemas took."""
    answer = tokenizer.encode(ANSWER, add_special_tokens=False)
    seconds: dict[str, list[float]] = {"compile": [], "copy": [], "first": [], "again": []}
    for name in ("compile", "copy"):
        for row in range(rows):
            began_s = time.perf_counter()
            compiler.compile(Sampling(json_schema=people(row)), ())
            seconds[name].append(time.perf_counter() - began_s)
    held: list[Grammar] = []
    for row in range(rows):
        held.append(compiler.compile(Sampling(json_schema=people(0)), ()))
        for token in answer[: row * len(answer) // rows]:
            held[row].add_token(token)
    thread = MaskThread()
    masks: Masks = ()
    for name in ("first", "again"):
        began_s = time.perf_counter()
        computed = thread.begin(held)
        masks = computed.result() if computed is not None else ()
        seconds[name].append(time.perf_counter() - began_s)
    thread.close()
    return masks, seconds


def _sampling(settings: dict[str, Any], masks: Masks, repeats: int) -> dict[str, dict[str, list[float]]]:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(settings["rows"], settings["vocabulary"], generator=generator) * 2).bfloat16()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return {kind: _kind(logits, masks, fields, repeats) for kind, fields in KINDS.items()}
    finally:
        torch.set_num_threads(settings["threads"])


def _kind(
    logits: Tensor, masks: Sequence[Mask | None], fields: dict[str, Any], repeats: int
) -> dict[str, list[float]]:
    samplers = [Sampler(Sampling(seed=row, **fields), (END,), (5, 6, 7), 3) for row in range(len(logits))]
    space, indices = Workspace(), [0] * len(logits)
    calls = {
        HELD: lambda: sample(logits, samplers, indices, space, masks),
        FREE: lambda: sample(logits, samplers, indices, space),
    }
    return timed_rounds(calls, repeats)


# ------------------------------------------------------------------------------------------------- report


def _show(report: dict[str, Any]) -> None:
    steps = {"step": report["step_s"], "step, of the processor": report["step_processor_s"]}
    pairs = {**steps, **report["sampling_s"]}
    lines: list[list[str]] = []
    for name, seconds in pairs.items():
        held, free = (Summary.of([1e3 * s for s in seconds[kind]]) for kind in (HELD, FREE))
        over = Summary.of(ratios(seconds[HELD], seconds[FREE]))
        limit = f"{LIMIT:g}" if name == "step" else ""
        lines.append([name, held.format(1), free.format(1), over.format(2), limit])
    show(f"{ROWS} rows", ["", "ms, with schemas", "ms, without", "ratio", "at most"], lines)
    for name, seconds in report["masks_s"].items():
        print(f"{name}: {Summary.of([1e3 * s for s in seconds]).format(3)} ms")
    print({name: value for name, value in report["schemas"].items() if name != "wrong"})
    for at, said in report["schemas"]["wrong"].items():
        print(f"Schema {at}: {said}")
