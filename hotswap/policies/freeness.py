"""Llumnix's measure of load: the freeness of an instance, from the virtual usage of its requests."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from math import inf
from typing import Literal, TypeAlias

from hotswap.errors import ConfigError
from hotswap.view import InstanceState, InstanceView

__all__ = ["Freeness", "Reading", "VirtualUsage", "is_terminating"]

Reading: TypeAlias = Literal["paper", "artifact"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualUsage:
    """What the requests of one instance count for, in KV blocks, by the reason for which they count.

    Attributes:
        physical: What requests hold, and under `"artifact"` the watermark.
        queuing: What requests that wait need, as far as they count.
        headroom: What is kept free for the sake of requests of high priority, over what they hold.
        fake: Infinite for an instance that terminates, else 0.
    """

    physical: float = 0.0
    queuing: float = 0.0
    headroom: float = 0.0
    fake: float = 0.0

    @property
    def total(self) -> float:
        """Their sum."""
        return self.physical + self.queuing + self.headroom + self.fake


@dataclass(frozen=True, slots=True)
class Freeness:
    """How free an instance is: the room that its virtual usage leaves, over the requests that fill it.

    Source: Sun et al., Llumnix, OSDI 2024, arXiv:2406.03243, section 4.4, Algorithm 1. With M the KV blocks
    of an instance, V the virtual usage of each of its requests and B its batch:

        V(r) = demand of r                   r waits, and is the first who does
               0                             r waits behind another
               infinite                      r is the fake request of an instance that terminates
               held by r + headroom / n      r runs, with n others of its priority; headroom 0 if normal
        F    = (M - sum of V) / B

    **Unit.** KV blocks per request, as the artifact's thresholds are (3, 10, 60). A request fills a block in
    `kv_block_tokens` steps, so times that it is the number of decode steps until memory runs out. Below 0
    somebody waits for memory, or requests of high priority lack their room. It is infinite for an instance
    without a request, and minus infinity for one that terminates.

    **Headroom.** A request of high priority (over 0 here; the paper has two classes) is to run on an instance
    that holds no more than `target_tokens`, at which it decodes undisturbed: the artifact's number is 1600.
    So the headroom is M less that, shared by all who are of high priority; `None` keeps none.

    **Readings.**

    - `"paper"`: as above. B is not said for an instance where somebody waits and nobody runs; 1 here.
    - `"artifact"`: the rules of the branch that reproduces the paper's figures. A share `watermark` of M is
      kept free, and *all* who wait count with what they need. B is running and waiting requests for
      `dispatch`, and for moves those that run, and one more if anybody waits. To dispatch a request of
      high priority the headroom counts where nobody else of high priority is, so that they keep together.

    **What a view cannot say.** Of all who wait it has the tokens to be computed, not the blocks of each, so
    rounding up is left out, and what is left of a prompt that runs counts with them. A request that its
    engine has not told of yet needs nothing, and counts in B, but not in the artifact's: there many that come
    at once go to one instance. Engines that say nothing of KV blocks have F = 0.
    """

    reading: Reading = "paper"
    _: KW_ONLY
    target_tokens: int | None = 1600
    watermark: float = 0.01

    def __post_init__(self) -> None:
        if self.reading not in ("paper", "artifact"):
            raise ConfigError(f"reading is {self.reading!r}; give 'paper' or 'artifact'.")
        if self.target_tokens is not None and self.target_tokens < 0:
            raise ConfigError(f"target_tokens is {self.target_tokens!r}; give 0 or more, or None for off.")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark is {self.watermark!r}; give a share of all blocks, 0 to below 1.")

    def of(self, instance: InstanceView, *, dispatch: bool = False, high: bool = False) -> float:
        """Return F of an instance, as seen for `dispatch` or for moves: the readings may differ in B.

        `high` is whether a request of high priority is to be dispatched, for which they may differ in V.
        """
        usage, batch = self.usage(instance, high=high), self.batch(instance, dispatch=dispatch)
        if usage.fake:
            return -inf
        return (instance.num_kv_blocks - usage.total) / batch if batch else inf

    def usage(self, instance: InstanceView, *, high: bool = False) -> VirtualUsage:
        """Return the sum of V over the requests of an instance, by its parts."""
        held = instance.num_kv_blocks - instance.num_free_kv_blocks
        kept = instance.num_high_priority > 0
        if high and self.reading == "artifact":
            kept = not kept
        return VirtualUsage(
            physical=held + self.reserve(instance),
            queuing=self._queuing(instance),
            headroom=self.headroom(instance) if kept else 0,
            fake=inf if is_terminating(instance) else 0,
        )

    def batch(self, instance: InstanceView, *, dispatch: bool = False) -> int:
        """Return B of an instance."""
        if self.reading == "artifact":
            return instance.num_running + (instance.num_waiting if dispatch else min(instance.num_waiting, 1))
        running = max(instance.num_requests - instance.num_waiting, instance.num_running)
        return max(running, min(instance.num_waiting, 1))

    def headroom(self, instance: InstanceView) -> float:
        """Return the blocks that all requests of high priority together would keep free on an instance."""
        if self.target_tokens is None:
            return 0
        return max(0, instance.num_kv_blocks - self.target_tokens // instance.kv_block_tokens)

    def reserve(self, instance: InstanceView) -> int:
        """Return the blocks that are kept free whoever runs."""
        return int(self.watermark * instance.num_kv_blocks) if self.reading == "artifact" else 0

    def _queuing(self, instance: InstanceView) -> int:
        if not instance.num_waiting:
            return 0
        if self.reading == "paper":
            return instance.num_next_kv_blocks
        all_blocks = -(-instance.num_prefill_tokens // instance.kv_block_tokens)
        return max(all_blocks, instance.num_next_kv_blocks)


def is_terminating(instance: InstanceView) -> bool:
    """Whether an instance is being emptied of what it serves: drained, unloaded, or swapped away."""
    leaving = instance.swapping and instance.target != instance.model
    return leaving or instance.draining or instance.state is InstanceState.DRAINING
