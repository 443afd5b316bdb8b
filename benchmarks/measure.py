"""What all benchmarks share: turns, medians, ratios within rounds, the machine, and reports as JSON.

Machines drift: a disk warms up, another process starts. So contestants take turns (`rounds`), a figure is a
median with its spread (`Summary`), and a comparison is the median of the ratios within a round (`ratios`), in
which a slow minute hits both sides.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

__all__ = [
    "WORK",
    "Summary",
    "brief",
    "columns",
    "machine",
    "ratios",
    "rounds",
    "timed_rounds",
    "versions",
    "workspace",
    "write_json",
]

_T = TypeVar("_T")
WORK = Path(".cache/benchmarks")
"""Where benchmarks write models and stores, which they delete in the end."""

# Of a report: the longest line, the digits of a number, and the longest series that `brief` leaves as it is.
_LINE, _DIGITS, _LONGEST = 110, 5, 12


@dataclass(frozen=True, slots=True)
class Summary:
    """The median, the least and the most of a series."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Summary:
        """Summarise one figure or more."""
        return cls(statistics.median(figures), min(figures), max(figures))

    def figures(self) -> list[float]:
        """The median, the least and the most, for a report."""
        return [self.median, self.least, self.most]

    def format(self, digits: int = 3) -> str:
        """The median, and the spread in brackets."""
        return f"{self.median:.{digits}f} [{self.least:.{digits}f}-{self.most:.{digits}f}]"


@contextmanager
def workspace(name: str, directory: Path = WORK) -> Iterator[Path]:
    """A new directory for a benchmark, deleted in the end with all that was written."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=directory) as work:
        yield Path(work).resolve()


def rounds(contestants: Sequence[_T], repeats: int) -> Iterator[_T]:
    """Yield every contestant once a round; each round begins with the next one."""
    for turn in range(repeats):
        start = turn % max(len(contestants), 1)
        yield from [*contestants[start:], *contestants[:start]]


def timed_rounds(
    calls: Mapping[str, Callable[[], object]], repeats: int, *, per: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of each call, by round; a first round, which is not counted, warms up.

    What a call does `per` times counts with the time of one.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn, name in enumerate(rounds(list(calls), repeats + 1)):
        began_s = time.perf_counter()
        calls[name]()
        if turn >= len(calls):
            seconds[name].append((time.perf_counter() - began_s) / per)
    return seconds


def ratios(limit: Sequence[float], figures: Sequence[float]) -> list[float]:
    """`limit / figure` round by round: for seconds, 1 is as fast as the limit and 0.5 takes twice as long."""
    return [a / b for a, b in zip(limit, figures, strict=True)]


def versions(*distributions: str) -> dict[str, str]:
    """The installed versions of those that are installed."""
    found: dict[str, str] = {}
    for name in distributions:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine(directory: Path) -> dict[str, Any]:
    """Return the machine of a measurement; `directory` is on the file system that it reads."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": f"{platform.system()} {platform.release()}",
        "filesystem": _filesystem(directory),
        "load_average": list(os.getloadavg()),
        "python": platform.python_version(),
        "libraries": versions("hotswap", "torch", "numpy", "safetensors", "transformers", "anyio", "isal"),
    }


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report as compact JSON, with numbers rounded to five digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_lines(_rounded(report)) + "\n")


def brief(report: Any) -> Any:
    """Return a report in which a series of more than twelve numbers is its median, least, most and count."""
    if isinstance(report, Mapping):
        return {key: brief(value) for key, value in report.items()}
    if not isinstance(report, list | tuple):
        return report
    if len(report) <= _LONGEST or not all(isinstance(value, int | float) for value in report):
        return [brief(value) for value in report]
    return {
        "median": statistics.median(report),
        "least": min(report),
        "most": max(report),
        "count": len(report),
    }


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return figures as series: from a mapping for each run to a list for each figure."""
    return {name: [row[name] for row in rows] for name in rows[0]}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


def _lines(value: Any, depth: int = 0) -> str:
    """JSON in which what fits into a line stands on one, and short items share lines."""
    text = json.dumps(value)
    if len(text) + depth <= _LINE or not isinstance(value, dict | list):
        return text
    if isinstance(value, dict):
        items = [f"{json.dumps(str(key))}: {_lines(each, depth + 1)}" for key, each in value.items()]
    else:
        items = [_lines(each, depth + 1) for each in value]
    start, end = "{}" if isinstance(value, dict) else "[]"
    return "\n".join([start, *_packed(items, " " * (depth + 1)), " " * depth + end])


def _packed(items: Sequence[str], pad: str) -> Iterator[str]:
    """Lines of items with commas between; an item of several lines has them for itself."""
    line = pad
    for number, item in enumerate(items):
        more = item + ("," if number < len(items) - 1 else "")
        if line != pad and ("\n" in item or len(line) + 1 + len(more) > _LINE):
            yield line
            line = pad
        line += more if line == pad else f" {more}"
        if "\n" in item:
            yield line
            line = pad
    if line != pad:
        yield line


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _filesystem(directory: Path) -> str:
    """The kind of file system and its device, by the longest mount point that leads to the directory."""
    path = str(directory.resolve())
    best = ("", "unknown")
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return best[1]
    for line in lines:
        left, _, right = line.partition(" - ")
        mount, (kind, device, *_) = left.split()[4], right.split()
        if len(mount) >= len(best[0]) and f"{path}/".startswith(mount.rstrip("/") + "/"):
            best = (mount, f"{kind} on {device}")
    return best[1]
