"""How an engine tells its listener that its status has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hotswap.engine import StatusListener

__all__ = ["Observed", "StatusNotifier"]

_T = TypeVar("_T")


class StatusNotifier:
    """Passes changes on to the listener of an engine, once there is one; is a `StatusListener` itself.

    The parts of an engine share one, and call it where they change what `Engine.status` shows.
    """

    def __init__(self) -> None:
        self._listener: StatusListener | None = None

    def watch(self, listener: StatusListener) -> bool:
        """Call this listener from now on; see `Engine.watch`."""
        self._listener = listener
        return True

    def load_changed(self) -> None:
        """See `StatusListener`."""
        if self._listener is not None:
            self._listener.load_changed()

    def state_changed(self) -> None:
        """See `StatusListener`."""
        if self._listener is not None:
            self._listener.state_changed()


class Observed(Generic[_T]):
    """An attribute that has a function called with its owner after each assignment.

    Args:
        changed: The function.
    """

    def __init__(self, changed: Callable[[Any], None]) -> None:
        self._changed = changed

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    if TYPE_CHECKING:
        # Without it an assigned value is read like any other attribute, without a call of Python.
        def __get__(self, of: object, owner: type[Any]) -> _T: ...

    def __set__(self, of: object, value: _T) -> None:
        of.__dict__[self._name] = value
        self._changed(of)
