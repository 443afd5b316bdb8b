"""The views of a fleet's KV store, whatever the store does when it is asked for one."""

from __future__ import annotations

import logging

from hotswap import telemetry as tm
from hotswap.kv_store import KVStore
from hotswap.store_view import KVStoreView

__all__ = ["KVViews"]

log = logging.getLogger("hotswap")


class KVViews:
    """Asks a KV store for its views. While it fails to tell them there are none, and the log has said why."""

    def __init__(self, store: KVStore | None) -> None:
        self._store = store
        self._tier, self._fails = "", False

    def view(self) -> KVStoreView | None:
        """Return the view; `None` without a store, or if the store fails."""
        if self._store is None:
            return None
        try:
            view = self._store.view()
            self._tier, self._fails = view.tier, False
        except Exception as exc:
            if not self._fails:
                log.error("The KV store %r cannot tell its view.\n%s", self._store, tm.traceback_of(exc))
            self._fails = True
            return None
        return view

    @property
    def tier(self) -> str:
        """What the store is called in spans and metrics; "" as long as it has told no view."""
        if not self._tier:
            self.view()
        return self._tier
