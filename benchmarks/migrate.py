"""What a client notices of a move, by how its request moves and how long its context is.

    python -m benchmarks.migrate                      contexts up to 1,024 tokens
    python -m benchmarks.migrate --full               up to 8,192; takes minutes
    python -m benchmarks.migrate --moves 1000         a thousand moves more, each stream compared

Two engines of one process serve the same model, each on a thread of its own. A stream goes from one to the
other, four ways: with its KV blocks while it decodes, as tokens in rounds, with its KV blocks while it stands
still, and without any, evicted and computed anew. Beside it on the source decodes another, whose steps tell
what the move costs others. After each move the engine that was left is unloaded and so knows nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import anyio

from benchmarks.by_hand import ByHand
from benchmarks.measure import Summary, machine, rounds, versions, write_json
from benchmarks.table import show
from hotswap import (
    Fleet,
    InvalidRequest,
    MigrationAborted,
    MigrationLimits,
    Model,
    ModelCard,
    ModelId,
    Request,
    RequestId,
    Sampling,
)
from hotswap.action import MigrationWay
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.torch import TorchEngine
from hotswap.policies import LeastLoadedRouter

__all__ = ["Settings", "main", "measure"]

_WORK = Path(".cache/benchmarks")
_MODEL = "m"
_LONGEST = 1024
# A blocking copy stops at once, whatever there is to copy.
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
        repeats: Moves of each way and context.
        hidden: Width of the model.
        layers: Depth of the model.
        before: Tokens that both streams decode before the move, undisturbed.
        moves: Moves at random moments whose streams are compared with undisturbed ones.
    """

    contexts: tuple[int, ...] = (256, 512, 1024)
    repeats: int = 3
    hidden: int = 512
    layers: int = 8
    before: int = 24
    moves: int = 0


FULL = Settings(contexts=(256, 512, 1024, 2048, 4096, 8192), repeats=5)


