"""A look at each turn of the event loop, in real and in virtual time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Generator
from contextlib import contextmanager

from hotswap.offline.virtual_time import VirtualTimeLoop

__all__ = ["TurnLoop", "each_turn"]


class TurnLoop(asyncio.SelectorEventLoop):
    """An event loop in real time that has the hook `on_turn` of `VirtualTimeLoop`."""

    def __init__(self) -> None:
        self.on_turn: Callable[[], bool] | None = None
        super().__init__(_Selector(self))


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: TurnLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._loop.on_turn is not None and self._loop.on_turn():
            timeout = 0
        return super().select(timeout)


@contextmanager
def each_turn(look: Callable[[], None]) -> Generator[None]:
    """Call `look` at the end of each turn of the running event loop while the block runs.

    Raises:
        TypeError: the running loop is neither a `TurnLoop` nor a `VirtualTimeLoop`.
    """
    loop = asyncio.get_running_loop()
    if not isinstance(loop, TurnLoop | VirtualTimeLoop):
        raise TypeError(f"Turns of {loop!r} cannot be seen; let Suite.run use a TurnLoop.")

    def on_turn() -> bool:
        look()
        return False

    loop.on_turn = on_turn
    try:
        yield
    finally:
        loop.on_turn = None
