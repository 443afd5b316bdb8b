"""`TimesView`: what a fleet has measured of its own swaps and prefills."""

from __future__ import annotations

from dataclasses import dataclass

from hotswap.request import ModelId
from hotswap.store_view import StoreView

__all__ = ["TimesView"]

# For a model whose tier the store does not name.
_UNKNOWN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesView:
    """What a fleet has measured of its own swaps and prefills; later ones count for more.

    Attributes:
        unload_s: Seconds for which an instance is down in a swap beside its load and the time that running
            requests were given to finish; 0 before the first swap.
        load_bytes_per_s: By tier, the bytes over the seconds of whole loads: from the tier to the device,
            queues and set-up included.
        prefill_tokens_per_s: Of the requests with which turns began, their tokens over the seconds until all
            of them had a token; `None` before the first.
    """

    unload_s: float = 0.0
    load_bytes_per_s: tuple[tuple[str, float], ...] = ()
    prefill_tokens_per_s: float | None = None

    def load_s(self, store: StoreView, model: ModelId) -> float:
        """Return the seconds to load a model from its fastest tier, and 10 if the store does not have it.

        From a tier that was not loaded from yet they are those that the store names (`StoreView.load_s`).
        """
        link, num_bytes = store.source(model), store.load_bytes(model)
        if link is None or num_bytes is None:
            return _UNKNOWN_S
        return num_bytes / (dict(self.load_bytes_per_s).get(link.name) or link.bytes_per_s)

    def prefill_s(self, num_tokens: int) -> float:
        """Return the seconds to compute so many tokens; at 20,000 a second before anything was measured."""
        return num_tokens / (self.prefill_tokens_per_s or 20_000.0)
