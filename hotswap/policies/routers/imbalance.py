"""When the load of replicas is too uneven for affinity to be worth it."""

from __future__ import annotations

from hotswap.errors import ConfigError

__all__ = ["check_thresholds", "imbalanced"]


def imbalanced(busy: float, idle: float, *, abs_threshold: float, rel_threshold: float) -> bool:
    """Return whether `busy` requests exceed `idle` requests by both thresholds: by difference and by ratio.

    Source: the cache-aware router of SGLang. An infinite threshold is never exceeded.
    """
    return busy - idle > abs_threshold and busy > rel_threshold * idle


def check_thresholds(abs_threshold: float, rel_threshold: float) -> None:
    """Raise `ConfigError` unless both thresholds of `imbalanced` are valid."""
    if not abs_threshold >= 0:
        raise ConfigError(f"abs_threshold is {abs_threshold!r}; give 0 or more requests.")
    if not rel_threshold >= 1:
        raise ConfigError(f"rel_threshold is {rel_threshold!r}; give a ratio of 1 or more.")
