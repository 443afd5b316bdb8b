"""Samples of one long prompt: what `n=8` computes and waits for, beside one request and beside eight prompts.

    python -m benchmarks n --json FILE

A fleet of one `TorchEngine`, one thread, serves a random Llama. In each round, with new prompts of 4,000
tokens: one request (`one`), one with eight samples (`samples`), and eight requests with a prompt each
(`separate`). `prefill_tokens` is how many tokens of prompts were computed until every stream had its first
token, `first_tokens_s` the time until then, and `processor_s` the processor time of the process in it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import anyio

from benchmarks.by_hand import ByHand
from benchmarks.command import parser_of, save
from benchmarks.measure import Summary, machine, ratios, rounds, workspace
from benchmarks.models import write_llama
from benchmarks.table import show
from hotswap import Fleet, FleetStream, Model, Sampling
from hotswap.backends.stores import NvmeStore
from hotswap.backends.torch import TorchEngine
from hotswap.policies import LeastLoadedRouter

CONTESTANTS = ("one", "samples", "separate")
FIGURES = ("prefill_tokens", "first_tokens_s", "processor_s")
ASKED = Sampling(max_tokens=4, temperature=0.8, ignore_eos=True)
MAX_PREFILLS = 1.1  # what eight samples may compute, in prompts


def main(arguments: Sequence[str]) -> int:
    """Measure, print and perhaps write the report; 1 if eight samples cost more than one prefill."""
    parser = parser_of("n", __doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of a prompt")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    chosen = parser.parse_args(arguments)
    settings = {name: getattr(chosen, name) for name in ("repeats", "prompt", "samples", "hidden", "layers")}
    report = measure(**settings)
    _show(report)
    save(report, chosen.json)
    return 0 if _over(report, "samples", "one", "prefill_tokens").most <= MAX_PREFILLS else 1


def measure(*, repeats: int, prompt: int, samples: int, hidden: int, layers: int) -> dict[str, Any]:
    """Run the rounds and return the report."""
    series: dict[str, dict[str, list[float]]] = {
        figure: {contestant: [] for contestant in CONTESTANTS} for figure in FIGURES
    }
    with workspace("n") as work:
        write_llama(work, hidden=hidden, layers=layers, max_tokens=2 * prompt)
        about = machine(work)
        distinct = anyio.run(_rounds, work, series, repeats, prompt, samples)
    return {
        "machine": about,
        "settings": {
            "repeats": repeats,
            "prompt": prompt,
            "samples": samples,
            "hidden": hidden,
            "layers": layers,
            "threads": 1,
        },
        "distinct_samples": distinct,
        **series,
    }


async def _rounds(
    work: Path, series: dict[str, dict[str, list[float]]], repeats: int, prompt: int, samples: int
) -> int:
    """Fill the series; return how many different generations the samples of a round had at least."""
    random, distinct = Random(0), samples
    async with _serving(work, kv_tokens=(samples + 1) * (prompt + 64)) as fleet:
        await fleet.generate("m", _prompt(random, prompt), ASKED)
        for contestant in rounds(CONTESTANTS, repeats):
            began_s, cpu_s = time.perf_counter(), time.process_time()
            async with _asked(fleet, contestant, random, prompt, samples) as streams:
                first = [await anext(stream) for stream in streams]
                figures = (
                    sum(stream.usage.prompt_tokens - stream.usage.reused_tokens for stream in streams),
                    time.perf_counter() - began_s,
                    time.process_time() - cpu_s,
                )
                rest = [await stream.collect() for stream in streams]
            for name, figure in zip(FIGURES, figures, strict=True):
                series[name][contestant].append(figure)
            if contestant == "samples":
                texts = zip(first, rest, strict=True)
                generations = {(begin.id, *(token.id for token in more)) for begin, more in texts}
                distinct = min(distinct, len(generations))
    return distinct


@asynccontextmanager
async def _serving(work: Path, *, kv_tokens: int) -> AsyncGenerator[Fleet]:
    async with Fleet(
        engines=[TorchEngine("e0", kv_tokens=kv_tokens, threads=1)],
        store=NvmeStore(work / "store"),
        models=[Model("m")],
        router=LeastLoadedRouter(),
        scheduler=ByHand(),
    ) as fleet:
        await fleet.swap("e0", to="m")
        yield fleet


@asynccontextmanager
async def _asked(
    fleet: Fleet, contestant: str, random: Random, length: int, samples: int
) -> AsyncGenerator[Sequence[FleetStream]]:
    async with AsyncExitStack() as stack:
        if contestant == "samples":
            sampling = Sampling(n=samples, max_tokens=ASKED.max_tokens, temperature=0.8, ignore_eos=True)
            yield await stack.enter_async_context(fleet.samples("m", _prompt(random, length), sampling))
            return
        count = 1 if contestant == "one" else samples
        prompts = [_prompt(random, length) for _ in range(count)]
        yield [await stack.enter_async_context(fleet.stream("m", prompt, ASKED)) for prompt in prompts]


def _prompt(random: Random, length: int) -> list[int]:
    return [random.randrange(3, 2000) for _ in range(length)]


def _over(report: dict[str, Any], contestant: str, other: str, figure: str) -> Summary:
    return Summary.of(ratios(report[figure][contestant], report[figure][other]))


def _show(report: dict[str, Any]) -> None:
    lines = [
        [
            contestant,
            Summary.of(report["prefill_tokens"][contestant]).format(0),
            *(Summary.of(report[figure][contestant]).format(2) for figure in FIGURES[1:]),
            *(_over(report, contestant, "one", figure).format(2) for figure in FIGURES),
        ]
        for contestant in CONTESTANTS
    ]
    over = ("prefill over one", "time over one", "processor time over one")
    show("Samples of one prompt", ["asked", "prefill tokens", "first tokens s", "processor s", *over], lines)
    print(f"Different generations among the samples of a round: at least {report['distinct_samples']}.")
