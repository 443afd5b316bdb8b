"""The numbers of Llumnix's figures, and how near to them a simulation has to come.

`llumnix_paper.csv` has them as they stand in the vector figures of the artifact: figure, row, system, where
on its axis (requests a second, coefficient of variation, scaling threshold, tokens), metric, value. Of figure
11 the five workloads whose requests can be made again; the traces of the two others are not available.

Tolerances are for a median of five seeds. They were set before anything was simulated here, from how far a
model of the same testbed was off, and from how much its figures change when arrivals move by 5 ms: tails of
prefills by up to 90 %, means of requests by up to 7 %.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import fmean

__all__ = ["PAPER", "TOLERANCES", "Key", "Tolerance", "geometric_mean", "verdict"]


@dataclass(frozen=True, slots=True)
class Key:
    """One point of a figure."""

    figure: str
    row: str
    system: str
    at: float


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a figure may be off: by a share, or by a factor either way, or by an absolute amount.

    `row_factor` bounds the geometric mean of the ratios over the points of a row.
    """

    factor: float
    row_factor: float
    share: bool = False
    slack: float = 0.0

    def holds(self, ours: float, theirs: float) -> bool:
        """Whether a figure is near enough."""
        if abs(ours - theirs) <= self.slack:
            return True
        if ours <= 0 or theirs <= 0:
            return False
        low = 2 - self.factor if self.share else 1 / self.factor
        return low <= ours / theirs <= self.factor


TOLERANCES: Mapping[str, Tolerance] = {
    "request_mean_s": Tolerance(1.15, 1.07, share=True),
    "request_p99_s": Tolerance(1.25, 1.07, share=True),
    "prefill_mean_s": Tolerance(2, 1.3),
    "prefill_p99_s": Tolerance(3, 1.3),
    "decode_mean_s": Tolerance(1.1, 1.07, share=True),
    "decode_p99_s": Tolerance(1.35, 1.15, share=True),
    "preemption_loss_s": Tolerance(1.6, 1.3, slack=0.15),
    "avg_instances": Tolerance(1.0, 1.05, slack=0.7),
}


def verdict(metric: str, ours: float, theirs: float) -> str:
    """Return whether a figure is within its tolerance, and if not what it is of the paper's."""
    if TOLERANCES[metric].holds(ours, theirs):
        return "within"
    return f"x{ours / theirs:.2f}" if theirs else f"{ours:+.3g}"


def geometric_mean(ratios: Iterable[float]) -> float:
    """Return it of those over 0; 1 of none."""
    logs = [log(ratio) for ratio in ratios if ratio > 0]
    return exp(fmean(logs)) if logs else 1.0


def _read() -> dict[Key, dict[str, float]]:
    found: dict[Key, dict[str, float]] = {}
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as text:
        for row in csv.DictReader(text):
            key = Key(row["figure"], row["row"], row["system"], float(row["at"]))
            found.setdefault(key, {})[row["metric"]] = float(row["value"])
    return found


PAPER: Mapping[Key, Mapping[str, float]] = _read()
