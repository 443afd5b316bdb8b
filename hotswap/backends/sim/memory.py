"""The device memory of a simulated engine: a size of its own, or a lease of a budget that engines share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager

from hotswap.backends.pool_fields import PoolFields
from hotswap.backends.sim.batcher import Batcher
from hotswap.device_budget import DeviceBudget, DeviceLease
from hotswap.errors import ConfigError, InstanceError, OutOfMemory
from hotswap.hardware import parse_bytes
from hotswap.model import ModelCard
from hotswap.view import InstanceId

__all__ = ["memory_of"]

# While that much is free, a pool grows by this part of the most that it may have, so that it grows seldom.
_GRAIN = 256


class Memory(AbstractContextManager[None], ABC):
    """Accounts for weights and the KV pool; entered while the engine is started.

    Args:
        engine: The engine.
        batcher: Has the KV pool, of the most blocks that it may have.
    """

    def __init__(self, engine: InstanceId, batcher: Batcher) -> None:
        self._engine, self._batcher = engine, batcher

    def __enter__(self) -> None:
        return

    def __exit__(self, *error: object) -> None:
        return

    @abstractmethod
    def can_preload(self, model: ModelCard, weight_bytes: int) -> bool:
        """Whether all weights together may have `weight_bytes`, those of a preloaded model among them."""

    @abstractmethod
    def preload(self, model: ModelCard, weight_bytes: int) -> None:
        """Have room for so many bytes of all weights, those of a model that is preloaded among them.

        Raises:
            OutOfMemory: there is not enough.
        """

    @abstractmethod
    def load(self, model: ModelCard, weight_bytes: int) -> None:
        """Have room for all weights, those of a model that is loaded among them, and for its KV pool.

        Raises:
            OutOfMemory: there is not enough.
        """

    @abstractmethod
    def settle(self, weight_bytes: int, *, serving: bool) -> None:
        """Keep room for so many bytes of weights, and for a KV pool only if a model is served."""

    @abstractmethod
    def num_request_blocks(self, model: ModelCard) -> int:
        """Return how many KV blocks a request of a model may have."""

    def resize(self, num_blocks: int) -> int:
        """Bring the KV pool as near to a size as is possible now; return the size reached.

        Raises:
            InstanceError: it has one size.
        """
        raise InstanceError(f"Engine {self._engine!r} has no device_budget, so its KV pool keeps its size.")

    def status_fields(self) -> PoolFields:
        """Return what a status tells of the pool."""
        return {}

    def _bytes_of_block(self, model: ModelCard) -> int:
        return self._batcher.block_tokens * model.kv_bytes_per_token


class FixedMemory(Memory):
    """So many bytes, and a KV pool of as many blocks as it has.

    Args:
        engine: The engine.
        batcher: Has the KV pool.
        size_bytes: What there is for weights and the KV pool.
    """

    def __init__(self, engine: InstanceId, batcher: Batcher, size_bytes: int) -> None:
        super().__init__(engine, batcher)
        self._size_bytes, self._pool_bytes = size_bytes, 0

    def can_preload(self, model: ModelCard, weight_bytes: int) -> bool:
        alone = model.weight_bytes + self._bytes_of_pool(model)
        return max(weight_bytes + self._pool_bytes, alone) <= self._size_bytes

    def preload(self, model: ModelCard, weight_bytes: int) -> None:
        self._check(model, model.weight_bytes, weight_bytes - model.weight_bytes + self._pool_bytes)

    def load(self, model: ModelCard, weight_bytes: int) -> None:
        pool_bytes = self._bytes_of_pool(model)
        self._check(model, model.weight_bytes + pool_bytes, weight_bytes - model.weight_bytes)
        self._pool_bytes = pool_bytes

    def settle(self, weight_bytes: int, *, serving: bool) -> None:
        self._pool_bytes = self._pool_bytes if serving else 0

    def num_request_blocks(self, model: ModelCard) -> int:
        return self._batcher.num_blocks

    def _bytes_of_pool(self, model: ModelCard) -> int:
        return self._batcher.num_blocks * self._bytes_of_block(model)

    def _check(self, model: ModelCard, size_bytes: int, used_bytes: int) -> None:
        if size_bytes > self._size_bytes - used_bytes:
            raise OutOfMemory(
                f"Model {model.id!r} needs {size_bytes} bytes with its KV pool, but engine {self._engine!r} "
                f"has {self._size_bytes - used_bytes} free. Use a larger device or fewer kv_blocks."
            )


class LeasedMemory(Memory):
    """What an engine holds of a `DeviceBudget`, and the size of its KV pool that follows from it.

    The pool of a model has at least the blocks that fit into the floor beside its weights. It grows when a
    sequence lacks blocks, and gives free ones back when others want memory.

    Args:
        engine: The engine.
        batcher: Has the KV pool, of the most blocks that it may have.
        budget: Of the device.
        floor_bytes: What the engine has in any case, for weights and KV blocks together.
        resized: Called after the pool was resized.
    """

    def __init__(
        self,
        engine: InstanceId,
        batcher: Batcher,
        budget: DeviceBudget,
        floor_bytes: int,
        resized: Callable[[], None],
    ) -> None:
        super().__init__(engine, batcher)
        self._budget, self._floor_bytes, self._resized = budget, floor_bytes, resized
        self._most_blocks = batcher.num_blocks
        self._lease: DeviceLease | None = None
        self._weight_bytes = self._block_bytes = 0
        batcher.on_short = self._grow
        batcher.least_blocks = 0
        batcher.resize(0)

    def __enter__(self) -> None:
        """Open the lease.

        Raises:
            ConfigError: the budget is too small for the floor.
            OutOfMemory: others have too much of it now.
        """
        self._lease = self._budget.lease(self._engine, self._floor_bytes, on_wanted=self._give_unwanted)

    def __exit__(self, *error: object) -> None:
        self._held.close()
        self._lease = None

    def can_preload(self, model: ModelCard, weight_bytes: int) -> bool:
        fits = self.num_request_blocks(model) > 0
        return fits and weight_bytes - self._weight_bytes <= self._held.available_bytes

    def preload(self, model: ModelCard, weight_bytes: int) -> None:
        self._hold_weights(weight_bytes)

    def load(self, model: ModelCard, weight_bytes: int) -> None:
        self._hold_weights(weight_bytes)
        self._block_bytes = self._bytes_of_block(model)
        least = self.num_request_blocks(model)
        size = max(least, self._batcher.num_blocks)  # of moves that do not know yet that they have failed
        if not least or not self._held.take(size * self._block_bytes):
            raise OutOfMemory(
                f"Model {model.id!r} has {model.weight_bytes} bytes of weights, and no KV block fits beside "
                f"them into the {self._floor_bytes} bytes that engine {self._engine!r} has in any case; "
                "raise its floor_bytes."
            )
        self._batcher.least_blocks, self._batcher.most_blocks = least, max(size, self._num_reachable())
        self._batcher.resize(size)

    def settle(self, weight_bytes: int, *, serving: bool) -> None:
        if not serving:
            self._held.give(self._batcher.num_blocks * self._block_bytes)
            self._batcher.least_blocks = self._block_bytes = 0
            self._batcher.resize(0)
        self._hold_weights(weight_bytes)

    def num_request_blocks(self, model: ModelCard) -> int:
        room, block_bytes = self._floor_bytes - model.weight_bytes, self._bytes_of_block(model)
        return min(self._most_blocks, max(0, room) // block_bytes) if block_bytes else self._most_blocks

    def resize(self, num_blocks: int) -> int:
        batcher = self._batcher
        wanted = max(batcher.least_blocks, min(num_blocks, batcher.most_blocks))
        if wanted < batcher.num_blocks:
            self._shrink(wanted)
        elif not self._take(wanted - batcher.num_blocks):
            self._take(self._num_available())
        return batcher.num_blocks

    def status_fields(self) -> PoolFields:
        least = self._batcher.least_blocks
        return {
            "request_kv_blocks": least,
            "least_kv_blocks": least,
            "most_kv_blocks": self._batcher.most_blocks,
            "kv_block_bytes": self._block_bytes,
            "device_budget": self._budget.name,
        }

    @property
    def _held(self) -> DeviceLease:
        assert self._lease is not None, "only a started engine has memory"
        return self._lease

    def _hold_weights(self, weight_bytes: int) -> None:
        more = weight_bytes - self._weight_bytes
        if more > 0 and not self._held.take(more):
            raise OutOfMemory(
                f"Engine {self._engine!r} needs {more} bytes more for weights, and its device has "
                f"{self._held.available_bytes} for it. Raise its floor_bytes, or wait until others need less."
            )
        if more < 0:
            self._held.give(-more)
        self._weight_bytes = weight_bytes

    def _num_reachable(self) -> int:
        """Return how many blocks the pool could have if others had no more than their floors."""
        if not self._block_bytes:
            return self._most_blocks
        held_by_pool = self._held.held_bytes - self._weight_bytes
        return min(self._most_blocks, (held_by_pool + self._held.reachable_bytes) // self._block_bytes)

    def _num_available(self) -> int:
        room = self._batcher.most_blocks - self._batcher.num_blocks
        return min(room, self._held.available_bytes // self._block_bytes) if self._block_bytes else room

    def _grow(self, missing: int) -> None:
        """Grow for a sequence, further than it needs where that takes nothing from others."""
        grain = max(missing, self._most_blocks // _GRAIN)
        if not self._take(grain if grain <= self._num_available() else missing):
            self._held.want(0)  # the next step asks again, if it still lacks them

    def _take(self, num_blocks: int) -> bool:
        room = self._batcher.most_blocks - self._batcher.num_blocks
        if not 0 < num_blocks <= room or not self._held.take(num_blocks * self._block_bytes):
            return False
        self._batcher.resize(self._batcher.num_blocks + num_blocks)
        self._resized()
        return True

    def _shrink(self, num_blocks: int) -> None:
        before = self._batcher.num_blocks
        self._batcher.resize(num_blocks)
        self._resized()
        self._held.give((before - self._batcher.num_blocks) * self._block_bytes)

    def _give_unwanted(self) -> None:
        """Give blocks that are free to others that lack memory."""
        if self._block_bytes:
            self._batcher.on_change()  # counts are as of now from here on
            num_owed = -(-self._held.owed_bytes // self._block_bytes)
            num_given = min(num_owed, self._batcher.num_unwanted_blocks)
            if num_given:
                self._shrink(self._batcher.num_blocks - num_given)


def memory_of(
    engine: InstanceId,
    batcher: Batcher,
    size_bytes: int,
    budget: DeviceBudget | None,
    floor_bytes: int | str,
    resized: Callable[[], None],
) -> Memory:
    """Return the memory of an engine: `size_bytes` of its own, or of a budget where it has one.

    Raises:
        ConfigError: the floor is no size, or the budget is shared by several processes.
    """
    if budget is None:
        return FixedMemory(engine, batcher, size_bytes)
    if type(budget) is not DeviceBudget:  # others call holders from threads
        raise ConfigError(f"device_budget is {budget!r}; give simulated engines a DeviceBudget.")
    return LeasedMemory(engine, batcher, budget, parse_bytes(floor_bytes, "floor_bytes"), resized)
