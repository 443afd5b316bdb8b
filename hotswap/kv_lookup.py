"""`KVLookup`: what a fleet asks its KV store without waiting: its view, and how much of a request it has."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hotswap import telemetry as tm
from hotswap.checks import check_kind, shown
from hotswap.errors import StoreError
from hotswap.kv_store import KVPrefix, KVStore
from hotswap.migration import KVLayout
from hotswap.request import AdapterId, ModelId, Request
from hotswap.store_view import KVStoreView

__all__ = ["KVLookup"]

log = logging.getLogger("hotswap")

# Layouts are remembered of so many pairs of a model and a version of an adapter.
_MOST_LAYOUTS = 4096


class KVLookup:
    """Asks a KV store, and knows by which names it has the blocks of a fleet.

    A store that fails is one that has nothing, and the log says why once, until it answers again.

    Args:
        store: The store; `None` if there is none.
        salt: Tells the fleet's versions of adapters from those of other fleets.
    """

    def __init__(self, store: KVStore | None, salt: str = "") -> None:
        self._store, self._salt = store, salt
        self._layouts: dict[tuple[ModelId, AdapterId | None], KVLayout] = {}
        self._tier, self._fails = "", set[str]()

    def view(self) -> KVStoreView | None:
        """Return the store's view; `None` without a store, or if the store fails."""
        if self._store is None:
            return None
        try:
            view = self._store.view()
            check_kind(StoreError, "view()", view, KVStoreView)
        except Exception as exc:
            self._log("cannot tell its view", exc)
            return None
        self._tier = view.tier
        self._fails.discard("cannot tell its view")
        return view

    @property
    def tier(self) -> str:
        """What the store is called in spans and metrics; "" as long as it has told no view."""
        if not self._tier:
            self.view()
        return self._tier

    def has(self, model: ModelId) -> bool:
        """Whether the store has blocks that were computed by a model of this name."""
        view = self.view()
        return view is not None and any(stored.model == model for stored in view.models)

    def layout(self, model: ModelId, adapter: AdapterId | None) -> KVLayout | None:
        """Return the layout that blocks of a model had last; `None` if none were saved or restored."""
        return self._layouts.get((model, adapter))

    def prefix(self, layout: KVLayout, tokens: Sequence[int]) -> KVPrefix:
        """Return the name of tokens in the store; the layout is remembered for look-ups."""
        if len(self._layouts) >= _MOST_LAYOUTS:
            self._layouts.clear()
        self._layouts[layout.model, layout.adapter] = layout
        return KVPrefix(layout, tokens, salt="" if layout.adapter is None else self._salt)

    def is_common(self, layout: KVLayout) -> bool:
        """Whether blocks of a layout have the same names in all fleets, as those of adapters have not."""
        return layout.adapter is None and layout.computed_by != ""

    def find(self, prefix: KVPrefix) -> int:
        """Return how many of the first tokens the store has; 0 without one.

        Raises:
            StoreError: the store tells what it cannot have.
        """
        found = 0 if self._store is None else self._store.lookup(prefix)
        if found not in range(len(prefix.tokens) + 1):
            raise StoreError(f"lookup() returned {shown(found)} for {len(prefix.tokens)} tokens.")
        return found

    def stored(self, request: Request) -> tuple[int, str]:
        """Return how many first tokens of a request are stored, and on which node, if engines differ in that.

        Without the last token, which is computed.
        """
        layout = self.layout(request.model, request.adapter)
        if self._store is None or layout is None:
            return 0, ""
        try:
            prefix = self.prefix(layout, request.tokens[:-1])
            found = self.find(prefix)
            node = self._store.node_of(prefix) if found else ""
        except Exception as exc:
            self._log("cannot look requests up", exc)
            return 0, ""
        self._fails.discard("cannot look requests up")
        return found, node

    def _log(self, what: str, error: Exception) -> None:
        if what not in self._fails:
            self._fails.add(what)
            log.error("The KV store %r %s.\n%s", self._store, what, tm.traceback_of(error))
