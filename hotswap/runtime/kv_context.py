"""What saving and restoring share: the store, and the names of blocks in it."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from hotswap import telemetry as tm
from hotswap.errors import InstanceLost, MigrationAborted
from hotswap.kv_store import KVPrefix, KVStore
from hotswap.migration import KVLayout
from hotswap.request import AdapterId, ModelId
from hotswap.runtime.state import FleetState
from hotswap.telemetry import Telemetry

__all__ = ["AHEAD", "CHUNK_BYTES", "KVContext", "logged"]

log = logging.getLogger("hotswap")

# Copied at once: a sink takes so much while its engine computes a step.
CHUNK_BYTES = 4 << 20
AHEAD = "saved ahead"
# Layouts are remembered of so many pairs of a model and a version of an adapter.
_MOST_LAYOUTS = 4096


class KVContext:
    """A fleet's store of KV blocks, and what tells the blocks of one request from those of another.

    Args:
        state: Of the fleet.
        store: Keeps the blocks.
        telemetry: Records spans and metrics.
        fleet: Tells its versions of adapters from those of other fleets.
    """

    def __init__(self, state: FleetState, store: KVStore, telemetry: Telemetry, *, fleet: str) -> None:
        self.state, self.store, self.telemetry = state, store, telemetry
        self._fleet = fleet
        self._layouts: dict[tuple[ModelId, AdapterId | None], KVLayout] = {}

    @property
    def tier(self) -> str:
        """What the store is called in spans and metrics."""
        return self.state.kv_views.tier

    def layout(self, model: ModelId, adapter: AdapterId | None) -> KVLayout | None:
        """Return the layout that blocks of a model had last; `None` if none were saved or restored."""
        return self._layouts.get((model, adapter))

    def prefix(self, layout: KVLayout, tokens: Sequence[int]) -> KVPrefix:
        """Return the name of tokens in the store; the layout is remembered for look-ups."""
        if len(self._layouts) >= _MOST_LAYOUTS:
            self._layouts.clear()
        self._layouts[layout.model, layout.adapter] = layout
        return KVPrefix(layout, tokens, salt="" if layout.adapter is None else self._fleet)


@contextmanager
def logged(what: str, of: str) -> Generator[None]:
    """Log why something of a request or an instance was not done; it goes on without."""
    try:
        yield
    except (MigrationAborted, InstanceLost) as exc:
        level = logging.DEBUG if what == AHEAD else logging.INFO  # what is left is tried once more
        log.log(level, "KV blocks of %r were not %s: %s", of, what, exc)
    except Exception as exc:
        log.error("KV blocks of %r were not %s.\n%s", of, what, tm.traceback_of(exc))
