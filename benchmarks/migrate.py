"""How long a client waits when its request moves, by method and length of the context.

    python -m benchmarks.migrate                      contexts up to 1,024 tokens
    python -m benchmarks.migrate --full               up to 8,192; takes minutes
    python -m benchmarks.migrate --hybrid             an LFM2 of 0.6 GB, whose states move with its KV blocks
    python -m benchmarks.migrate --alone              no other stream decodes beside the one that moves

Two engines of one process serve the same model, each on a thread of its own. A stream moves from one to the
other by four methods: with its KV blocks while it decodes, as tokens in rounds, with its KV blocks while it
is stopped, and evicted and recomputed. Another stream decodes on the source; its steps show what a move costs
others. Its engine also takes memory bandwidth from the destination after the move, which `--alone` avoids.
After each move the source is unloaded, so that it has no prefix left.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import anyio

from benchmarks.by_hand import ByHand
from benchmarks.command import parser_of, save
from benchmarks.measure import WORK, Summary, brief, machine, rounds, versions, workspace
from benchmarks.models import write_hybrid, write_llama
from benchmarks.partial import PartialResults
from benchmarks.table import show
from hotswap import (
    Fleet,
    FleetStream,
    Hop,
    MigrationLimits,
    MigrationMethod,
    Model,
    Sampling,
)
from hotswap.abc import Engine
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.torch import TorchEngine
from hotswap.policies import LeastLoadedRouter

__all__ = [
    "Settings",
    "fleet_of",
    "local_fleet",
    "main",
    "make_engine",
    "make_store",
    "measure",
    "moves",
]

_MODEL = "m"
_LONGEST = 1024
# A blocking copy stops the request at once, however many blocks there are to copy.
_LIMITS = {
    "kv": MigrationLimits(),
    "tokens": MigrationLimits(),
    "blocking": MigrationLimits(last_stage_blocks=1 << 20),
    "recompute": MigrationLimits(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        contexts: Tokens that the moving request has.
        methods: How it moves.
        repeats: Moves of each method and context.
        hybrid: Whether it is an LFM2, not a Llama.
        hidden: Width of the model.
        layers: Depth of the model.
        before: Tokens that both streams decode before the move, undisturbed.
        alone: Whether the moving stream is the only one.
    """

    contexts: tuple[int, ...] = (256, 512, 1024)
    methods: tuple[str, ...] = tuple(_LIMITS)
    repeats: int = 3
    hybrid: bool = False
    hidden: int = 1024
    layers: int = 12
    before: int = 24
    alone: bool = False


FULL = Settings(contexts=(256, 512, 1024, 2048, 4096, 8192), repeats=5)


def measure(
    settings: Settings, directory: Path = WORK, partial: PartialResults | None = None
) -> dict[str, Any]:
    """Carry the benchmark out and return its report, seconds of each move.

    Args:
        settings: What to measure.
        directory: Where the model is written, and deleted in the end.
        partial: What was measured before an interruption; some contexts take minutes.
    """
    results = partial or PartialResults()
    with workspace("migrate", directory) as root:
        if settings.hybrid:
            write_hybrid(root, hidden=settings.hidden, layers=settings.layers, max_tokens=16_384)
        else:
            write_llama(
                root, hidden=settings.hidden, layers=settings.layers, max_tokens=16_384, dtype="bfloat16"
            )
        report: dict[str, Any] = {
            "machine": machine(root),
            "versions": versions("torch", "transformers"),
            "settings": asdict(settings),
            "gap_s": {method: {} for method in settings.methods},
            "own_step_s": {},
            "later_step_s": {},
            "over_step_s": {},
            "step_s": {"normal": [], "migrating": []},
            "step_ratio": [],
            "copied_bytes": {},
        }
        for context in settings.contexts:
            for method in rounds(settings.methods, 1):
                found = results.get(
                    f"{method} {context}",
                    functools.partial(anyio.run, _measure, root, settings, context, method),
                )
                _add(report, str(context), method, found)
    report["ratios"] = _ratios(report)
    return report


def _add(report: dict[str, Any], context: str, method: str, found: dict[str, Any]) -> None:
    """Add the moves of one method at one context."""
    report["gap_s"][method][context] = found["gap_s"]
    if method == "kv":
        for name in ("own_step_s", "later_step_s", "over_step_s"):
            report[name][context] = found[name]
        for name, steps in found["step_s"].items():
            report["step_s"][name] += steps
        report["step_ratio"] += found["step_ratio"]
    if found["copied_bytes"]:
        report["copied_bytes"][context] = found["copied_bytes"]


