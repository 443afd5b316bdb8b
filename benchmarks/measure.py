"""The engine of every measurement: fair turns, figures that can be trusted, and where they were taken.

Machines drift: a disk warms up, a neighbour wakes. So contestants take turns (`rounds`), a figure is a median
with its spread beside it (`Summary`), and a comparison is the median of the ratios within a round (`ratios`),
in which a slow minute hits both sides.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["Summary", "machine", "ratios", "rounds", "versions", "write_json"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Summary:
    """A series of figures in short."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Summary:
        """Summarise one figure or more."""
        return cls(statistics.median(figures), min(figures), max(figures))

    def format(self, digits: int = 3) -> str:
        """The median, and the spread in brackets."""
        return f"{self.median:.{digits}f} [{self.least:.{digits}f}-{self.most:.{digits}f}]"


def rounds(contestants: Sequence[_T], repeats: int) -> Iterator[_T]:
    """Every contestant once a round; each round begins one further on, so that nobody is always first."""
    for turn in range(repeats):
        start = turn % max(len(contestants), 1)
        yield from [*contestants[start:], *contestants[:start]]


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
    """Where a measurement was taken; `directory` is on the file system that it reads."""
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
    """Write a report as text that diffs well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


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
