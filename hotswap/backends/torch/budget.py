"""A controller that finds the token budget of steps for a target inter-token latency."""

from __future__ import annotations

__all__ = ["TokenBudget"]

# The weight of the newest step in the moving averages, and the margin to the target in mean deviations.
_GAIN, _DEVIATIONS = 1 / 8, 3
# The time of a single step is capped at this multiple of the expected one, so that outliers have no effect.
_OUTLIER = 2.0
# The budget grows to at most this multiple of the size of the step just measured.
_GROWTH = 2
# Relative differences of step sizes below this give little evidence of the time per token.
_DISTINCT = 0.05


class TokenBudget:
    """Finds the token budget at which about 99 % of the steps take `target_s` or less.

    Every decoding request gets one token per step, so the time of a step is the inter-token latency. The
    controller fits a line to the times of recent full steps over their token counts, and keeps the mean
    deviation from it as TCP does for round-trip times (Jacobson, Congestion Avoidance and Control, 1988,
    appendix A). The budget is the token count at which the line plus three deviations reaches the target. If
    all steps had one size, the line is assumed to pass through zero, which underestimates the budget while it
    grows.

    Deterministic: the budget depends on the observed steps only.

    Args:
        target_s: The target time of a step, in seconds.
        min_tokens: The smallest budget and the first one; used even if it misses the target.
        max_tokens: The largest budget.
    """

    def __init__(self, target_s: float, *, min_tokens: int, max_tokens: int) -> None:
        self.target_s, self.min_tokens, self.max_tokens = target_s, min_tokens, max_tokens
        self.tokens = min_tokens
        self._mean_tokens: float = 0.0
        self._mean_s: float = 0.0
        self._deviation_s: float = 0.0
        self._variance: float = 0.0
        self._covariance: float = 0.0

    def limit(self, tokens: int) -> None:
        """Have the budget be no larger than so many tokens from now on."""
        self.max_tokens = max(self.min_tokens, min(self.max_tokens, tokens))
        self.tokens = min(self.tokens, self.max_tokens)

    def observe(self, num_tokens: int, step_s: float) -> None:
        """Update the budget by the time of a step; steps that are neither full nor too slow are ignored."""
        if num_tokens < 1 or (num_tokens < self.tokens and step_s <= self.target_s):
            return
        if self._mean_s:
            self._fit(num_tokens, step_s)
        else:
            self._mean_tokens, self._mean_s, self._deviation_s = num_tokens, step_s, step_s / 4
        spare_s = self.target_s - _DEVIATIONS * self._deviation_s - self._mean_s
        affordable = self._mean_tokens + spare_s / max(self._slope, 1e-12)
        highest = min(self.max_tokens, max(self.tokens, _GROWTH * num_tokens))
        self.tokens = int(max(self.min_tokens, min(affordable, highest)))

    @property
    def _slope(self) -> float:
        """Seconds per additional token."""
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
        return (
            f"<TokenBudget [{self.tokens} tokens, {self.min_tokens} to {self.max_tokens}, {self.target_s} s]>"
        )
