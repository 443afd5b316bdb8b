"""What it takes until requests that come to an instance go on: tokens computed, and KV blocks copied."""

from __future__ import annotations

from collections.abc import Iterable

from hotswap.times_view import TimesView
from hotswap.view import InstanceView, RunningView, WaitingView

__all__ = ["num_kept", "num_stored", "resume_s"]


def num_stored(times: TimesView, request: WaitingView | RunningView) -> float:
    """Return of how many tokens of a request KV blocks are copied where it goes on next.

    Those of a waiting request are in the store, or not. A running one is saved when it is evicted: of it as
    much is expected as evicted requests have found of late (`TimesView.kept_share`), and what is stored
    already. 0 without a KV store.
    """
    if isinstance(request, WaitingView):
        return request.stored_tokens
    return max(request.stored_tokens, times.kept_share * request.num_tokens)


def num_kept(request: WaitingView, instance: InstanceView) -> int:
    """Return of how many tokens of a waiting request an instance that serves its model still has KV blocks.

    All but the last of a request that left it with a token, unless a block was reallocated that was released
    later: too many while those that it released itself are reallocated. What there is of a request that left
    without a token is not known, and counts as nothing.
    """
    if request.last_instance != instance.id or instance.hosted != request.model:
        return 0
    is_kept = instance.kept_since_s is not None and instance.kept_since_s <= request.waiting_since_s
    return request.num_tokens - 1 if is_kept else 0


def resume_s(times: TimesView, requests: Iterable[WaitingView | RunningView]) -> float:
    """Return the seconds until requests, with which a turn begins, have one more token each."""
    num_tokens, stored = 0, 0.0
    for request in requests:
        num_tokens += request.num_tokens
        stored += num_stored(times, request)
    return times.resume_s(num_tokens, stored)
