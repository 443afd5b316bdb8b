"""How many tokens a step may compute so that whoever decodes waits no longer than they are meant to."""

from __future__ import annotations

__all__ = ["TokenBudget"]

# The weight of the newest step in what is known of steps, and how many deviations are kept from the target.
_GAIN, _DEVIATIONS = 1 / 8, 3
# A single step counts for no more than so many times what was expected: one that was held up is no measure.
_OUTLIER = 2.0
# The budget grows to no more than so many times the largest step it was measured on.
_GROWTH = 2
# Steps whose sizes differ by less than this share say little of what a token more costs.
_DISTINCT = 0.05


class TokenBudget:
    """Finds the token budget at which steps take `target_s` at most, all but about one in a hundred.

    Every request that decodes gets a token with every step, so the time of a step is the inter-token latency.
    A line is fitted to the times of recent full steps by their tokens, and the mean deviation from it is kept
    as TCP keeps that of round trips (Jacobson, Congestion Avoidance and Control, 1988, appendix A). The
    budget is where the line, and three deviations more, meet the target. Where steps were all of one size the
    line is taken to start at nothing, which errs on the safe side while the budget grows.

    A function of what it observed, and of nothing else.

    Args:
        target_s: The longest a step should take.
        least: The smallest budget, held to even where the target cannot be; also the first.
        most: The largest.
    """

    def __init__(self, target_s: float, *, least: int, most: int) -> None:
        self.target_s, self.least, self.most = target_s, least, most
        self.tokens = least
        self._mean_tokens: float = 0.0
        self._mean_s: float = 0.0
        self._deviation_s: float = 0.0
        self._variance: float = 0.0
        self._covariance: float = 0.0

    def observe(self, num_tokens: int, step_s: float) -> None:
        """Learn from a step; one that was neither full nor too slow teaches nothing."""
        if num_tokens < 1 or (num_tokens < self.tokens and step_s <= self.target_s):
            return
        if self._mean_s:
            self._fit(num_tokens, step_s)
        else:
            self._mean_tokens, self._mean_s, self._deviation_s = num_tokens, step_s, step_s / 4
        spare_s = self.target_s - _DEVIATIONS * self._deviation_s - self._mean_s
        affordable = self._mean_tokens + spare_s / max(self._slope, 1e-12)
        highest = min(self.most, max(self.tokens, _GROWTH * num_tokens))
        self.tokens = int(max(self.least, min(affordable, highest)))

    @property
    def _slope(self) -> float:
        """Seconds that one token more costs."""
        whole = self._mean_s / self._mean_tokens
        weight = (_DISTINCT * self._mean_tokens) ** 2
        return min(whole, max(0.0, (self._covariance + weight * whole) / (self._variance + weight)))

    def _fit(self, num_tokens: int, step_s: float) -> None:
        expected_s = max(0.0, self._mean_s + self._slope * (num_tokens - self._mean_tokens))
        step_s = min(step_s, _OUTLIER * max(expected_s, self._mean_s))
        self._deviation_s += _GAIN * (abs(step_s - expected_s) - self._deviation_s)
        more_tokens, more_s = num_tokens - self._mean_tokens, step_s - self._mean_s
        self._mean_tokens += _GAIN * more_tokens
        self._mean_s += _GAIN * more_s
        self._variance = (1 - _GAIN) * (self._variance + _GAIN * more_tokens**2)
        self._covariance = (1 - _GAIN) * (self._covariance + _GAIN * more_tokens * more_s)

    def __repr__(self) -> str:
        return f"<TokenBudget [{self.tokens} of {self.least} to {self.most} tokens in {self.target_s} s]>"
