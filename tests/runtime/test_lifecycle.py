"""The life of a request as a function: bounds that hold for any history."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hotswap.errors import InstanceError, InstanceLost
from hotswap.runtime.lifecycle import (
    NEW,
    End,
    Event,
    Evicted,
    Failed,
    GotToken,
    History,
    Interrupted,
    Lost,
    Requeue,
    step,
)

LONGEST_PAUSE_S = 1.0
EVENTS = st.sampled_from(
    [GotToken(), Evicted(), Interrupted(), Lost(InstanceLost("gone")), Failed(InstanceError("full"))]
)


def pauses(history: History, events: list[Event]) -> list[float]:
    found: list[float] = []
    for event in events:
        history, decision = step(history, event)
        if isinstance(decision, End):
            break
        if isinstance(decision, Requeue):
            found.append(decision.pause_s)
    return found


@given(events=st.lists(EVENTS, max_size=60), num_stalls=st.integers(0, 100_000))
def test_a_pause_is_bounded_however_often_a_request_has_stalled(events: list[Event], num_stalls: int) -> None:
    assert all(0.0 <= pause_s <= LONGEST_PAUSE_S for pause_s in pauses(History(num_stalls), events))


def test_pauses_grow_until_a_token_comes() -> None:
    evicted = pauses(NEW, [Evicted()] * 3000)
    assert evicted[0] == 0.0
    assert evicted[-1] == LONGEST_PAUSE_S
    assert all(before <= after for before, after in pairwise(evicted))
    assert pauses(NEW, [*[Evicted()] * 3000, GotToken(), Evicted()])[-1] == 0.0
