"""A straight line fitted to measurements as they come, for costs that grow with a size."""

from __future__ import annotations

from dataclasses import dataclass, field

from hotswap.errors import ConfigError

__all__ = ["LinearFit"]


@dataclass(slots=True)
class LinearFit:
    """`slope * x + intercept`, fitted by least squares in which older points count less and less.

    Begins as given, as if it had been seen at `x` of 0 and `span`. Neither coefficient is ever below zero:
    nothing takes less time for being more.

    Attributes:
        slope: Seconds for one more.
        intercept: Seconds for none.
        span: How far apart the two points lie that it begins with.
        memory: What share of a point's weight is left when the next comes.
        mean_error: How far off it was, relative, on points it had not seen yet; the mean of recent ones.
    """

    slope: float
    intercept: float
    span: float = 1.0
    memory: float = 0.95
    mean_error: float = 0.0
    _sums: list[float] = field(default_factory=list[float], repr=False)

    def __post_init__(self) -> None:
        if not (self.slope >= 0 and self.intercept >= 0 and self.span > 0 and 0 < self.memory < 1):
            raise ConfigError(f"{self!r} is no line of costs; give numbers of 0 and more.")
        self._sums = [0.0] * 5
        for x in (0.0, self.span):
            self._add(x, self.slope * x + self.intercept)

    def at(self, x: float) -> float:
        """Return what is expected at `x`."""
        return self.slope * x + self.intercept

    def learn(self, x: float, seconds: float) -> None:
        """See what it was."""
        if seconds > 0:
            error = abs(self.at(x) - seconds) / seconds
            self.mean_error += (1 - self.memory) * (error - self.mean_error)
        self._add(x, seconds)
        n, sx, sy, sxx, sxy = self._sums
        spread = n * sxx - sx * sx
        slope = (n * sxy - sx * sy) / spread if spread > 1e-12 * n * sxx else 0.0
        self.slope = max(0.0, slope)
        self.intercept = max(0.0, (sy - self.slope * sx) / n)
        if self.intercept == 0.0 and sxx > 0:
            self.slope = max(0.0, sxy / sxx)

    def _add(self, x: float, y: float) -> None:
        new = (1.0, x, y, x * x, x * y)
        self._sums = [self.memory * old + more for old, more in zip(self._sums, new, strict=True)]