def _ratios(report: dict[str, Any]) -> dict[str, float]:
    """Return ratios of medians of the gaps and steps."""
    gap_s = {
        method: {context: statistics.median(seen) for context, seen in gaps.items() if seen}
        for method, gaps in report["gap_s"].items()
    }
    contexts = sorted({int(context) for gaps in gap_s.values() for context in gaps})
    shortest, longest = str(contexts[0]), str(contexts[-1])
    for name, key in (("own step", "own_step_s"), ("later step", "later_step_s")):
        gap_s[name] = {context: statistics.median(seen) for context, seen in report[key].items()}
    asked = {
        "kv_longest_over_shortest": (("kv", longest), ("kv", shortest)),
        "recompute_over_kv_at_longest": (("recompute", longest), ("kv", longest)),
        "kv_over_own_step_at_longest": (("kv", longest), ("own step", longest)),
        "kv_over_later_step_at_longest": (("kv", longest), ("later step", longest)),
        "blocking_over_kv_at_longest": (("blocking", longest), ("kv", longest)),
        "recompute_over_tokens_at_longest": (("recompute", longest), ("tokens", longest)),
    }
    ratios = {
        name: gap_s[method][context] / gap_s[beside][at]
        for name, ((method, context), (beside, at)) in asked.items()
        if context in gap_s.get(method, {}) and at in gap_s.get(beside, {})
    }
    if report["step_ratio"]:
        ratios["step_beside_a_move"] = statistics.median(report["step_ratio"])
    return ratios


@dataclass(slots=True, eq=False)
class _Stream:
    """A stream that is read all the time: when each token came, and what it was."""

    prompt: tuple[int, ...]
    sampling: Sampling
    times_s: list[float] = field(default_factory=list[float])
    tokens: list[int] = field(default_factory=list[int])
    stream: FleetStream | None = None
    _waiting: list[tuple[int, anyio.Event]] = field(default_factory=list[tuple[int, anyio.Event]])

    async def run(self, fleet: Fleet) -> None:
        async with fleet.stream(_MODEL, self.prompt, self.sampling) as stream:
            self.stream = stream
            async for token in stream:
                self.times_s.append(time.perf_counter())
                self.tokens.append(token.id)
                for _, event in [entry for entry in self._waiting if entry[0] <= len(self.tokens)]:
                    event.set()

    async def has(self, count: int) -> None:
        """Wait until so many tokens came."""
        event = anyio.Event()
        self._waiting.append((count, event))
        if len(self.tokens) < count:
            await event.wait()

    @property
    def hop(self) -> Hop:
        """Where it runs, and from which token on."""
        assert self.stream is not None
        return self.stream.hops[-1]

    @property
    def request(self) -> str:
        """Its request's id."""
        assert self.stream is not None
        return self.stream.request.id

    @property
    def gap_s(self) -> float:
        """Between the last token of one engine and the first of the next."""
        resumed = self.hop.first_index
        return self.times_s[resumed] - self.times_s[resumed - 1]

    @property
    def later_steps_s(self) -> list[float]:
        """Between the tokens after that, where it is now."""
        times = self.times_s[self.hop.first_index :]
        return [later - earlier for earlier, later in pairwise(times)]

    def steps_s(self, begin_s: float, end_s: float) -> list[float]:
        """Between tokens that came in that time."""
        times = [at for at in self.times_s if begin_s <= at <= end_s]
        return [later - earlier for earlier, later in pairwise(times)]


def make_engine(id: str, context: int) -> TorchEngine:
    """An engine with room for a request of so many tokens."""
    return TorchEngine(id, threads=1, kv_tokens=context + 4 * _LONGEST, max_requests=8)


def make_store(root: Path | str) -> TieredStore:
    """A store of the model in a workspace."""
    return TieredStore(PinnedStore("2 GiB"), NvmeStore(Path(root) / "store"))


def local_fleet(root: Path, context: int, limits: MigrationLimits | None = None) -> Fleet:
    """A fleet of two engines of this process."""
    return fleet_of([make_engine(id, context) for id in ("e0", "e1")], root, limits)


def fleet_of(engines: Sequence[Engine], root: Path, limits: MigrationLimits | None = None) -> Fleet:
    """A fleet of the model in a workspace that does nothing by itself."""
    return Fleet(
        engines=engines,
        store=make_store(root),
        models=[Model(_MODEL)],
        router=LeastLoadedRouter(),
        scheduler=ByHand(),
        migration_limits=limits,
    )


async def _measure(root: Path, settings: Settings, context: int, method: str) -> dict[str, Any]:
    async with local_fleet(root, context, _LIMITS[method]) as fleet:
        return await moves(fleet, settings, context, method)


