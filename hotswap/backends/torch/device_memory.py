"""The device memory that an engine may take: a limit of its own, or a lease of a `DeviceBudget`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Literal, TypeAlias

import anyio

from hotswap.device_budget import DeviceBudget, DeviceLease
from hotswap.errors import OutOfMemory
from hotswap.view import InstanceId

__all__ = ["DeviceMemory", "LeasedMemory"]

# How long a preload waits for other engines to give back blocks that no request uses.
_WAIT_S = 5.0

Part: TypeAlias = Literal["weights", "kv"]


class DeviceMemory:
    """The memory of an engine that shares its device by no budget: nothing is leased.

    Attributes:
        changed: Called from any thread when others want memory, or some came free.
    """

    def __init__(self) -> None:
        self.changed: Callable[[], object] = lambda: None

    @contextmanager
    def opened(self, post: Callable[..., None]) -> Generator[None]:
        """Hold a lease while the engine is started.

        Args:
            post: Calls a function on the engine's event loop, from any thread.

        Raises:
            ConfigError: the budget has no such floor, or the engine's name is taken.
            OutOfMemory: other engines have too much of the budget now.
        """
        yield

    async def take_weights(self, size_bytes: int, what: str) -> None:
        """Take memory of weights before it is allocated; waits a few seconds for others to give some back.

        Raises:
            OutOfMemory: they did not.
        """

    def give(self, size_bytes: int) -> None:
        """Give back memory that was freed. Thread-safe."""

    def could_take(self, size_bytes: int, spare_bytes: int) -> bool:
        """Whether there would be room for weights if the engine gave back what it can spare."""
        return True


class LeasedMemory(DeviceMemory):
    """What an engine has of a budget: one lease, of which its event loop takes weights, its thread KV blocks.

    Args:
        engine: The engine's name.
        budget: Of the device.
        floor_bytes: What the engine can always take.
        ceiling_bytes: What it takes at most.

    Attributes:
        floor_bytes: What the engine can always take.
        budget: Of the device.
    """

    def __init__(
        self, engine: InstanceId, budget: DeviceBudget, *, floor_bytes: int, ceiling_bytes: int
    ) -> None:
        super().__init__()
        self.floor_bytes, self.budget = floor_bytes, budget
        self._engine, self._ceiling_bytes = engine, ceiling_bytes
        self._lease: DeviceLease | None = None
        # The lease has one note of what is wanted, and two threads that want something.
        self._lock = threading.Lock()
        self._wanted: dict[Part, int] = {"weights": 0, "kv": 0}
        self._freed = anyio.Event()
        self._post: Callable[..., None] = lambda *call: None

    @contextmanager
    def opened(self, post: Callable[..., None]) -> Generator[None]:
        self._post = post
        lease = self._lease = self.budget.lease(
            self._engine,
            self.floor_bytes,
            self._ceiling_bytes,
            on_wanted=lambda: self.changed(),
            on_free=self._tell_of_free,
        )
        try:
            yield
        finally:
            lease.close()
            self._lease = None

    async def take_weights(self, size_bytes: int, what: str) -> None:
        if self._take("weights", size_bytes):
            return
        try:
            with anyio.move_on_after(_WAIT_S):
                self.changed()  # its own pool may have cached blocks
                while True:
                    self._freed = anyio.Event()
                    if self._take("weights", size_bytes):
                        return
                    await self._freed.wait()
        finally:
            self._want("weights", 0)
        raise OutOfMemory(
            f"{what} take {size_bytes:,} bytes, and {self.budget!r} has {self._held.available_bytes:,} for "
            f"engine {self._engine!r}; raise its floor_bytes, or try again when other engines need less."
        )

    def give(self, size_bytes: int) -> None:
        if self._lease is not None:
            self._lease.give(size_bytes)
            self._freed_here()

    def could_take(self, size_bytes: int, spare_bytes: int) -> bool:
        room = 0 if self._lease is None else self._lease.available_bytes + spare_bytes
        return size_bytes <= room and size_bytes < self.floor_bytes

    # ------------------------------------------------------------------ for the KV pool

    def take_kv(self, size_bytes: int) -> bool:
        """Take memory of KV blocks; if others have it, they are asked for it. On the engine's thread."""
        return self._take("kv", size_bytes)

    def forget_kv(self) -> None:
        """Note that no more KV blocks are wanted."""
        if self._wanted["kv"]:
            self._want("kv", 0)

    @property
    def available_bytes(self) -> int:
        """What could be taken now."""
        return self._held.available_bytes

    @property
    def reachable_bytes(self) -> int:
        """What could be taken if others had no more than their floors."""
        return self._held.reachable_bytes

    @property
    def owed_bytes(self) -> int:
        """What others lack, or weights of the engine itself: the KV pool gives it back if it can."""
        lacking = self._wanted["weights"] - self._held.available_bytes if self._wanted["weights"] else 0
        return max(lacking, self._held.owed_bytes)

    @property
    def is_wanted(self) -> bool:
        """Whether others lack memory, or weights of the engine itself."""
        return bool(self._wanted["weights"] or self._held.others_lack_bytes)

    # ------------------------------------------------------------------ the lease

    @property
    def _held(self) -> DeviceLease:
        assert self._lease is not None, "the engine was entered"
        return self._lease

    def _take(self, part: Part, size_bytes: int) -> bool:
        with self._lock:
            taken = self._held.take(size_bytes)
            self._note(part, 0 if taken else size_bytes)
        return taken

    def _want(self, part: Part, size_bytes: int) -> None:
        with self._lock:
            self._note(part, size_bytes)

    def _note(self, part: Part, size_bytes: int) -> None:
        self._wanted[part] = size_bytes
        wanted = sum(self._wanted.values())
        if wanted != self._held.wanted_bytes:
            self._held.want(wanted)

    def _tell_of_free(self) -> None:
        self.changed()
        self._freed_here()

    def _freed_here(self) -> None:
        if self._wanted["weights"]:
            with suppress(RuntimeError):  # the loop has ended
                self._post(self._wake)

    def _wake(self) -> None:
        self._freed.set()
