"""The least number that is enough, found with few trials, and what several such numbers say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, median, stdev

__all__ = ["Estimate", "least"]

# Student's t: what 95 % lie within, by degrees of freedom from 1 on.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def least(enough: Callable[[int], bool], low: int, high: int, *, guess: int) -> int | None:
    """Return the least number of `low` to `high` that is enough, or `None` if `high` is not.

    What is more than enough must be enough as well. Trials begin at `guess`, go away from it in steps that
    double, and halve what is left: a guess that is next to the answer takes four at most.
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
    """A series in short: its median, its mean, and where the mean lies with 95 % by Student's t."""

    median: float
    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Estimate:
        """Estimate from 2 to 11 independent figures; of one, nothing is known of how far it is off."""
        mean = fmean(figures)
        off = float("inf")
        if len(figures) > 1:
            off = _T95[len(figures) - 2] * stdev(figures) / sqrt(len(figures))
        return cls(median=median(figures), mean=mean, low=mean - off, high=mean + off)

    def format(self) -> str:
        """The median, the mean and its interval."""
        return f"{self.median:.4g} ({self.mean:.1f} [{self.low:.1f}-{self.high:.1f}])"
