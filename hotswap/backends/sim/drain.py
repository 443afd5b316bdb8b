"""Waiting until an engine has no request any more."""

from __future__ import annotations

import anyio
from anyio.lowlevel import checkpoint

from hotswap.backends.sim.batcher import Batcher

__all__ = ["Drain"]


class Drain:
    """Waits until a batcher has no sequence."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher, self._empty = batcher, anyio.Event()

    def note(self) -> None:
        """Look whether it has none; called after every change by which the last may have left."""
        if not len(self._batcher):
            self._empty.set()

    async def wait(self, deadline_s: float) -> None:
        """Return when it has none, or after so many seconds."""
        await checkpoint()
        with anyio.move_on_after(deadline_s):
            while len(self._batcher):
                self._empty = anyio.Event()
                await self._empty.wait()
