"""Many steps at once: as long as a batch only decodes, when each step ends is a formula."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable
from math import sqrt
from typing import NamedTuple

from hotswap.backends.sim.batcher import Batcher
from hotswap.backends.sim.sequence import Sequence, Step
from hotswap.hardware import DeviceProfile

__all__ = ["DecodeRun", "num_alike"]


class DecodeRun(NamedTuple):
    """Steps of the same sequences, each one token further: step `i` lasts `first_s + i more_s`.

    Attributes:
        started_s: When the first began, or would have if no sequence had joined or left: that delays all.
        num_steps: How many they are.
        first_s: How long the first lasts from then on.
        more_s: By how much each lasts longer than the one before, for the context has grown.
    """

    started_s: float
    num_steps: int
    first_s: float
    more_s: float

    @classmethod
    def of(cls, step: Step, num_steps: int, started_s: float, profile: DeviceProfile) -> DecodeRun:
        """Return so many steps like this one, on a device."""
        batch = len(step.chunks)
        begun_s = started_s + step.turnover_s(profile)
        return cls(begun_s, num_steps, step.steady_s(profile), batch * profile.context_token_s)

    def end_s(self, num_steps: int) -> float:
        """When that many of them have ended."""
        growth_s = self.more_s * (num_steps * (num_steps - 1) / 2)
        return self.started_s + (num_steps * self.first_s + growth_s)

    def num_ended(self, now_s: float) -> int:
        """How many have, of those before the last."""
        half = self.more_s / 2
        linear_s, passed_s = self.first_s - half, max(0.0, now_s - self.started_s)
        if half:
            ended = int((sqrt(linear_s * linear_s + 4 * half * passed_s) - linear_s) / (2 * half))
        else:
            ended = int(passed_s / self.first_s)
        ended = min(max(ended, 0), self.num_steps - 1)
        while ended and self.end_s(ended) > now_s:
            ended -= 1
        while ended < self.num_steps - 1 and self.end_s(ended + 1) <= now_s:
            ended += 1
        return ended


def num_alike(step: Step, batcher: Batcher, least_left: int) -> int:
    """Return how many steps in a row, this one included, are the same but for their context.

    They are as long as every running sequence decodes, none ends, and there are KV blocks for all. A waiting
    sequence that cannot be admitted now cannot be before one ends, unless the pool may grow (`is_short`).

    Args:
        step: Planned just now, with its blocks taken.
        batcher: The batcher that planned it.
        least_left: Tokens that the first to end still lacks.
    """
    running = batcher.running
    if step.num_tokens != len(running) or len(step.chunks) != len(running) or batcher.is_short:
        return 1

    def missing(num_steps: int) -> int:
        return num_missing(running, num_steps, batcher.block_tokens)

    if missing(least_left) <= batcher.num_free_blocks:
        return least_left
    return max(1, bisect(range(least_left), batcher.num_free_blocks, key=missing) - 1)


def num_missing(running: Iterable[Sequence], num_steps: int, block_tokens: int) -> int:
    """Return the KV blocks that must be added before the last of so many steps of one token each."""
    total = 0
    for sequence in running:
        missing = -(-(sequence.num_cached + num_steps) // block_tokens) - sequence.num_blocks
        if missing > 0:
            total += missing
    return total
