"""What saving and restoring share: the store, and what becomes of their errors."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

from hotswap import telemetry as tm
from hotswap.errors import InstanceLost, MigrationAborted, StoreError
from hotswap.kv_store import KVStore
from hotswap.runtime.state import FleetState
from hotswap.stray_cancellation import no_stray_cancellation
from hotswap.telemetry import Telemetry

__all__ = ["AHEAD", "CHUNK_BYTES", "KVContext", "logged"]

log = logging.getLogger("hotswap")

# Copied at once: a sink takes so much while its engine computes a step.
CHUNK_BYTES = 4 << 20
AHEAD = "saved ahead"


class KVContext:
    """A fleet's store of KV blocks, with what names its blocks (`lookup`).

    Args:
        state: Of the fleet.
        store: Keeps the blocks.
        telemetry: Records spans and metrics.
    """

    def __init__(self, state: FleetState, store: KVStore, telemetry: Telemetry) -> None:
        self.state, self.store, self.telemetry = state, store, telemetry
        self.lookup = state.kv_lookup


@contextmanager
def logged(what: str, of: str) -> Generator[None]:
    """Log why something of a request or an instance was not done; it goes on without."""
    try:
        with no_stray_cancellation("Copying them"):
            yield
    except (MigrationAborted, InstanceLost) as exc:
        level = logging.DEBUG if what == AHEAD else logging.INFO  # what is left is tried once more
        log.log(level, "KV blocks of %r were not %s: %s", of, what, exc)
    except StoreError as exc:
        log.warning("KV blocks of %r were not %s: %s", of, what, exc)
    except Exception as exc:
        log.error("KV blocks of %r were not %s.\n%s", of, what, tm.traceback_of(exc))
