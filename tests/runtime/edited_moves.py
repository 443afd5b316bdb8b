"""A simulated engine of whose moves a test edits one end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from hotswap import Request, RequestId
from hotswap.abc import KVSink, KVSource
from hotswap.backends.sim import SimEngine

__all__ = ["EditedMoves"]


class EditedMoves(SimEngine):
    """Edits the source and the sink of each move, and of each save and restore."""

    def edit_source(self, source: Any) -> None:
        return

    def edit_sink(self, sink: Any) -> None:
        return

    @asynccontextmanager
    async def export_kv(self, request: RequestId) -> AsyncGenerator[KVSource]:
        async with super().export_kv(request) as source:
            self.edit_source(source)
            yield source

    @asynccontextmanager
    async def import_kv(self, request: Request) -> AsyncGenerator[KVSink]:
        async with super().import_kv(request) as sink:
            self.edit_sink(sink)
            yield sink
