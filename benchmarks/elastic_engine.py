"""Two engines on a CPU that share memory while load moves between them, beside a fixed half each.

    python -m benchmarks elastic_engine                      one round
    python -m benchmarks elastic_engine --full --json FILE   three rounds, without load on the other and with

Two `TorchEngine`s of one process, a thread each, serve a small model each, in bfloat16 and with four heads
to a key-value head. Load is on one of them, then on the other, in four turns; the other one has no load in
the meantime, or little. Fixed: each engine has KV blocks for four requests. Lent: under one `DeviceBudget` of
the same size, each keeping the blocks of one request, they lend each other free blocks. Planned:
`ElasticMemory` moves more where queues lack blocks. The three take turns, each with the same requests.

Every round measures first what a fixed half can do: requests a second, and the seconds of a request and of a
token while it is full and the other engine idle. The rate of the busy one is a multiple of the first. A
request is on time with its first token within half of the seconds of a request, and with its others within
three times those of a token in the mean.

It then measures the requests a second of an engine that has borrowed all it can. Memory makes batches larger,
and gains as much as tokens of a larger batch cost less, which is little on a CPU. Below what a half can do
there is little to gain, above what all the memory can do all are late, so the rate is between. Two engines of
one process slow each other: each round also measures a full half beside one request at a time on the other.

Memory is sampled fifty times a second: what the leases hold, the pages of KV blocks that are resident,
and the resident memory of the process, less what it was before the models were loaded.

The status is 1 if a request failed, or if leases or resident KV blocks were ever over the budget.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import statistics
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import anyio
import psutil
import torch

from benchmarks.command import parser_of, save
from benchmarks.measure import WORK, Summary, columns, machine, rounds, versions, workspace
from benchmarks.models import write_llama
from benchmarks.table import show
from hotswap import DeviceBudget, Fleet, Model, ModelId, Sampling
from hotswap.abc import Scheduler
from hotswap.backends.stores import NvmeStore
from hotswap.backends.torch import SkeletonCache, TorchEngine
from hotswap.errors import HotswapError
from hotswap.policies import ElasticMemory, LeastLoadedRouter, RestoreMinReplicas
from hotswap.simulation import Trace
from hotswap.simulation.arrivals import Arrivals, generate_each

__all__ = ["SYSTEMS", "Settings", "main", "measure"]

_MODELS = ("a", "b")
_VOCABULARY = 2048
_BLOCK_TOKENS = 16
SYSTEMS: dict[str, Scheduler] = {
    "fixed": RestoreMinReplicas(),
    "lent": RestoreMinReplicas(),
    "planned": ElasticMemory(RestoreMinReplicas()),
}
# A request is on time within this part of a request's seconds, and so many times the seconds of a token.
_FIRST_PART, _TOKEN_TIMES = 0.5, 3.0
_FIGURES = ("on_time", "num_late_firsts", "num_late_tokens", "num_failed")
_PEAKS = ("peak_held_bytes", "peak_kv_bytes", "peak_growth_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        rate: Requests a second of the busy engine, over what a fixed half can do.
        idles: Requests a second of the other engine, over those of the busy one.
        prompts: The least and the most tokens of a prompt.
        answers: The least and the most tokens of an answer.
        at_once: The longest requests that a fixed half has room for.
        hidden: Width of the models.
        layers: Depth of the models.
        parts: How often load moves, and once more.
        part_requests: The length of a part, in seconds of a request while a fixed half is full.
        repeats: Rounds.
    """

    rate: float = 1.2
    idles: tuple[float, ...] = (0.0,)
    prompts: tuple[int, int] = (48, 80)
    answers: tuple[int, int] = (128, 192)
    at_once: int = 4
    hidden: int = 512
    layers: int = 4
    parts: int = 4
    part_requests: float = 8.0
    repeats: int = 1

    @property
    def request_blocks(self) -> int:
        """The KV blocks of the longest request, and a spare one."""
        return -(-(self.prompts[1] + self.answers[1]) // _BLOCK_TOKENS) + 1

    @property
    def kv_heads(self) -> int:
        """The key-value heads of the models, one for four heads of 64."""
        return max(1, self.hidden // 256)

    @property
    def block_bytes(self) -> int:
        """The size of a KV block: keys and values in bfloat16."""
        return 2 * 2 * 64 * self.kv_heads * self.layers * _BLOCK_TOKENS

    @property
    def half_blocks(self) -> int:
        """The KV blocks of a fixed half, without block 0."""
        return self.at_once * self.request_blocks


FULL = Settings(idles=(0.0, 0.05), repeats=3)


@dataclass(frozen=True, slots=True)
class _Models:
    """The models, and the memory of two engines that have one each."""

    root: Path
    settings: Settings
    weight_bytes: int

    @property
    def budget_bytes(self) -> int:
        """The memory of both engines, for weights and KV blocks."""
        return 2 * (self.weight_bytes + (self.settings.half_blocks + 1) * self.settings.block_bytes)

    @property
    def floor_bytes(self) -> int:
        """What each engine has in any case: its weights, and the KV blocks of one request."""
        return self.weight_bytes + (self.settings.request_blocks + 1) * self.settings.block_bytes

    @classmethod
    async def of(cls, root: Path, settings: Settings) -> _Models:
        """Return the models of a store that was written."""
        async with NvmeStore(root / "store") as store:
            sizes = [(await store.manifest(ModelId(name))).buffer_bytes for name in _MODELS]
        return cls(root, settings, max(sizes))


@dataclass(frozen=True, slots=True)
class _Half:
    """What a fixed half can do while it is full.

    Attributes:
        rate_per_s: Requests a second.
        lent_rate_per_s: The same with all that the engine can borrow.
        beside_rate_per_s: The same of a half, beside one request at a time on the other engine.
        request_s: From the first token to the last.
        token_s: Of a token.
    """

    rate_per_s: float
    lent_rate_per_s: float
    beside_rate_per_s: float
    request_s: float
    token_s: float


@dataclass(slots=True, eq=False)
class _Served:
    """When the tokens of a request came, in seconds after it was sent."""

    num_tokens: int
    came_s: list[float] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        """When the first token came."""
        return self.came_s[0] if self.came_s else float("inf")

    @property
    def token_s(self) -> float:
        """The time of a token after the first, in the mean."""
        return (self.came_s[-1] - self.came_s[0]) / max(1, self.num_tokens - 1)


@dataclass(slots=True, eq=False)
class _Memory:
    """The most that was seen of what leases hold, of resident KV blocks, and of the process's growth."""

    peak_held_bytes: int = 0
    peak_kv_bytes: int = 0
    peak_growth_bytes: int = 0

    @asynccontextmanager
    async def sampled(self, budget: DeviceBudget, engines: Sequence[TorchEngine]) -> AsyncGenerator[None]:
        """Take samples while the block runs."""
        process, trim = psutil.Process(), getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)
        trim(0)
        before = process.memory_info().rss

        async def take_samples() -> None:
            while True:
                kv_bytes = sum(_kv_bytes(engine) for engine in engines)
                self.peak_kv_bytes = max(self.peak_kv_bytes, kv_bytes)
                self.peak_held_bytes = max(self.peak_held_bytes, budget.held_bytes)
                self.peak_growth_bytes = max(self.peak_growth_bytes, process.memory_info().rss - before)
                await anyio.sleep(0.02)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take_samples)
            yield
            tasks.cancel_scope.cancel()


