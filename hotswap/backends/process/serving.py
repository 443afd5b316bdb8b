"""What a child process does: it makes an engine and a store, and serves them over shared memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, Protocol, TypeAlias

import anyio

from hotswap.backends.nodes import LinkedStore
from hotswap.backends.remote import EngineHost, SharedPeers
from hotswap.backends.transports import connect_shared, serve_shared
from hotswap.engine import Engine
from hotswap.store import WeightStore

__all__ = ["EngineMaker", "ServeEngine", "StoreMaker"]

log = logging.getLogger("hotswap")

EngineMaker: TypeAlias = Callable[[], Engine]
StoreMaker: TypeAlias = Callable[[], WeightStore]


class _Parent(Protocol):
    """What `program.Parent` is."""

    input: BinaryIO

    def tell(self, **what: object) -> None: ...

    def end_after(self, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeEngine:
    """The task of a child process; it is pickled.

    Attributes:
        name: Of the engine.
        make_engine: Makes the engine.
        make_store: Makes the store that it reads; `None` for the store of the parent.
        path: Where the engine is served.
        store_path: Where the parent serves its store.
        silence_s: The limit of the link.
        end_s: The time that the engine and its store have to end.
    """

    name: str
    make_engine: EngineMaker
    make_store: StoreMaker | None
    path: str
    store_path: str
    silence_s: float
    end_s: float

    def __call__(self, parent: _Parent) -> None:
        """Serve until the parent wants no more."""
        logging.basicConfig(
            level=logging.WARNING, format=f"[{self.name}] %(levelname)s %(name)s: %(message)s"
        )
        anyio.run(self._serve, parent)

    async def _serve(self, parent: _Parent) -> None:
        try:
            store, engine = self._make_store(), self.make_engine()
        except Exception as exc:
            log.exception("Engine %r cannot be made.", self.name)
            parent.tell(error=f"{type(exc).__name__}: {exc}")
            return
        async with anyio.create_task_group() as waiting:
            waiting.start_soon(self._end_with_parent, parent, waiting.cancel_scope)
            async with AsyncExitStack() as entered:
                try:
                    await entered.enter_async_context(store)
                    await entered.enter_async_context(engine)
                except Exception as exc:
                    log.exception("Engine %r cannot be started.", self.name)
                    parent.tell(error=f"{type(exc).__name__}: {exc}")
                    waiting.cancel_scope.cancel()
                    return
                links = await entered.enter_async_context(anyio.create_task_group())
                host = EngineHost(engine, store, silence_s=self.silence_s)
                await links.start(serve_shared, host.serve, self.path)
                host.peers = SharedPeers(self.path)
                parent.tell(serves=self.path)
                await anyio.sleep_forever()

    def _make_store(self) -> WeightStore:
        if self.make_store is not None:
            return self.make_store()
        return LinkedStore("the fleet", partial(connect_shared, self.store_path), silence_s=self.silence_s)

    async def _end_with_parent(self, parent: _Parent, scope: anyio.CancelScope) -> None:
        await anyio.wait_readable(parent.input)  # a thread would keep a process from ending that fails
        parent.end_after(self.end_s)
        scope.cancel()
