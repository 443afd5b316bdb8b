"""Processor time of a step of decodes of different lengths, and of one whose requests change.

    python -m benchmarks lengths --json lengths.json      a small model, seconds
    python -m benchmarks lengths --full                   hidden 1024, 12 layers

A batch of 26 requests decodes on one thread, with weights packed: all of one length; of different lengths,
with as many tokens together; and the same with one request replaced in each step. Contestants take turns; a
figure is the mean processor time of the steps of a turn, so that work of single steps counts, and ratios are
to equal lengths in the same round. Caches are filled with zeros, which cost as much as other values.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import torch

from benchmarks.command import parser_of, save
from benchmarks.measure import Summary, machine, ratios, rounds, versions
from benchmarks.models import llama_in_engine
from benchmarks.table import show
from hotswap.backends.torch.forward import LocalForward, Piece, Work
from hotswap.backends.torch.kv import KVCache, blocks_for

CPU = torch.device("cpu")
NUM_REQUESTS, SHORTEST, LONGEST, BLOCK_TOKENS = 26, 8, 400, 32
WARM_STEPS, STEPS = 4, 32
CONTESTANTS = ("equal", "different", "one_replaced")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that decode; `step` takes them one token further."""

    name: str
    forward: LocalForward
    random: Random = field(default_factory=lambda: Random(0))
    requests: list[tuple[list[int], int]] = field(default_factory=list[tuple[list[int], int]])
    free: list[int] = field(default_factory=list[int])
    fresh: list[int] = field(default_factory=list[int])

    def begin(self) -> None:
        """Begin with new requests, the same ones in every round."""
        self.random, self.requests, self.fresh = Random(0), [], []
        self.free = list(range(1, self.forward.cache.num_blocks + 1))
        lengths = [self._length() for _ in range(NUM_REQUESTS)]
        if self.name == "equal":
            lengths = [round(mean(lengths))] * NUM_REQUESTS
        for length in lengths:
            self._add(length)

    def step(self) -> None:
        """Compute a token of each, the longest first, as an engine does."""
        if self.name == "one_replaced":
            blocks, _ = self.requests.pop(self.random.randrange(NUM_REQUESTS))
            self.free += blocks
            self._add(self._length())
        self.requests.sort(key=lambda request: -request[1])
        pieces: list[Piece] = []
        for blocks, at in self.requests:
            self._grow(blocks, at + 1)
            pieces.append(Piece([at % 512], at, list(blocks), True))
        self.forward.submit(Work(tuple(pieces), fresh=self.fresh))
        self.forward.result()
        self.requests, self.fresh = [(blocks, at + 1) for blocks, at in self.requests], []

    def _length(self) -> int:
        return min(LONGEST, max(SHORTEST, round(self.random.lognormvariate(4.6, 0.6))))

    def _add(self, length: int) -> None:
        blocks: list[int] = []
        self._grow(blocks, length)
        self.requests.append((blocks, length))

    def _grow(self, blocks: list[int], tokens: int) -> None:
        while len(blocks) < blocks_for(tokens, BLOCK_TOKENS):
            blocks.append(self.free.pop())
            self.fresh.append(blocks[-1])


def main(arguments: Sequence[str]) -> int:
    """Measure, print and perhaps write the report."""
    parser = parser_of("lengths", __doc__, full="hidden 1024, 12 layers, instead of 256 and 4")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=list(DTYPES))
    parser.add_argument("--repeats", type=int, default=7)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    size = (1024, 12) if chosen.full else (256, 4)
    report: dict[str, Any] = {
        "machine": machine(Path(tempfile.gettempdir())),
        "versions": versions("torch", "transformers"),
        "settings": {
            "hidden": size[0],
            "layers": size[1],
            "requests": NUM_REQUESTS,
            "lengths": [SHORTEST, LONGEST],
            "steps": STEPS,
            "threads": 1,
        },
        "step_s": {name: _measure(size, DTYPES[name], chosen.repeats) for name in chosen.dtypes},
    }
    for name, seconds in report["step_s"].items():
        _show(name, seconds)
    save(report, chosen.json)
    return 0


def _measure(size: tuple[int, int], dtype: torch.dtype, repeats: int) -> dict[str, list[float]]:
    """Mean seconds of a step, by contestant and round."""
    model = llama_in_engine(*size, dtype)
    batches = {name: Batch(name, _forward(model)) for name in CONTESTANTS}
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    with torch.inference_mode():
        for turn, name in enumerate(rounds(CONTESTANTS, repeats + 1)):
            batches[name].begin()
            for _ in range(WARM_STEPS):
                batches[name].step()
            began_s = time.process_time()
            for _ in range(STEPS):
                batches[name].step()
            if turn >= len(CONTESTANTS):  # the first round warms up
                seconds[name].append((time.process_time() - began_s) / STEPS)
    return seconds


def _forward(model: Any) -> LocalForward:
    num_blocks = NUM_REQUESTS * blocks_for(LONGEST + WARM_STEPS + STEPS, BLOCK_TOKENS)
    cache = KVCache(num_blocks, BLOCK_TOKENS, CPU)  # made of zeros when it is first seen
    return LocalForward(model, cache, invariant=True, linear_only=True)


def _show(dtype: str, seconds: dict[str, list[float]]) -> None:
    rows: list[list[str]] = []
    for name, figures in seconds.items():
        ratio, shown = Summary.of(ratios(figures, seconds["equal"])), Summary.of([1e3 * s for s in figures])
        rows.append([name, shown.format(1), ratio.format(2)])
    show(f"decodes, {dtype}", ("lengths", "ms [min-max]", "ratio to equal"), rows)
