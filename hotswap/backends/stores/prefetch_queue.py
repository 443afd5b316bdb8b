"""The order of prefetches from one tier into host memory, and their priority below loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import anyio

from hotswap.request import ModelId

__all__ = ["PrefetchQueue"]


@dataclass(slots=True, eq=False)
class _Waiter:
    model: ModelId
    priority: int
    admitted: anyio.Event = field(default_factory=anyio.Event)


class PrefetchQueue:
    """Admits prefetches from one tier: `width` models at a time, and none while a load reads from it.

    The highest priority is admitted first, then the longest wait. Loads never wait. A prefetch of a model
    that is being loaded or prefetched already is admitted at once: it adds no reads.
    """

    def __init__(self, width: int = 1) -> None:
        self._width = width
        self._prefetching: Counter[ModelId] = Counter()
        self._loading: Counter[ModelId] = Counter()
        self._waiting: list[_Waiter] = []

    @property
    def waiting(self) -> tuple[ModelId, ...]:
        """The models that wait, in the order of their admission as it stands."""
        return tuple(waiter.model for waiter in self._in_order())

    @asynccontextmanager
    async def turn(self, model: ModelId, priority: int) -> AsyncGenerator[None]:
        """Wait for a prefetch's turn, and keep it while the block runs; a cancellation passes it on."""
        waiter = _Waiter(model, priority)
        self._waiting.append(waiter)
        self._admit()
        try:
            await waiter.admitted.wait()
            yield
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:
                _subtract(self._prefetching, model)
            self._admit()

    @contextmanager
    def load(self, model: ModelId) -> Generator[None]:
        """Count a load while the block runs; prefetches of the same model are admitted, others wait."""
        self._loading[model] += 1
        self._admit()
        try:
            yield
        finally:
            _subtract(self._loading, model)
            self._admit()

    def _admit(self) -> None:
        for waiter in self._in_order():
            if self._is_admissible(waiter.model):
                self._waiting.remove(waiter)
                self._prefetching[waiter.model] += 1
                waiter.admitted.set()

    def _is_admissible(self, model: ModelId) -> bool:
        if model in self._prefetching or model in self._loading:
            return True
        return not self._loading and len(self._prefetching) < self._width

    def _in_order(self) -> list[_Waiter]:
        return sorted(self._waiting, key=lambda waiter: -waiter.priority)


def _subtract(counter: Counter[ModelId], model: ModelId) -> None:
    counter[model] -= 1
    if not counter[model]:
        del counter[model]
