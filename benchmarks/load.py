"""How fast weights reach host memory: this store, the raw disk, and the loaders in use today.

    python -m benchmarks.load                          0.5 and 2 GB, about half an hour
    python -m benchmarks.load --full                   0.5 to 4 GB, every shape cold and warm
    python -m benchmarks.load --json report.json

Every contestant loads the same tensors; each run is a fresh process; contestants take turns. `README.md`
in this folder says what is measured and how to read it.
"""

from __future__ import annotations

import argparse
import inspect
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import checkpoints, ranks, resident
from benchmarks.command import parser_of, save
from benchmarks.load_report import show_report
from benchmarks.measure import WORK, Summary, machine, ratios, rounds, workspace
from benchmarks.peers import ABLATED, CONTESTANTS, LIMITS, Memory
from benchmarks.runner import Runner, Series
from benchmarks.timed_run import Cache, Source
from hotswap.backends.stores import NvmeStore
from hotswap.hardware import parse_bytes

__all__ = ["Settings", "main", "measure"]

_PEERS_PYTHON = Path(".cache/bench-env/bin/python")
# Beside the payload, while loading from the disk: what the store's ring takes, and some more.
_EXTRA_BYTES = 8 * (4 << 20) + (64 << 20)
_SWEEP = tuple((threads, chunk << 10) for threads in (2, 4, 8) for chunk in (512, 2048))
_BULK_OFF_BYTES = 64 << 10