async def moves(fleet: Fleet, settings: Settings, context: int, method: str) -> dict[str, Any]:
    """Move one request back and forth between two engines, while another decodes on the source."""
    random = Random(context)
    found: dict[str, Any] = {
        "gap_s": [],
        "own_step_s": [],
        "later_step_s": [],
        "over_step_s": [],
        "step_s": {"normal": [], "migrating": []},
        "step_ratio": [],
        "copied_bytes": 0,
    }
    await fleet.swap("e0", to=_MODEL)
    prompt = tuple(random.randrange(2048) for _ in range(context))
    # The first move warms up.
    for turn in range(settings.repeats + 1):
        source, destination = ("e0", "e1") if turn % 2 == 0 else ("e1", "e0")
        await fleet.swap(destination, to=_MODEL)
        sampling = Sampling(max_tokens=3 * _LONGEST, ignore_eos=True)
        for instance in (source, destination):
            fleet.reopen(instance)
        async with anyio.create_task_group() as tasks:
            await fleet.drain(destination)  # both begin on the source
            moving = _Stream(prompt, sampling)
            beside = _Stream(tuple(random.randrange(2048) for _ in range(32)), sampling)
            tasks.start_soon(moving.run, fleet)
            await moving.has(1)
            if not settings.alone:
                tasks.start_soon(beside.run, fleet)
                await beside.has(4)
            began_s = time.perf_counter()
            await moving.has(len(moving.tokens) + settings.before)
            moved_s = time.perf_counter()
            fleet.reopen(destination)
            if method == "recompute":
                await _evict(fleet, source, moving, destination)
            else:
                kind: MigrationMethod = "tokens" if method == "tokens" else "kv"
                record = await fleet.migrate(moving.request, to=destination, method=kind)
                if record.outcome != "done":
                    raise RuntimeError(f"a move failed: {record}")
                found["copied_bytes"] = record.copied_bytes or found["copied_bytes"]
            done_s = time.perf_counter()
            await moving.has(moving.hop.first_index + 8)
            if turn:
                found["gap_s"].append(moving.gap_s)
                found["own_step_s"] += moving.steps_s(began_s, moved_s)
                found["later_step_s"] += moving.later_steps_s
                found["over_step_s"].append(moving.gap_s - statistics.median(moving.later_steps_s))
                _add_steps(found, beside, (began_s, moved_s), (moved_s, done_s))
            tasks.cancel_scope.cancel()
        await fleet.unload(source)
    gaps = Summary.of([1e3 * gap for gap in found["gap_s"]])
    print(f"{method} at {context}: {gaps.format(1)} ms", file=sys.stderr)
    return found


def _add_steps(
    found: dict[str, Any], beside: _Stream, before: tuple[float, float], during: tuple[float, float]
) -> None:
    """The steps of the other stream, before the move and while it went on; a pair needs a few of each."""
    normal, migrating = beside.steps_s(*before), beside.steps_s(*during)
    found["step_s"]["normal"] += normal
    found["step_s"]["migrating"] += migrating
    if len(migrating) >= 3:
        found["step_ratio"].append(statistics.median(migrating) / statistics.median(normal))


async def _evict(fleet: Fleet, source: str, stream: _Stream, destination: str) -> None:
    """Evict all requests of an instance, to be recomputed on another."""
    await fleet.drain(source, deadline_s=0.0)
    while stream.hop.instance != destination or len(stream.tokens) <= stream.hop.first_index:
        await stream.has(len(stream.tokens) + 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print tables, write the report."""
    parser = parser_of("migrate", __doc__, full="contexts up to 8,192 tokens, five repeats")
    parser.add_argument("--contexts", type=int, nargs="+", help="tokens")
    parser.add_argument(
        "--methods", nargs="+", choices=_LIMITS, help="how requests move; all methods by default"
    )
    parser.add_argument("--repeats", type=int, help="moves of each kind")
    parser.add_argument("--hybrid", action="store_true", help="a model with states of convolutions")
    parser.add_argument("--alone", action="store_true", help="no other stream decodes beside")
    options = parser.parse_args(arguments)
    settings = FULL if options.full else Settings()
    if options.contexts:
        settings = replace(settings, contexts=tuple(options.contexts))
    if options.methods:
        settings = replace(settings, methods=tuple(options.methods))
    if options.repeats:
        settings = replace(settings, repeats=options.repeats)
    if options.hybrid:
        settings = replace(settings, hybrid=True, layers=16)
    if options.alone:
        settings = replace(settings, alone=True)
    partial = PartialResults.of(options.json)
    report = measure(settings, partial=partial)
    _print(report)
    save(brief(report), options.json)
    partial.clear()
    return 0


def _print(report: dict[str, Any]) -> None:
    series = {
        **report["gap_s"],
        "its step before": report["own_step_s"],
        "its step after": report["later_step_s"],
        "over a step after": report["over_step_s"],
    }
    contexts = sorted({int(context) for seen in series.values() for context in seen})

    def cell(seen: dict[str, list[float]], context: int) -> str:
        figures = seen.get(str(context))
        return Summary.of([1e3 * s for s in figures]).format(1) if figures else "-"

    rows = [[name, *(cell(seen, context) for context in contexts)] for name, seen in series.items()]
    show("what a client waits, in ms", ("", *(f"{context} tokens" for context in contexts)), rows)
    steps = report["step_s"]
    rows = [[kind, Summary.of([1e3 * s for s in steps[kind]]).format(1)] for kind in steps if steps[kind]]
    if report["step_ratio"]:
        rows.append(["ratio within a move", Summary.of(report["step_ratio"]).format(2)])
    if rows:
        show("steps of another stream on the source", ("", "ms"), rows)
    show("ratios of medians", ("", ""), [[name, f"{ratio:.2f}"] for name, ratio in report["ratios"].items()])


if __name__ == "__main__":
    sys.exit(main())
