"""`TimesView`: what a fleet has measured of its own swaps and prefills."""

from __future__ import annotations

from dataclasses import dataclass

from hotswap.request import ModelId
from hotswap.store_view import StoreView

__all__ = ["USUAL_PREFILL_TOKEN_S", "USUAL_TOKEN_S", "TimesView"]

# Of an 8B model on recent GPUs; what is expected before anything was measured.
USUAL_PREFILL_TOKEN_S = 1 / 20_000
USUAL_TOKEN_S = 0.02
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
        prefill_start_s: The part of a turn's prefill that its tokens do not lengthen: the seconds until all
            requests with which a turn began have a token, however few tokens they have; 0 before the first.
        prefill_token_s: The seconds that each of their tokens adds; 1/20,000 before the first.
        restore_token_s: The seconds that each token takes whose KV blocks are copied from the KV store; 0
            before the first.
        kept_share: Of all tokens of evicted requests, the share whose KV blocks were there when the requests
            went on, so that they were not computed again; 0 without a KV store.
        token_s: Seconds of stays on instances over the tokens that requests got there, of all stays, waits
            and prefills there included; 0.02 before the first.
    """

    unload_s: float = 0.0
    load_bytes_per_s: tuple[tuple[str, float], ...] = ()
    prefill_start_s: float = 0.0
    prefill_token_s: float = USUAL_PREFILL_TOKEN_S
    restore_token_s: float = 0.0
    kept_share: float = 0.0
    token_s: float = USUAL_TOKEN_S

    def load_s(self, store: StoreView, model: ModelId) -> float:
        """Return the seconds to load a model from its fastest tier, and 10 if the store does not have it.

        From a tier that was not loaded from yet they are those that the store names (`StoreView.load_s`).
        """
        link, num_bytes = store.source(model), store.load_bytes(model)
        if link is None or num_bytes is None:
            return _UNKNOWN_S
        return num_bytes / (dict(self.load_bytes_per_s).get(link.name) or link.bytes_per_s)

    def prefill_s(self, num_tokens: int) -> float:
        """Return the seconds until requests with so many tokens, with which a turn begins, have one more."""
        return self.prefill_start_s + num_tokens * self.prefill_token_s

    def resume_s(self, num_tokens: int, num_stored: float) -> float:
        """Return the seconds of `prefill_s` where `num_stored` of the tokens are copied if that is sooner."""
        saved_s = num_stored * (self.prefill_token_s - self.restore_token_s)
        return self.prefill_s(num_tokens) - max(0.0, saved_s)
