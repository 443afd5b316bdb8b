"""A straight line fitted to measurements as they come, for costs that grow with a size."""

from __future__ import annotations

from dataclasses import dataclass, field

from hotswap.errors import ConfigError

__all__ = ["LinearFit"]


@dataclass(slots=True)
class LinearFit:
    """The line `slope * x + intercept`, fitted by least squares with exponentially decaying weights.

    It starts with the given line, as if that had been measured at `x` of 0 and `span`. Neither coefficient
    falls below zero, since a larger size never takes less time.

    Attributes:
        slope: Seconds per unit of `x`.
        intercept: Seconds at an `x` of 0.
        span: The distance of the two points that the given line stands for.
        memory: The share of a measurement's weight that is left when the next one comes.
        mean_error: The mean relative error of recent predictions, each made before the measurement was
        learned.
    """

    slope: float
    intercept: float
    span: float = 1.0
    memory: float = 0.95
    mean_error: float = 0.0
    _sums: list[float] = field(default_factory=list[float], repr=False)

    def __post_init__(self) -> None:
        if not (self.slope >= 0 and self.intercept >= 0 and self.span > 0 and 0 < self.memory < 1):
            raise ConfigError(
                f"{self!r} is no line of costs; give a slope and an intercept of 0 or more, a span over 0 "
                "and a memory between 0 and 1."
            )
        self._sums = [0.0] * 5
        for x in (0.0, self.span):
            self._add(x, self.slope * x + self.intercept)

    def at(self, x: float) -> float:
        """Return the expected seconds at `x`."""
        return self.slope * x + self.intercept

    def learn(self, x: float, seconds: float) -> None:
        """Take in a measurement."""
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
