"""The state of an engine, and the interruption of pending verbs when the engine is lost."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

import anyio

from hotswap.backends.notifier import Observed, StatusNotifier
from hotswap.errors import InstanceError, InstanceLost
from hotswap.view import InstanceId, InstanceState

__all__ = ["Life"]

_T = TypeVar("_T")


class Life:
    """One engine's state, which only its event loop changes.

    Args:
        id: The engine's.
        notifier: Told of each change.

    Attributes:
        state: The engine's, as its status has it.
        has_begun: Whether the engine was started by `async with`.
    """

    state = Observed[InstanceState](lambda life: life.notifier.state_changed())

    def __init__(self, id: InstanceId, notifier: StatusNotifier) -> None:
        self.notifier = notifier
        self.state = InstanceState.EMPTY
        self.has_begun = False
        self._id = id
        self._because = ""
        self._cause: Exception | None = None
        self._verbs: set[anyio.CancelScope] = set()

    @property
    def is_lost(self) -> bool:
        """Whether the engine is LOST; may turn true during any await."""
        return self.state is InstanceState.LOST

    @property
    def lost_because(self) -> str:
        """Why it is lost; "" while it is not."""
        return self._because if self.is_lost else ""

    def require(self, state: InstanceState, verb: str) -> None:
        """Raise `InstanceLost` or `InstanceError` if the engine is not in the state that a verb needs."""
        self.refuse_if_lost()
        if not self.has_begun:
            raise InstanceError(f"Engine {self._id!r} cannot {verb} before `async with` has started it.")
        if self.state is not state:
            raise InstanceError(
                f"Engine {self._id!r} is {self.state}; it can {verb} only while it is {state}."
            )

    def lose(self, because: str, cause: Exception | None) -> None:
        """Become LOST, and interrupt the pending verbs."""
        self._because, self._cause = because, cause
        self.state = InstanceState.LOST
        for scope in self._verbs:
            scope.cancel()

    def lost(self) -> InstanceLost:
        """Return a new `InstanceLost` that says why."""
        error = InstanceLost(f"Engine {self._id!r} is lost: {self._because}. Unload it to bring it back.")
        error.__cause__ = self._cause
        return error

    def refuse_if_lost(self) -> None:
        """Raise `InstanceLost` if the engine is."""
        if self.is_lost:
            raise self.lost()

    async def unless_lost(self, work: Awaitable[_T]) -> _T:
        """Return what `work` returns; interrupt it with `InstanceLost` when the engine is lost meanwhile."""
        with anyio.CancelScope() as scope:
            self._verbs.add(scope)
            try:
                return await work
            finally:
                self._verbs.discard(scope)
        raise self.lost()
