"""The smallest number that is enough, found with few trials, and an estimate from several such numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, median, stdev

__all__ = ["Estimate", "smallest"]

# Student's t for an interval of 95 %, by degrees of freedom from 1 on.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def smallest(enough: Callable[[int], bool], low: int, high: int, *, guess: int) -> int | None:
    """Return the smallest number from `low` to `high` that is enough, or `None` if `high` is not.

    `enough` must be monotonic. The search begins at `guess`, moves away from it in steps that double, and
    then bisects: a guess next to the answer takes at most four trials.
    """
    below, above = low - 1, high + 1  # not enough, as far as is known; enough, likewise
    at, step = min(max(guess, low), high), 1
    while below < at < above:
        if enough(at):
            above = at
            at = max(low, at - step) if below < low else (below + above) // 2
        else:
            below = at
            at = min(high, at + step) if above > high else (below + above) // 2
        step *= 2
    return above if above <= high else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The median, the mean, and the 95 % confidence interval of the mean by Student's t."""

    median: float
    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Estimate:
        """Estimate from 2 to 11 independent figures; the interval of a single figure is infinite."""
        mean = fmean(figures)
        off = float("inf")
        if len(figures) > 1:
            off = _T95[len(figures) - 2] * stdev(figures) / sqrt(len(figures))
        return cls(median=median(figures), mean=mean, low=mean - off, high=mean + off)

    def format(self) -> str:
        """The median, the mean and its interval."""
        return f"{self.median:.4g} ({self.mean:.1f} [{self.low:.1f}-{self.high:.1f}])"