# What an ablation switches off, the names that the store's constructor may have for it, and the value.
_ABLATION: dict[str, tuple[tuple[str, ...], Any]] = {
    "no_bulk": (("chunk_bytes",), _BULK_OFF_BYTES),
    "no_direct": (("direct",), False),
    "no_threads": (("threads", "num_threads"), 1),
    "no_pipelining": (("depth", "num_buffers"), 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure, how often, and where.

    Attributes:
        sizes: Bytes of the checkpoints; the largest is the main case, in the shape `llama` where it is run.
        shapes: Of `checkpoints.SHAPES`.
        warm_shapes: Those that are measured with a warm page cache too.
        repeats: Rounds.
        directory: On the disk that is measured; the checkpoints take several times the largest size.
        peers_python: The interpreter of the environment that has the peers, `None` if there is none.
        warm_up_bytes: Size of the checkpoint that every process loads before the clock starts.
        only: Keys of the contestants that run, or what keys begin with; empty for all.
        ablate: Whether to switch off the features that make the store fast, one at a time, in the main case.
        rank_width: Hidden size of the model that is cut for four ranks.
        swap_bytes: Sizes of the models that are swapped on an engine; empty leaves that part out.
        timeout_s: The longest that one run may take.
    """

    sizes: tuple[int, ...] = (500_000_000, 2_000_000_000)
    shapes: tuple[str, ...] = tuple(checkpoints.SHAPES)
    warm_shapes: tuple[str, ...] = ("llama",)
    repeats: int = 5
    directory: Path = WORK
    peers_python: Path | None = _PEERS_PYTHON
    warm_up_bytes: int = 32 << 20
    only: tuple[str, ...] = ()
    ablate: bool = True
    rank_width: int = 1024
    swap_bytes: tuple[int, ...] = (250_000_000, 500_000_000, 1_000_000_000, 2_000_000_000)
    timeout_s: float = 300.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print tables, write the report; 1 if one of ours failed, or any delivered other bytes."""
    options = _parse(arguments)
    report = measure(_settings(options))
    show_report(report)
    save(report, options.json)
    return 1 if report["faults"] else 0


def measure(settings: Settings) -> dict[str, Any]:
    """Carry the benchmark out and return its report, whose keys `README.md` explains."""
    with workspace("load", settings.directory) as work:
        warm_up = _write(settings, work, "llama", settings.warm_up_bytes, name="warm_up")
        with Runner(
            [c for c in CONTESTANTS if not settings.only or c.key.startswith(settings.only)],
            python=Path(sys.executable),
            peers_python=_existing(settings.peers_python),
            warm_up=warm_up,
            timeout_s=settings.timeout_s,
        ) as runner:
            return _measure(settings, work, runner)


def _measure(settings: Settings, work: Path, runner: Runner) -> dict[str, Any]:
    main_case = ("llama" if "llama" in settings.shapes else settings.shapes[0], max(settings.sizes))
    cases: list[dict[str, Any]] = []
    ablation: dict[str, Any] = {}
    sweep: dict[str, list[dict[str, Any]]] = {}
    for shape, size in _order(settings, main_case):
        with _case(settings, work, shape, size) as source:
            # The first is the main case: the limit is as high as this disk allows.
            if not sweep and _runs(runner, "raw_direct"):
                sweep = _find_limits(runner, source)
            cases.append(_measure_case(settings, runner, shape, source))
            if settings.ablate and (shape, size) == main_case and _runs(runner, "hotswap_store"):
                ablation = _ablate(settings, runner, source)
    return {
        "machine": {**machine(work), "peers": runner.versions},
        "settings": _plain(settings),
        "limits": {key: {**runner.defaults[key], "sweep": tries} for key, tries in sweep.items()},
        "cases": cases,
        "ablation": ablation,
        "many_over_one": _many_over_one(cases),
        "ranks": ranks.measure(work / "ranks", width=settings.rank_width),
        "swap": resident.measure(work / "swap", settings.swap_bytes, settings.repeats),
        "unavailable": runner.unavailable,
        "faults": _faults(cases, runner),
    }


# ------------------------------------------------------------------------------------------------ one case


def _measure_case(settings: Settings, runner: Runner, shape: str, source: Source) -> dict[str, Any]:
    """Compare the bytes of every contestant once, then let those that were right take turns."""
    _say(f"{checkpoints.SHAPES[shape]}, {source.payload_bytes / 1e9:g} GB: comparing every byte")
    failed = runner.check(runner.ready, source)
    case: dict[str, Any] = {
        "shape": shape,
        "bytes": source.payload_bytes,
        "num_tensors": len(source.places()),
        "checked": [c.key for c in runner.ready if c.key not in failed],
        "failed": failed,
        "cached_share": {},
        "cold": {},
        "warm": {},
    }
    caches: tuple[Cache, ...] = ("cold", "warm") if shape in settings.warm_shapes else ("cold",)
    for cache in caches:
        running = [c for c in runner.ready if c.key not in failed and cache in c.caches]
        _say(f"{checkpoints.SHAPES[shape]}, {source.payload_bytes / 1e9:g} GB: {cache}")
        results, out = runner.run_rounds(running, source, cache, settings.repeats)
        failed |= out
        # Cold is cold, and warm is warm, only where this says 0, and 1.
        shares = [run["cached_share"] for runs in results.values() for run in runs]
        case["cached_share"][cache] = {"least": min(shares), "most": max(shares)} if shares else {}
        case[cache] = _figures(results)
    return case


def _figures(results: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """For each contestant seconds by round, ratios within rounds, processor time and memory."""
    series = {key: [float(run["seconds"]) for run in runs] for key, runs in results.items()}
    to_limit, over = _to_limit(series), _over_hotswap(series)
    return {
        key: {
            "seconds": series[key],
            **({"ratio": to_limit[key]} if key in to_limit else {}),
            **({"over_hotswap": over[key]} if key in over else {}),
            "cpu_s": statistics.median(run["cpu_s"] for run in runs),
            "peak_extra_bytes": Summary.of([run["peak_extra_bytes"] for run in runs]).figures(),
            **(
                {"enter_s": statistics.median(run["enter_s"] for run in runs)} if "enter_s" in runs[0] else {}
            ),
        }
        for key, runs in results.items()
    }


def _to_limit(series: Series) -> dict[str, float]:
    """The median paired ratio of every contestant to the limit of its kind of memory; 1 is as fast."""
    return {
        c.key: statistics.median(ratios(series[LIMITS[c.memory]], series[c.key]))
        for c in CONTESTANTS
        if c.key in series and LIMITS[c.memory] in series
    }


def _over_hotswap(series: Series) -> dict[str, float]:
    """How many times as long as this store each peer took, into the same kind of memory; paired, medians."""
    ours: dict[Memory, str] = {"fresh": "hotswap_fresh", "existing": "hotswap"}
    return {
        c.key: statistics.median(ratios(series[c.key], series[ours[c.memory]]))
        for c in CONTESTANTS
        if c.kind == "peer" and c.key in series and ours[c.memory] in series
    }


def _find_limits(runner: Runner, source: Source) -> dict[str, list[dict[str, Any]]]:
    """Try threads and sizes of reads for each raw direct read, and let it use the best for its memory."""
    _say("finding the fastest raw direct reads")
    sweep: dict[str, list[dict[str, Any]]] = {}
    for limit in (contestant for contestant in runner.ready if contestant.kind == "limit"):
        tries: list[dict[str, Any]] = [{"threads": t, "chunk_bytes": c, "seconds": []} for t, c in _SWEEP]
        sweep[limit.key] = tries
        for options in rounds(tries, 2):
            shape = {name: options[name] for name in ("threads", "chunk_bytes")}
            contestant = replace(limit, options={**limit.options, **shape})
            options["seconds"].append(runner.run(contestant, source, "cold")["seconds"])
        best = min(tries, key=lambda options: min(options["seconds"]))
        runner.defaults[limit.key] = {name: best[name] for name in ("threads", "chunk_bytes")}
    return sweep


def _runs(runner: Runner, module: str) -> bool:
    return any(contestant.module == module for contestant in runner.ready)


def _ablate(settings: Settings, runner: Runner, source: Source) -> dict[str, Any]:
    """Switch one thing off at a time in the store that reads from the disk, cold."""
    whole = ABLATED
    offered = inspect.signature(NvmeStore).parameters
    running, absent = [whole], dict[str, str]()
    for key, (names, value) in _ABLATION.items():
        name = next((name for name in names if name in offered), None)
        if name is None:
            absent[key] = f"NvmeStore takes none of: {', '.join(names)}"
        else:
            options = {**whole.options, "store": {name: value}}
            running.append(replace(whole, key=key, options=options))
    _say("ablation")
    results, failed = runner.run_rounds(running, source, "cold", settings.repeats)
    series = {key: [float(run["seconds"]) for run in runs] for key, runs in results.items()}
    base = series.get("hotswap", [])
    return {
        "seconds": series,
        "ratios": {key: statistics.median(ratios(base, seconds)) for key, seconds in series.items()},
        "not_offered": {**absent, **failed},
    }


def _many_over_one(cases: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By size: how much longer ten thousand tensors take than one of the same bytes, cold, medians."""
    by_size: dict[str, dict[str, float]] = {}
    for many in (case for case in cases if case["shape"] == "many"):
        for one in (case for case in cases if case["shape"] == "one" and case["bytes"] == many["bytes"]):
            by_size[str(many["bytes"])] = {
                key: statistics.median(of["seconds"]) / statistics.median(one["cold"][key]["seconds"])
                for key, of in many["cold"].items()
                if key in one["cold"]
            }
    return by_size


def _faults(cases: list[dict[str, Any]], runner: Runner) -> list[str]:
    """Faults: a contestant of ours that did not run or took much memory, one that delivered wrong bytes."""
    ours = {contestant.key for contestant in CONTESTANTS if contestant.kind != "peer"}
    faults = [f"{key}: {why}" for key, why in runner.unavailable.items() if key in ours]
    for case in cases:
        for key, why in case["failed"].items():
            if key in ours or "other bytes" in why:
                faults.append(f"{key}, {case['shape']}, {case['bytes']} bytes: {why}")
        for key in ("hotswap", "hotswap_gone"):
            most = case["cold"][key]["peak_extra_bytes"][-1] if key in case["cold"] else 0
            if most > _EXTRA_BYTES:
                faults.append(f"{key}, {case['shape']}: {most} bytes of host memory beside the payload")
    return faults


# ------------------------------------------------------------------------------------------- the checkpoints


@contextmanager
def _case(settings: Settings, work: Path, shape: str, size: int) -> Iterator[Source]:
    """A checkpoint that exists while the block runs: the disk holds one at a time."""
    _say(f"{checkpoints.SHAPES[shape]}, {size / 1e9:g} GB: writing it in every format")
    source = _write(settings, work, shape, size, name=f"{shape}-{size}")
    try:
        yield source
    finally:
        shutil.rmtree(source.directory)
        shutil.rmtree(source.store / source.model)


def _write(settings: Settings, work: Path, shape: str, size: int, *, name: str) -> Source:
    python = _existing(settings.peers_python)
    return checkpoints.write(work / name, shape, size, seed=size % 1000, peers_python=python)


def _order(settings: Settings, main_case: tuple[str, int]) -> list[tuple[str, int]]:
    """All cases, the main one first."""
    others = [(shape, size) for size in sorted(settings.sizes, reverse=True) for shape in settings.shapes]
    return [main_case, *(case for case in others if case != main_case)]


def _existing(python: Path | None) -> Path | None:
    # Not resolved: an environment's interpreter is a link, and what it finds depends on the link's place.
    return python.absolute() if python is not None and python.exists() else None


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------- the command line


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("load", __doc__, full="0.5, 1, 2 and 4 GB, every shape cold and warm")
    default = Settings()
    parser.add_argument("--sizes", nargs="+", metavar="SIZE", help="for instance 500MB 2GB 4GB")
    parser.add_argument("--shapes", nargs="+", choices=checkpoints.SHAPES, default=list(default.shapes))
    parser.add_argument("--repeats", type=int, default=default.repeats)
    parser.add_argument("--dir", type=Path, default=default.directory, help="on the disk to measure")
    parser.add_argument("--peers-python", type=Path, default=default.peers_python)
    parser.add_argument("--only", nargs="+", metavar="KEY", default=[], help="contestants, by how keys begin")
    parser.add_argument("--no-warm", action="store_true", help="leave the warm page cache out")
    parser.add_argument("--no-ablation", action="store_true", help="leave the ablation out")
    parser.add_argument("--no-swap", action="store_true", help="leave the swaps on an engine out")
    return parser.parse_args(arguments)


def _settings(options: argparse.Namespace) -> Settings:
    settings = Settings(
        shapes=tuple(options.shapes),
        repeats=options.repeats,
        directory=options.dir,
        peers_python=options.peers_python,
        only=tuple(options.only),
        ablate=not options.no_ablation,
    )
    if options.full:
        sizes = (500_000_000, 1_000_000_000, 2_000_000_000, 4_000_000_000)
        settings = replace(settings, sizes=sizes, warm_shapes=settings.shapes)
    if options.sizes:
        settings = replace(settings, sizes=tuple(map(parse_bytes, options.sizes)))
    if options.no_warm:
        settings = replace(settings, warm_shapes=())
    return replace(settings, swap_bytes=()) if options.no_swap else settings


def _plain(settings: Settings) -> dict[str, Any]:
    return {
        "sizes": settings.sizes,
        "shapes": settings.shapes,
        "repeats": settings.repeats,
        "only": settings.only,
        "warm_up_bytes": settings.warm_up_bytes,
        "swap_bytes": settings.swap_bytes,
    }


if __name__ == "__main__":
    sys.exit(main())
