"""Llumnix's measure of load: the freeness of an instance, from the virtual usage of its requests."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from math import inf
from typing import Literal, TypeAlias

from hotswap.argument_kinds import check_arguments
from hotswap.errors import ConfigError
from hotswap.view import InstanceState, InstanceView

__all__ = ["Freeness", "FreenessReading", "VirtualUsage", "is_terminating"]

FreenessReading: TypeAlias = Literal["paper", "artifact"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualUsage:
    """The virtual usage of one instance in KV blocks, by its parts.

    Attributes:
        physical: Blocks that requests hold, and with `"artifact"` the watermark.
        queuing: Blocks that waiting requests need, as far as these count.
        headroom: Blocks kept free for requests of high priority, besides those that they hold.
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


@check_arguments
@dataclass(frozen=True, slots=True)
class Freeness:
    """The freeness of an instance: the KV blocks that its virtual usage leaves, per request of its batch.

    Source: Sun et al., Llumnix, OSDI 2024, arXiv:2406.03243, section 4.4, Algorithm 1. With M the KV blocks
    of an instance, V the virtual usage of each of its requests and B its batch:

        V(r) = demand of r                   r waits, and is the head of the queue
               0                             r waits behind another request
               infinite                      r is the fake request of an instance that terminates
               held by r + headroom / n      r runs, with n others of its priority; headroom 0 if normal
        F    = (M - sum of V) / B

    **Unit.** KV blocks per request, as the artifact's thresholds (3, 10, 60). A request fills a block in
    `kv_block_tokens` steps, so F times `kv_block_tokens` is the number of decode steps until memory runs out.
    Below 0 a request waits for memory, or requests of high priority lack their headroom. F is infinite for an
    instance without a request, and minus infinity for one that terminates.

    **Headroom.** A request of high priority (over 0 here; the paper has two classes) is to run on an instance
    that holds at most `target_tokens`, at which it decodes undisturbed: 1600 in the artifact. So the headroom
    is M less that, shared by all requests of high priority; `None` keeps no headroom.

    **Readings.**

    - `"paper"`: as above. The paper does not define B for an instance with waiting and no running requests;
      here it is 1.
    - `"artifact"`: the rules of the branch that reproduces the paper's figures. A share `watermark` of M is
      kept free, and *all* waiting requests count with the blocks that they need. B is running and waiting
      requests for `dispatch`; for moves it is running requests, plus one if any request waits. To dispatch a
      request of high priority the headroom counts where no other request of high priority is, so that these
      share instances.

    **Limits of a view.** A view has the tokens that all waiting requests must compute, not the blocks of
    each, so rounding up is left out, and the rest of a running prompt is included. A request that its engine
    has not seen yet needs no blocks and counts in B, but not in the artifact's B: there, requests that come
    together go to one instance. Engines that do not report KV blocks have F = 0.
    """

    reading: FreenessReading = "paper"
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
        """Return F of an instance for `dispatch` or for moves, which differ in B in the artifact's reading.

        `high` is whether a request of high priority is to be dispatched, for which V differs in that reading.
        """
        usage, batch = self.usage(instance, high=high), self.batch(instance, dispatch=dispatch)
        if usage.fake:
            return -inf
        return (instance.num_kv_blocks - usage.total) / batch if batch else inf

    def usage(self, instance: InstanceView, *, high: bool = False) -> VirtualUsage:
        """Return the virtual usage of an instance: the sum of V over its requests, by its parts."""
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
        """Return the blocks that requests of high priority together keep free on an instance."""
        if self.target_tokens is None:
            return 0
        return max(0, instance.num_kv_blocks - self.target_tokens // instance.kv_block_tokens)

    def reserve(self, instance: InstanceView) -> int:
        """Return the blocks that are kept free in any case: the artifact's watermark."""
        return int(self.watermark * instance.num_kv_blocks) if self.reading == "artifact" else 0

    def _queuing(self, instance: InstanceView) -> int:
        if not instance.num_waiting:
            return 0
        if self.reading == "paper":
            return instance.num_next_kv_blocks
        all_blocks = -(-instance.num_prefill_tokens // instance.kv_block_tokens)
        return max(all_blocks, instance.num_next_kv_blocks)


def is_terminating(instance: InstanceView) -> bool:
    """Whether an instance is being emptied of its model's requests: drained, unloaded or swapped away."""
    leaving = instance.swapping and instance.target != instance.model
    return leaving or instance.draining or instance.state is InstanceState.DRAINING
