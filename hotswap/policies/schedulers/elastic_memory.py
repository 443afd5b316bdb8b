"""Moving KV memory between the instances that share a device, to where requests wait for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hotswap.action import Action, Resize, Swap, Unload
from hotswap.argument_kinds import check_arguments
from hotswap.errors import ConfigError
from hotswap.scheduler import Scheduler
from hotswap.view import FleetView, InstanceView

__all__ = ["ElasticMemory"]


@check_arguments
@dataclass(frozen=True, slots=True)
class ElasticMemory(Scheduler):
    """Plans what another scheduler plans, and moves KV memory to instances whose queues lack KV blocks.

    Engines under one `DeviceBudget` lend each other free blocks by themselves. This rule is for the time in
    which no block is free: the engine that was busy first would keep all that it has above its floor for as
    long as it has a queue, however long the queue of another is.

        demand    KV blocks in use, one more for each running request, and for each waiting request as many as
                  a running one has in the mean
        share     of the KV memory of a device, max-min fair: no more than the demand, no less than the floor
        move      to an instance whose first waiting request lacks blocks, up to its share, from those that
                  have more than theirs; unless that is less than `least_part` of the memory

    An instance that shrinks gives free blocks first; then the requests that it admitted last wait again, and
    compute again what they had. So at most `most_part` of the memory moves in one plan.

    **Ours:** the whole rule. Max-min fairness has the usual meaning (Bertsekas and Gallager, Data Networks,
    section 6.5.2). Instances that the other scheduler swaps or unloads, or that are being swapped, keep what
    they have.

    **What to set.** Nothing at first. `least_part` is what a preemption must be worth; a larger `most_part`
    follows load sooner and preempts more at once.
    """

    scheduler: Scheduler
    least_part: float = 1 / 32
    most_part: float = 1 / 4

    def __post_init__(self) -> None:
        if not 0 <= self.least_part <= self.most_part <= 1 or not self.most_part:
            raise ConfigError(
                f"least_part is {self.least_part!r} and most_part {self.most_part!r}; give parts of the "
                "memory from 0 to 1, the first no larger than the second."
            )

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        actions = tuple(self.scheduler.plan(fleet))
        taken = {action.instance for action in actions if isinstance(action, Swap | Unload)}
        devices: dict[tuple[str, str], list[_Pool]] = {}
        for instance in fleet.instances:
            if _is_elastic(instance) and instance.id not in taken:
                devices.setdefault((instance.node, instance.device_budget), []).append(_Pool.of(instance))
        return (*actions, *(resize for pools in devices.values() for resize in self._resizes(pools)))

    def _resizes(self, pools: Sequence[_Pool]) -> Iterator[Resize]:
        """Yield the resizes of one device, those that give first."""
        if len(pools) < 2 or not any(pool.is_short for pool in pools):
            return
        total = sum(pool.held_bytes for pool in pools)
        level = _level(total, pools)
        lacking = [(pool.share(level) - pool.held_bytes, pool) for pool in pools if pool.is_short]
        spare = [(pool.held_bytes - pool.share(level), pool) for pool in pools]
        moved = min(_positive(lacking), _positive(spare), int(self.most_part * total))
        if moved < max(1, self.least_part * total):
            return
        yield from _changes(spare, moved, -1, "others lack KV blocks")
        yield from _changes(lacking, moved, 1, "its queue lacks KV blocks")


@dataclass(frozen=True, slots=True)
class _Pool:
    """The KV memory of one instance, in bytes."""

    instance: InstanceView
    held_bytes: int
    least_bytes: int
    wanted_bytes: int  # at least the least
    is_short: bool

    @classmethod
    def of(cls, instance: InstanceView) -> _Pool:
        used = instance.num_kv_blocks - instance.num_free_kv_blocks
        each = max(instance.num_next_kv_blocks, -(-used // max(1, instance.num_running)))
        demand = used + instance.num_running + instance.num_waiting * each
        wanted = min(instance.most_kv_blocks, max(instance.least_kv_blocks, demand))
        size = instance.kv_block_bytes
        is_short = instance.num_next_kv_blocks > instance.num_free_kv_blocks
        held = instance.num_kv_blocks
        return cls(instance, held * size, instance.least_kv_blocks * size, wanted * size, is_short)

    def share(self, level: int) -> int:
        return max(self.least_bytes, min(self.wanted_bytes, level))


def _is_elastic(instance: InstanceView) -> bool:
    resizable = instance.kv_block_bytes > 0 and instance.most_kv_blocks > 0
    return resizable and instance.free and instance.hosted is not None and bool(instance.device_budget)


def _level(total: int, pools: Sequence[_Pool]) -> int:
    """Return the highest level at which the shares together are no more than the total."""
    low, high = 0, total
    while low < high:
        middle = (low + high + 1) // 2
        if sum(pool.share(middle) for pool in pools) <= total:
            low = middle
        else:
            high = middle - 1
    return low


def _positive(amounts: Sequence[tuple[int, _Pool]]) -> int:
    return sum(amount for amount, _ in amounts if amount > 0)


def _changes(amounts: Sequence[tuple[int, _Pool]], moved: int, sign: int, reason: str) -> Iterator[Resize]:
    """Share so many bytes out, the largest amount first."""
    for amount, pool in sorted(amounts, key=lambda each: (-each[0], each[1].instance.id)):
        size, part = pool.instance.kv_block_bytes, max(0, min(amount, moved))
        num_blocks = part // size if sign > 0 else min(-(-part // size), max(0, amount) // size)
        if num_blocks:
            moved -= num_blocks * size
            kv_blocks = pool.instance.num_kv_blocks + sign * num_blocks
            yield Resize(instance=pool.instance.id, kv_blocks=kv_blocks, reason=reason)
