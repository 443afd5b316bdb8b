"""What a swap costs requests with their KV blocks kept in host memory, beside computing them again.

    python -m benchmarks.kv                           contexts of 256 and 1,024 tokens
    python -m benchmarks.kv --full                    up to 8,192; takes minutes
    python -m benchmarks.kv --disk                    with an `NvmeKVStore` in place of memory

One engine serves two models. A stream decodes on the first; the engine is swapped to the second and back, and
the stream goes on: once with its blocks restored from a `HostKVStore`, once with the store kept from it, in
one process and one after the other. All figures are seconds of the processor, which a busy machine hardly
changes: from the end of the swap back to the first token after it (`restore_cpu_s`, `reprefill_cpu_s`, a
decode step included), of the swap away over one that saves nothing (`save_cpu_s`), of a decode step
(`step_cpu_s`). `streams` are many short requests that come back together.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import anyio

from benchmarks.by_hand import ByHand
from benchmarks.command import parser_of, save
from benchmarks.measure import WORK, Summary, brief, machine, versions, workspace
from benchmarks.models import write_llama
from benchmarks.partial import PartialResults
from benchmarks.table import show
from hotswap import Fleet, Model, Sampling
from hotswap.abc import KVPrefix, KVPut
from hotswap.backends.kv_indexed import IndexedKVStore
from hotswap.backends.kv_stores import HostKVStore, NvmeKVStore
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.torch import TorchEngine
from hotswap.policies import LeastLoadedRouter

__all__ = ["Settings", "main", "measure"]

_VOCABULARY = 2048
# A block has keys and values of two heads in 64 floats each, as `write_llama` shapes them.
_BLOCK_TOKENS, _KV_HEADS, _HEAD_DIM, _FLOAT_BYTES = 32, 2, 64, 4
_STEPS = 6  # after each return
_MOST_TOKENS = 2048  # of a stream, which decodes while the next model is preloaded, too
_MOST_WARM = 1024  # longer contexts are computed again without one time that does not count


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        contexts: Tokens of the stream.
        streams: How many short requests come back together, and `short` tokens each.
        short: Tokens of each of those.
        repeats: Swaps away and back with the store.
        prefills: Those without it, which take long.
        hidden: Width of the models.
        layers: Depth of the models.
        disk: Whether blocks are kept on a disk; what the page cache has is read from there.
    """

    contexts: tuple[int, ...] = (256, 1024)
    streams: int = 16
    short: int = 256
    repeats: int = 4
    prefills: int = 2
    hidden: int = 512
    layers: int = 8
    disk: bool = False


FULL = Settings(contexts=(256, 1024, 4096, 8192))


class Switched(IndexedKVStore[Any]):
    """A store that can be kept from its fleet."""

    is_on = True

    def lookup(self, prefix: KVPrefix) -> int:
        return super().lookup(prefix) if self.is_on else 0

    def put(self, prefix: KVPrefix, *, prefill_s: float = 0.0, copy_s: float = 0.0) -> KVPut:
        if not self.is_on:
            prefill_s, copy_s = 0.0, 1.0
        return super().put(prefix, prefill_s=prefill_s, copy_s=copy_s)


class SwitchedMemory(Switched, HostKVStore):
    pass


class SwitchedDisk(Switched, NvmeKVStore):
    pass