def _kv_bytes(engine: TorchEngine) -> int:
    """The KV blocks of an engine that are in memory, by whole pages."""
    pool = engine._models._pool
    return 0 if pool is None else sum(map(_resident_bytes, pool.cache.tensors))


def _resident_bytes(tensor: torch.Tensor) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    num_pages = -(-(tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE)
    flags = ctypes.create_string_buffer(num_pages)
    if libc.mincore(start, num_pages * mmap.PAGESIZE, flags):
        raise OSError(ctypes.get_errno(), "mincore failed; it takes Linux.")
    return sum(flag & 1 for flag in flags.raw) * mmap.PAGESIZE


def _engines(models: _Models, system: str, budget: DeviceBudget) -> list[TorchEngine]:
    """Return both engines; those of fixed halves take no part in the budget."""
    half_tokens = models.settings.half_blocks * _BLOCK_TOKENS
    options: dict[str, Any] = {"kv_tokens": half_tokens}
    if system != "fixed":
        options = {
            "kv_tokens": 2 * half_tokens,
            "device_budget": budget,
            "floor_bytes": models.floor_bytes,
        }
    options |= {"kv_block_tokens": _BLOCK_TOKENS, "packed_bytes": 0, "idle_bytes": 0}
    options["skeletons"] = SkeletonCache()
    return [TorchEngine(f"e{number}", threads=1, **options) for number in range(2)]


def _fleet(models: _Models, engines: Sequence[TorchEngine], system: str) -> Fleet:
    return Fleet(
        engines=engines,
        store=NvmeStore(models.root / "store"),  # which lends no weights: each engine has its own
        models=[Model(name, min_replicas=1) for name in _MODELS],
        router=LeastLoadedRouter(),
        scheduler=SYSTEMS[system],
        interval_s=0.2,
    )


async def _serving(fleet: Fleet) -> None:
    """Wait until each engine serves a model."""
    async with anyio.create_task_group() as tasks:
        for name in _MODELS:
            tasks.start_soon(_ask, fleet, name, (5, 6, 7), _Served(2))


async def _ask(fleet: Fleet, model: str, prompt: Sequence[int], served: _Served) -> None:
    began_s = anyio.current_time()
    sampling = Sampling(max_tokens=served.num_tokens, ignore_eos=True)
    async with fleet.stream(model, prompt, sampling) as tokens:
        async for _ in tokens:
            served.came_s.append(anyio.current_time() - began_s)


def _prompt(seed: int, length: int) -> tuple[int, ...]:
    random = Random(seed)
    return tuple(random.randrange(_VOCABULARY) for _ in range(length))


async def _calibrate(models: _Models) -> _Half:
    """Return what an engine can do that is full, with a fixed half and with what it can borrow."""
    rate_per_s, served = await _fill(models, "fixed")
    lent_rate_per_s, _ = await _fill(models, "lent")
    beside_rate_per_s, _ = await _fill(models, "fixed", beside=True)
    # Blocks come as answers grow, so more run at once than the longest requests that there is room for.
    request_s = statistics.median(each.came_s[-1] - each.first_s for each in served)
    token_s = statistics.median(each.token_s for each in served)
    return _Half(rate_per_s, lent_rate_per_s, beside_rate_per_s, request_s, token_s)


async def _fill(models: _Models, system: str, *, beside: bool = False) -> tuple[float, list[_Served]]:
    """Send one engine six times as many requests at once as a half has room for; return its rate.

    With `beside` the other engine has one request at a time meanwhile.
    """
    settings = models.settings
    (least, most), (fewest, longest) = settings.prompts, settings.answers
    prompt, answer = (least + most) // 2, (fewest + longest) // 2
    served = [_Served(answer) for _ in range(6 * settings.at_once)]
    seconds = float("inf")
    engines = _engines(models, system, DeviceBudget(models.budget_bytes))
    async with _fleet(models, engines, system) as fleet:
        await _serving(fleet)

        async def ask_other() -> None:
            for number in count(len(served)):
                await _ask(fleet, "b", _prompt(number, prompt), _Served(answer))

        async with anyio.create_task_group() as others:
            if beside:
                others.start_soon(ask_other)
            began_s = anyio.current_time()
            async with anyio.create_task_group() as clients:
                for number, each in enumerate(served):
                    clients.start_soon(_ask, fleet, "a", _prompt(number, prompt), each)
            seconds = anyio.current_time() - began_s
            others.cancel_scope.cancel()
    return len(served) / seconds, served


def _trace(settings: Settings, seed: int, idle: float, half: _Half) -> Trace:
    """Return the requests for both models, whose load takes turns."""
    turns = (1.0, idle) * (settings.parts // 2)
    rate_per_s = settings.rate * half.rate_per_s
    return generate_each(
        seed,
        {
            "a": Arrivals(rate_per_s=rate_per_s, parts=turns),
            "b": Arrivals(rate_per_s=rate_per_s, parts=turns[::-1]),
        },
        seconds=settings.parts * settings.part_requests * half.request_s,
        prompt_tokens=lambda random: random.randint(*settings.prompts),
        output_tokens=lambda random: random.randint(*settings.answers),
    )


async def _play(models: _Models, system: str, trace: Trace, half: _Half) -> dict[str, float]:
    """Send the requests of a trace, each at its time, and return the figures."""
    budget, memory = DeviceBudget(models.budget_bytes), _Memory()
    served = [_Served(request.output_tokens) for request in trace.requests]
    failed: list[str] = []
    engines = _engines(models, system, budget)
    fleet = _fleet(models, engines, system)

    async def send(number: int) -> None:
        request = trace.requests[number]
        await anyio.sleep_until(began_s + request.arrive_s)
        try:
            await _ask(fleet, request.model, _prompt(number, request.prompt_tokens), served[number])
        except HotswapError as exc:
            failed.append(repr(exc))

    async with memory.sampled(budget, engines), fleet:
        await _serving(fleet)
        began_s = anyio.current_time() + 0.1
        async with anyio.create_task_group() as clients:
            for number in range(len(served)):
                clients.start_soon(send, number)
        seconds = anyio.current_time() - began_s
    late_firsts = [each.first_s > _FIRST_PART * half.request_s for each in served]
    late_tokens = [bool(each.came_s) and each.token_s > _TOKEN_TIMES * half.token_s for each in served]
    whole = [len(each.came_s) == each.num_tokens for each in served]
    on_time = [
        not first and not token and all_came
        for first, token, all_came in zip(late_firsts, late_tokens, whole, strict=True)
    ]
    for error in failed:
        print(error, file=sys.stderr)
    return {
        "on_time": sum(on_time) / len(on_time),
        "num_requests": len(served),
        "num_late_firsts": sum(late_firsts),
        "num_late_tokens": sum(late_tokens),
        "num_failed": len(whole) - sum(whole),
        "seconds": seconds,
        **asdict(memory),
    }


def measure(settings: Settings, directory: Path = WORK) -> dict[str, Any]:
    """Carry the benchmark out and return its report."""
    report: dict[str, Any] = {
        "settings": asdict(settings),
        "versions": versions("torch", "transformers"),
    }
    found: dict[str, dict[str, list[dict[str, float]]]] = {
        f"{idle:g}": {system: [] for system in SYSTEMS} for idle in settings.idles
    }
    halves: list[dict[str, float]] = []
    with workspace("elastic_engine", directory) as root:
        report["machine"] = machine(root)
        for seed, name in enumerate(_MODELS):
            write_llama(
                root,
                hidden=settings.hidden,
                layers=settings.layers,
                name=name,
                seed=seed,
                kv_heads=settings.kv_heads,
                dtype="bfloat16",
                vocabulary=_VOCABULARY,
            )
        models = anyio.run(_Models.of, root, settings)
        report["budget_bytes"] = models.budget_bytes
        for repeat in range(settings.repeats):
            for idle in settings.idles:
                half = anyio.run(_calibrate, models)
                halves.append(asdict(half))
                trace = _trace(settings, repeat + 1, idle, half)
                for system in list(rounds(list(SYSTEMS), repeat + 1))[-len(SYSTEMS) :]:
                    figures = anyio.run(_play, models, system, trace, half)
                    found[f"{idle:g}"][system].append(figures)
                    print(f"{idle:g} {system}: {figures}, {half}", file=sys.stderr)
    report["halves"] = columns(halves)
    for name in ("lent", "beside"):
        ratios = [half[f"{name}_rate_per_s"] / half["rate_per_s"] for half in halves]
        report[f"{name}_over_half"] = ratios
    report["by_idle"] = {
        idle: {system: columns(runs) for system, runs in systems.items()} for idle, systems in found.items()
    }
    report["over_fixed"] = {
        idle: {
            system: [
                run["on_time"] / max(fixed["on_time"], 1e-9)
                for run, fixed in zip(systems[system], systems["fixed"], strict=True)
            ]
            for system in ("lent", "planned")
        }
        for idle, systems in found.items()
    }
    return report


def _is_right(report: dict[str, Any]) -> bool:
    """Whether no request failed, and nothing was over the budget."""
    runs = [of for systems in report["by_idle"].values() for of in systems.values()]
    peaks = [peak for of in runs for name in _PEAKS[:2] for peak in of[name]]
    return not any(sum(of["num_failed"]) for of in runs) and max(peaks) <= report["budget_bytes"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print tables, write the report."""
    logging.getLogger("hotswap").setLevel(logging.ERROR)
    options = parser_of(
        "elastic_engine", __doc__, full="three rounds, without load on the other and with"
    ).parse_args(arguments)
    report = measure(FULL if options.full else Settings())
    runs = [
        (idle, system, of) for idle, systems in report["by_idle"].items() for system, of in systems.items()
    ]
    show(
        "requests on time",
        ["other's load", "memory", "on time", "late first tokens", "late tokens", "failed"],
        [[idle, system, *(Summary.of(of[name]).format(2) for name in _FIGURES)] for idle, system, of in runs],
    )
    show(
        f"most memory seen, MiB, of a budget of {report['budget_bytes'] / (1 << 20):.1f}",
        ["other's load", "memory", "held", "KV blocks resident", "process grew by"],
        [
            [idle, system, *(f"{max(of[name]) / (1 << 20):.1f}" for name in _PEAKS)]
            for idle, system, of in runs
        ],
    )
    for what, name in (("with all that an engine can borrow", "lent"), ("beside one on the other", "beside")):
        ratio = Summary.of(report[f"{name}_over_half"]).format(2)
        print(f"requests a second {what}, over a fixed half: {ratio}")
    for idle, systems in report["over_fixed"].items():
        for system, ratios in systems.items():
            print(f"the other's load {idle}: {system} over fixed {Summary.of(ratios).format(2)}")
    save(report, options.json)
    return int(not _is_right(report))


if __name__ == "__main__":
    sys.exit(main())
