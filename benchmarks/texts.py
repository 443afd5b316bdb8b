"""How long the event loop stands still while long texts come in beside 16 streams.

    python -m benchmarks texts --json texts.json

A fleet with one `TorchEngine` decodes 16 streams of a random Llama (hidden 256, 4 layers, 128,256 tokens, a
context of 131,072). Beside them four clients at a time send texts of 2 MB, some 450,000 tokens: as prompts
of which the last 1,024 tokens are kept (`truncated`), as the message of a chat, likewise (`chat`), in 20,000
messages of a chat (`messages`), and as prompts that turn out to be too long (`too_long`); `quiet` is without
texts. A task that sleeps for a millisecond in a loop notes how long it took
from one turn to the next: `gap_s` is the longest of each round. `busy_s` is the same in processor time of the
loop's thread: what the loop itself does, without waits for processors and for the interpreter's lock, which
other programs on the machine make longer. The answers of texts have one token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio

from benchmarks.command import parser_of, save
from benchmarks.measure import Summary, machine, rounds, versions, workspace
from benchmarks.models import write_llama
from benchmarks.prompts import prompts
from benchmarks.table import show
from benchmarks.tokenizers import END, source_code, train
from hotswap import Fleet, Model, Sampling
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.torch import TorchEngine
from hotswap.errors import PromptTooLong
from hotswap.policies import LeastLoadedRouter, WeightedLoadSwap

STREAMS, CLIENTS, CHARACTERS, CONTEXT, KEPT = 16, 4, 2_000_000, 131_072, 1024
MESSAGES = 20_000
LIMIT_S = 0.05
QUIET = "quiet"
KINDS = (QUIET, "truncated", "chat", "messages", "too_long")
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message.role + '|>' + message.content | trim + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main(arguments: Sequence[str]) -> int:
    """Measure, print and perhaps write the report; 1 if the loop stood still for longer than the limit."""
    parser = parser_of("texts", __doc__)
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args(arguments)
    report = anyio.run(measure, chosen.repeats)
    _show(report)
    save(report, chosen.json)
    worst = max(Summary.of(report["gap_s"][kind]).median for kind in KINDS)
    return int(worst > LIMIT_S)


async def measure(repeats: int) -> dict[str, Any]:
    """Return the report."""
    text = source_code(CHARACTERS)
    gaps: dict[str, list[float]] = {kind: [] for kind in KINDS}
    busy: dict[str, list[float]] = {kind: [] for kind in KINDS}
    took: dict[str, list[float]] = {kind: [] for kind in KINDS}
    tokens: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with workspace("texts") as directory:
        size_bytes = _write_model(directory)
        async with (
            Fleet(
                engines=[TorchEngine("e0", kv_tokens=32_768, packed_bytes=4 * size_bytes)],
                store=TieredStore(PinnedStore(2 * size_bytes), NvmeStore(directory / "store")),
                models=[Model("m")],
                router=LeastLoadedRouter(),
                scheduler=WeightedLoadSwap(t1=0, t2=4, b=1, sigmas=0),
                interval_s=0.25,
            ) as fleet,
            anyio.create_task_group() as tasks,
        ):
            streams = Streams(fleet)
            for prompt in prompts(STREAMS, 64):
                tasks.start_soon(streams.run, prompt)
            await streams.began()
            send = _senders(fleet, text)
            for turn, kind in enumerate(rounds(KINDS, repeats + 1)):
                before, began_s = streams.num_tokens, time.perf_counter()
                gap_s, busy_s = await _beside(send[kind])
                seconds = time.perf_counter() - began_s
                if turn >= len(KINDS):
                    gaps[kind].append(gap_s)
                    busy[kind].append(busy_s)
                    took[kind].append(seconds)
                    tokens[kind].append((streams.num_tokens - before) / seconds)
            tasks.cancel_scope.cancel()
        found = machine(directory)
    return {
        "machine": found,
        "versions": versions("torch", "tokenizers", "jinja2"),
        "settings": {
            "streams": STREAMS,
            "clients": CLIENTS,
            "characters": CHARACTERS,
            "messages": MESSAGES,
            "context": CONTEXT,
            "repeats": repeats,
        },
        "gap_s": gaps,
        "busy_s": busy,
        "round_s": took,
        "tokens_per_s": tokens,
    }


class Streams:
    """Streams that decode for as long as they are run, one answer after the other."""

    def __init__(self, fleet: Fleet) -> None:
        self.num_tokens = 0
        self._fleet, self._decoding = fleet, 0
        self._all = anyio.Event()

    async def run(self, prompt: Sequence[int]) -> None:
        sampling = Sampling(max_tokens=1000, ignore_eos=True)
        while True:
            async with self._fleet.stream("m", prompt, sampling) as tokens:
                await anext(tokens)
                self._decoding += 1
                if self._decoding == STREAMS:
                    self._all.set()
                async for _ in tokens:
                    self.num_tokens += 1

    async def began(self) -> None:
        """Wait until all decode."""
        await self._all.wait()


def _write_model(directory: Path) -> int:
    (directory / "m").mkdir()
    settings = {"chat_template": TEMPLATE, "eos_token": "<|end|>"}
    (directory / "m" / "tokenizer_config.json").write_text(json.dumps(settings))
    return write_llama(
        directory,
        hidden=256,
        layers=4,
        max_tokens=CONTEXT,
        dtype="bfloat16",
        vocabulary=128_256,
        tokenizer=train(128_256).text,
        end_token=END,
    )


def _senders(fleet: Fleet, text: str) -> dict[str, Callable[[], Awaitable[object]]]:
    """Return what a client does, by kind."""
    kept = Sampling(max_tokens=1, truncate_prompt_tokens=KEPT)
    size = len(text) // MESSAGES
    messages = [
        {"role": "user" if at % 2 == 0 else "assistant", "content": text[at * size : (at + 1) * size]}
        for at in range(MESSAGES)
    ]

    async def too_long() -> None:
        try:
            await fleet.generate("m", text, Sampling(max_tokens=1))
        except PromptTooLong:
            return
        raise AssertionError("a prompt longer than the context was served")

    return {
        QUIET: lambda: anyio.sleep(2.0),
        "truncated": lambda: fleet.generate("m", text, kept),
        "chat": lambda: fleet.chat("m", [{"role": "user", "content": text}], kept),
        "messages": lambda: fleet.chat("m", messages, kept),
        "too_long": too_long,
    }


async def _beside(send: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """Return the longest time between two turns of the loop while all clients send once, twice.

    By the clock, and in processor time of the loop's thread.
    """
    longest_s = busiest_s = 0.0

    async def watch() -> None:
        nonlocal longest_s, busiest_s
        last_s, spent_s = time.perf_counter(), time.thread_time()
        while True:
            await anyio.sleep(0.001)
            now_s, now_spent_s = time.perf_counter(), time.thread_time()
            longest_s, busiest_s = max(longest_s, now_s - last_s), max(busiest_s, now_spent_s - spent_s)
            last_s, spent_s = now_s, now_spent_s

    async with anyio.create_task_group() as watching:
        watching.start_soon(watch)
        async with anyio.create_task_group() as clients:
            for _ in range(CLIENTS):
                clients.start_soon(_call, send)
        watching.cancel_scope.cancel()
    return longest_s, busiest_s


async def _call(send: Callable[[], Awaitable[object]]) -> None:
    await send()


def _show(report: dict[str, Any]) -> None:
    lines: list[list[str]] = []
    for kind in KINDS:
        gap = Summary.of([1e3 * s for s in report["gap_s"][kind]])
        busy = Summary.of([1e3 * s for s in report["busy_s"][kind]])
        took, rate = Summary.of(report["round_s"][kind]), Summary.of(report["tokens_per_s"][kind])
        lines.append(
            [kind, gap.format(1), f"{1e3 * LIMIT_S:g}", busy.format(1), took.format(2), rate.format(0)]
        )
    head = ["texts", "longest gap, ms", "at most", "of its own", "s a round", "tokens per s of the streams"]
    show(f"{CLIENTS} texts beside {STREAMS} streams", head, lines)