@dataclass(slots=True, eq=False)
class _Stream:
    """A stream that is read all the time: when each token came, in seconds of the processor."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list[int])
    cpu_s: list[float] = field(default_factory=list[float])
    _waiting: list[tuple[int, anyio.Event]] = field(default_factory=list[tuple[int, anyio.Event]])

    async def run(self, fleet: Fleet, max_tokens: int) -> None:
        async with fleet.stream("a", self.prompt, Sampling(max_tokens=max_tokens, ignore_eos=True)) as stream:
            async for token in stream:
                self.tokens.append(token.id)
                self.cpu_s.append(time.process_time())
                for _, event in [entry for entry in self._waiting if entry[0] <= len(self.tokens)]:
                    event.set()

    async def has(self, count: int) -> None:
        """Wait until so many tokens came."""
        if count > _MOST_TOKENS:
            raise RuntimeError(f"A stream would need {count} tokens, and ends after {_MOST_TOKENS}.")
        event = anyio.Event()
        self._waiting.append((count, event))
        if len(self.tokens) < count:
            await event.wait()


@dataclass(slots=True, eq=False)
class _Turns:
    """Swaps away and back, and what each cost."""

    fleet: Fleet
    store: Switched
    streams: list[_Stream]
    found: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    async def turn(self, kind: str, *, counts: bool) -> None:
        """Swap away and back, with all blocks to be saved ("kept"), those that are new ("again") or none."""
        self.store.is_on = kind != "lost"
        if kind == "kept":
            self.store.clear()
        began_s = time.process_time()
        record = await self.fleet.swap("e0", to="b")
        away_s = time.process_time() - began_s
        await self.fleet.swap("e0", to="a")
        back_s, seen = time.process_time(), [len(stream.tokens) for stream in self.streams]
        for stream, count in zip(self.streams, seen, strict=True):
            await stream.has(count + 1)
        ready_s = max(stream.cpu_s[count] for stream, count in zip(self.streams, seen, strict=True)) - back_s
        for stream, count in zip(self.streams, seen, strict=True):
            await stream.has(count + 1 + _STEPS)
        if not counts:
            return
        self._add(f"back {kind}", ready_s)
        self._add(f"away {kind}", away_s)
        self._add(f"blocks {kind}", record.saved_bytes / max(1, record.num_evicted))
        for stream, count in zip(self.streams[:1], seen, strict=False):
            times = stream.cpu_s[count : count + 1 + _STEPS]
            self._add("step", (times[-1] - times[0]) / _STEPS)

    def _add(self, name: str, figure: float) -> None:
        self.found.setdefault(name, []).append(figure)


def measure(
    settings: Settings, directory: Path = WORK, partial: PartialResults | None = None
) -> dict[str, Any]:
    """Carry the benchmark out and return its report.

    Args:
        settings: What to measure.
        directory: Where the models are written, and deleted in the end.
        partial: What was measured before an interruption; the longest context takes minutes.
    """
    results = partial or PartialResults()
    report: dict[str, Any] = {"settings": asdict(settings), "versions": versions("torch", "transformers")}
    figures = ("restore_cpu_s", "reprefill_cpu_s", "save_cpu_s", "step_cpu_s_at", "again_blocks")
    report |= {figure: {} for figure in figures}
    with workspace("kv", directory) as root:
        report["machine"] = machine(root)
        for seed, name in enumerate(("a", "b")):
            write_llama(
                root,
                hidden=settings.hidden,
                layers=settings.layers + seed,  # of one depth, blocks would stay on the device
                name=name,
                seed=seed,
                max_tokens=16_384,
                vocabulary=_VOCABULARY,
            )
        for context in settings.contexts:
            job = functools.partial(anyio.run, _measure, root, settings, context, 1)
            _add(report, str(context), results.get(str(context), job))
        job = functools.partial(anyio.run, _measure, root, settings, settings.short, settings.streams)
        together = results.get("streams", job)
    report["step_cpu_s"] = [step for steps in report["step_cpu_s_at"].values() for step in steps]
    report["streams"] = {"restore_cpu_s": together["back kept"], "reprefill_cpu_s": together["back lost"]}
    report["ratios"] = _ratios(report)
    return report


def _add(report: dict[str, Any], context: str, found: dict[str, Any]) -> None:
    nothing_s = statistics.median(found["away lost"])
    report["restore_cpu_s"][context] = found["back kept"]
    report["reprefill_cpu_s"][context] = found["back lost"]
    report["save_cpu_s"][context] = [max(0.0, away_s - nothing_s) for away_s in found["away kept"]]
    report["step_cpu_s_at"][context] = found["step"]
    report["again_blocks"][context] = found["again"]


def _ratios(report: dict[str, Any]) -> dict[str, float]:
    def median(figure: str, context: str) -> float:
        return float(statistics.median(report[figure][context]))

    contexts = list(report["restore_cpu_s"])
    ratios: dict[str, float] = {}
    for at in contexts:
        restore, prefill = median("restore_cpu_s", at), median("reprefill_cpu_s", at)
        ratios[f"reprefill_over_restore_at_{at}"] = prefill / restore
        ratios[f"restore_in_steps_at_{at}"] = restore / median("step_cpu_s_at", at)
        ratios[f"save_over_reprefill_at_{at}"] = median("save_cpu_s", at) / prefill
    together = {name: statistics.median(seen) for name, seen in report["streams"].items()}
    ratios["reprefill_over_restore_of_streams"] = together["reprefill_cpu_s"] / together["restore_cpu_s"]
    return ratios


async def _measure(root: Path, settings: Settings, context: int, count: int) -> dict[str, Any]:
    max_tokens = _MOST_TOKENS
    random = Random(context)
    streams = [_Stream(tuple(random.randrange(_VOCABULARY) for _ in range(context))) for _ in range(count)]
    kv_store = SwitchedDisk(root, "4 GiB") if settings.disk else SwitchedMemory("4 GiB")
    engine = TorchEngine(
        "e0",
        threads=1,
        kv_tokens=count * (context + max_tokens) + 1024,
        max_requests=max(8, count),
        memory_bytes="4 GiB",
    )
    fleet = Fleet(
        engines=[engine],
        store=TieredStore(PinnedStore("2 GiB"), NvmeStore(root / "store")),
        models=[Model("a"), Model("b")],
        router=LeastLoadedRouter(),
        scheduler=ByHand(),
        kv_store=kv_store,
    )
    async with fleet:
        for model in ("b", "a"):
            await fleet.swap("e0", to=model)
        turns = _Turns(fleet, kv_store, streams)
        async with anyio.create_task_group() as tasks:
            for stream in streams:
                tasks.start_soon(stream.run, fleet, max_tokens)
            for stream in streams:
                await stream.has(2)
            for turn in range(settings.repeats + 2):  # by then the packed copies of both models are made
                await turns.turn("kept", counts=turn > 1)
            for _ in range(2):
                await turns.turn("again", counts=True)
            for turn in range(settings.prefills + (context <= _MOST_WARM)):
                await turns.turn("lost", counts=turn > 0 or context > _MOST_WARM)
            tasks.cancel_scope.cancel()
    block_bytes = settings.layers * _BLOCK_TOKENS * 2 * _KV_HEADS * _HEAD_DIM * _FLOAT_BYTES
    again = [round(size / block_bytes, 2) for size in turns.found["blocks again"]]
    print(f"{count} x {context}: {turns.found}", file=sys.stderr)
    return {**turns.found, "again": again}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the report."""
    parser = parser_of("kv", __doc__, full="contexts up to 8,192 tokens")
    parser.add_argument("--contexts", type=int, nargs="+", help="tokens")
    parser.add_argument("--repeats", type=int, help="swaps of each kind")
    parser.add_argument("--disk", action="store_true", help="keep blocks on a disk")
    options = parser.parse_args(arguments)
    settings = FULL if options.full else Settings()
    if options.contexts:
        settings = replace(settings, contexts=tuple(options.contexts))
    settings = replace(settings, disk=options.disk)
    if options.repeats:
        settings = replace(settings, repeats=options.repeats, prefills=options.repeats)
    partial = PartialResults.of(options.json)
    report = measure(settings, partial=partial)
    _print(report)
    save(brief(report), options.json)
    partial.clear()
    return 0


def _print(report: dict[str, Any]) -> None:
    contexts = list(report["restore_cpu_s"])
    rows = [
        [name, *(Summary.of([1e3 * s for s in report[figure][at]]).format(1) for at in contexts)]
        for name, figure in (
            ("restored", "restore_cpu_s"),
            ("computed again", "reprefill_cpu_s"),
            ("saving", "save_cpu_s"),
            ("a step", "step_cpu_s_at"),
        )
    ]
    show("until the next token, in ms of the processor", ("", *(f"{at} tokens" for at in contexts)), rows)
    show("ratios of medians", ("", ""), [[name, f"{ratio:.2f}"] for name, ratio in report["ratios"].items()])


if __name__ == "__main__":
    sys.exit(main())