def measure(settings: Settings, directory: Path = _WORK) -> dict[str, Any]:
    """Carry the benchmark out and return its report, seconds of each move."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="migrate-", dir=directory) as work:
        _write_model(settings, Path(work))
        report: dict[str, Any] = {
            "machine": machine(Path(work)),
            "versions": versions("torch", "transformers"),
            "settings": asdict(settings),
            "gap_s": {way: {} for way in _LIMITS},
            "step_s": {"normal": [], "migrating": []},
            "step_ratio": [],
            "copied_bytes": {},
        }
        for context in settings.contexts:
            for way in rounds(tuple(_LIMITS), 1):
                anyio.run(_measure, Path(work), settings, context, way, report)
        if settings.moves:
            report["exact"] = anyio.run(_compare, Path(work), settings)
    return report


def _write_model(settings: Settings, directory: Path) -> None:
    import torch
    import transformers

    from hotswap.backends.stores.convert import convert

    config: Any = transformers.LlamaConfig(
        vocab_size=2048,
        hidden_size=settings.hidden,
        intermediate_size=3 * settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=16_384,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    models: Any = transformers.AutoModelForCausalLM
    models.from_config(config).save_pretrained(directory / "checkpoint")
    convert(directory / "checkpoint", directory / "store", model_id=_MODEL)


@dataclass(slots=True, eq=False)
class _Stream:
    """A stream that is read all the time: when each token came, and what it was."""

    prompt: tuple[int, ...]
    sampling: Sampling
    times_s: list[float] = field(default_factory=list[float])
    tokens: list[int] = field(default_factory=list[int])
    hops: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    request: str = ""
    _waiting: list[tuple[int, anyio.Event]] = field(default_factory=list[tuple[int, anyio.Event]])

    async def run(self, fleet: Fleet) -> None:
        async with fleet.stream(_MODEL, self.prompt, self.sampling) as stream:
            self.request = stream.request.id
            async for token in stream:
                self.times_s.append(time.perf_counter())
                self.tokens.append(token.id)
                self.hops = [(hop.instance, hop.first_index) for hop in stream.hops]
                for _, event in [entry for entry in self._waiting if entry[0] <= len(self.tokens)]:
                    event.set()

    async def has(self, count: int) -> None:
        """Wait until so many tokens came."""
        event = anyio.Event()
        self._waiting.append((count, event))
        if len(self.tokens) < count:
            await event.wait()

    @property
    def gap_s(self) -> float:
        """Between the last token of one engine and the first of the next."""
        seam = self.hops[-1][1]
        return self.times_s[seam] - self.times_s[seam - 1]

    def steps_s(self, begin_s: float, end_s: float) -> list[float]:
        """Between tokens that came in that time."""
        times = [at for at in self.times_s if begin_s <= at <= end_s]
        return [later - earlier for earlier, later in pairwise(times)]


def _fleet(root: Path, settings: Settings, context: int, limits: MigrationLimits) -> Fleet:
    kv_tokens = context + 4 * _LONGEST
    engines = [TorchEngine(name, threads=1, kv_tokens=kv_tokens, max_requests=8) for name in ("e0", "e1")]
    return Fleet(
        engines=engines,
        store=TieredStore(PinnedStore("2 GiB"), NvmeStore(root / "store")),
        models=[Model(_MODEL)],
        router=LeastLoadedRouter(),
        scheduler=ByHand(),
        migration_limits=limits,
    )


async def _measure(root: Path, settings: Settings, context: int, way: str, report: dict[str, Any]) -> None:
    """Move one request to and fro between two engines, and another beside it before each move."""
    random = Random(context)
    gaps = report["gap_s"][way].setdefault(str(context), [])
    async with _fleet(root, settings, context, _LIMITS[way]) as fleet:
        await fleet.swap("e0", to=_MODEL)
        prompt = tuple(random.randrange(2048) for _ in range(context))
        # The first move warms up.
        for turn in range(settings.repeats + 1):
            source, destination = ("e0", "e1") if turn % 2 == 0 else ("e1", "e0")
            await fleet.swap(destination, to=_MODEL)
            sampling = Sampling(max_tokens=_LONGEST, ignore_eos=True)
            for instance in (source, destination):
                fleet.reopen(instance)
            async with anyio.create_task_group() as tasks:
                await fleet.drain(destination)  # both begin on the source
                moving = _Stream(prompt, sampling)
                beside = _Stream(tuple(random.randrange(2048) for _ in range(32)), sampling)
                tasks.start_soon(moving.run, fleet)
                await moving.has(1)
                tasks.start_soon(beside.run, fleet)
                await beside.has(4)
                began_s = time.perf_counter()
                await moving.has(len(moving.tokens) + settings.before)
                moved_s = time.perf_counter()
                fleet.reopen(destination)
                if way == "recompute":
                    await _evict(fleet, source, moving, destination)
                else:
                    kind: MigrationWay = "tokens" if way == "tokens" else "kv"
                    record = await fleet.migrate(moving.request, to=destination, way=kind)
                    if record.outcome != "done":
                        raise RuntimeError(f"a move failed: {record}")
                    report["copied_bytes"][str(context)] = record.copied_bytes or report["copied_bytes"].get(
                        str(context), 0
                    )
                done_s = time.perf_counter()
                await moving.has(moving.hops[-1][1] + 8)
                if turn:
                    gaps.append(moving.gap_s)
                    if way == "kv":
                        _note_steps(report, beside, (began_s, moved_s), (moved_s, done_s))
                tasks.cancel_scope.cancel()
            await fleet.unload(source)
    print(f"{way} at {context}: {Summary.of([1e3 * gap for gap in gaps]).format(1)} ms", file=sys.stderr)


def _note_steps(
    report: dict[str, Any], beside: _Stream, before: tuple[float, float], during: tuple[float, float]
) -> None:
    """The steps of the other stream, before the move and while it went on; a pair needs a few of each."""
    normal, migrating = beside.steps_s(*before), beside.steps_s(*during)
    report["step_s"]["normal"] += normal
    report["step_s"]["migrating"] += migrating
    if len(migrating) >= 3:
        report["step_ratio"].append(statistics.median(migrating) / statistics.median(normal))


async def _evict(fleet: Fleet, source: str, stream: _Stream, destination: str) -> None:
    """Have everything on an instance go elsewhere as it is, to be computed anew."""
    await fleet.drain(source, deadline_s=0.0)
    while stream.hops[-1][0] != destination or len(stream.tokens) <= stream.hops[-1][1]:
        await stream.has(len(stream.tokens) + 1)


async def _compare(root: Path, settings: Settings) -> dict[str, int]:
    """Move streams at random moments, and compare each with the same alone on an engine."""
    random = Random(1)
    counts = {"streams": 0, "moves": 0, "kv": 0, "tokens": 0, "wrong": 0}
    oracle = TorchEngine("oracle", threads=1, kv_tokens=4096)
    async with _fleet(root, settings, 1024, MigrationLimits()) as fleet, oracle:
        for engine in ("e0", "e1"):
            await fleet.swap(engine, to=_MODEL)
        store = TieredStore(PinnedStore("2 GiB"), NvmeStore(root / "store"))
        async with store:
            card = ModelCard.of(Model(_MODEL), await store.manifest(ModelId(_MODEL)))
            await oracle.load(card, store)
            while counts["moves"] < settings.moves:
                sampling = _sampling(random, counts["streams"])
                prompt = tuple(random.randrange(2048) for _ in range(random.randrange(1, 300)))
                stream = _Stream(prompt, sampling)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(stream.run, fleet)
                    await _move_about(fleet, stream, random, counts)
                request = Request(id=RequestId("r"), model=card.id, prompt=stream.prompt, sampling=sampling)
                async with oracle.stream(request) as tokens:
                    expected = [token.id for token in await tokens.collect()]
                counts["streams"] += 1
                counts["wrong"] += stream.tokens != expected
    return counts


def _sampling(random: Random, seed: int) -> Sampling:
    greedy = Sampling(max_tokens=80, ignore_eos=True, seed=seed)
    if random.random() < 0.5:
        return greedy
    return replace(
        greedy,
        temperature=0.9,
        top_p=0.95,
        repetition_penalty=random.choice([1.0, 1.2]),
        stop_token_ids=tuple(random.sample(range(2048), 8)),
    )


async def _move_about(fleet: Fleet, stream: _Stream, random: Random, counts: dict[str, int]) -> None:
    for moment in sorted(random.sample(range(1, 70), 6)):
        with anyio.move_on_after(5):  # it may have ended
            await stream.has(moment)
        if len(stream.tokens) < moment:
            return
        destination = "e1" if stream.hops[-1][0] == "e0" else "e0"
        way: MigrationWay = random.choice(["kv", "kv", "tokens"])
        try:
            record = await fleet.migrate(stream.request, to=destination, way=way)
        except (InvalidRequest, MigrationAborted):  # it has ended, or is on its way
            continue
        if record.outcome == "done":
            counts["moves"] += 1
            counts[record.way] += 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print tables, write the report; 1 if a stream was not that of an undisturbed run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks migrate", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--full", action="store_true", help="contexts up to 8,192 tokens, five repeats")
    parser.add_argument("--contexts", type=int, nargs="+", help="tokens")
    parser.add_argument("--repeats", type=int, help="moves of each kind")
    parser.add_argument("--moves", type=int, default=0, help="moves whose streams are compared")
    parser.add_argument("--json", type=Path, help="where the whole report goes")
    options = parser.parse_args(arguments)
    settings = FULL if options.full else Settings()
    given = {name: getattr(options, name) for name in ("repeats", "moves") if getattr(options, name)}
    if options.contexts:
        given["contexts"] = tuple(options.contexts)
    settings = replace(settings, **given)
    report = measure(settings)
    _print(settings, report)
    if options.json:
        write_json(options.json, report)
    return int(bool(report.get("exact", {}).get("wrong")))


def _print(settings: Settings, report: dict[str, Any]) -> None:
    rows = [
        [way, *(Summary.of([1e3 * s for s in gaps[str(c)]]).format(1) for c in settings.contexts)]
        for way, gaps in report["gap_s"].items()
    ]
    show("what a client waits, in ms", ("", *(f"{c} tokens" for c in settings.contexts)), rows)
    steps = report["step_s"]
    rows = [[kind, Summary.of([1e3 * s for s in steps[kind]]).format(1)] for kind in steps if steps[kind]]
    if report["step_ratio"]:
        rows.append(["ratio within a move", Summary.of(report["step_ratio"]).format(2)])
    show("steps of another stream on the source", ("", "ms"), rows)
    if "exact" in report:
        print(f"\nmoved streams: {report['exact']}")


if __name__ == "__main__":
    sys.exit(main())
