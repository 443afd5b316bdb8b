"""All interleavings of a hand-over keep the invariants, and a faulty protocol breaks one."""

from __future__ import annotations

from typing import get_args

import pytest

from tests.model.explore import PROGRESS, explore
from tests.model.hand_over import (
    HELD,
    OWNER,
    PUBLISHED,
    RELEASED,
    TOKENS,
    WHERE,
    Bounds,
    Fault,
    HandOver,
    State,
)

# The invariant that each fault breaks, and bounds that are large enough for it.
SMALL, LARGE, TWICE = Bounds(tokens=2), Bounds(tokens=3), Bounds(tokens=1, moves=2)
FAULTS: dict[Fault, tuple[str, Bounds]] = {
    "publish before the copy": (PUBLISHED, SMALL),
    "publish the last block without its copy": (PUBLISHED, LARGE),
    "source frees before the last copy": (HELD, SMALL),
    "read blocks of a preempted request": (HELD, SMALL),
    "watchdog frees what is being written": (HELD, SMALL),
    "watchdog never frees": (RELEASED, SMALL),
    "cancel leaves a write behind": (HELD, SMALL),
    "no stop": (OWNER, SMALL),
    "release a stream that ended": (RELEASED, TWICE),
    "resume after release": (OWNER, SMALL),
    "cancelled stop stays parked": (PROGRESS, SMALL),
    "continue from the source, unread dropped": (TOKENS, SMALL),
    "continue from the tokens read at the stop": (TOKENS, SMALL),
    "abort keeps the assignment": (RELEASED, SMALL),
    "failed release keeps the redirection": (RELEASED, SMALL),
    "failed release frees the request's assignment": (RELEASED, SMALL),
    "client leaves its redirection": (RELEASED, SMALL),
}


# Events that must occur in the exploration.
EVENTS = (
    "the {} decodes a token",
    "the {} preempts the request",
    "the {} admits the request again",
    "the {} is evicted",
    "the {} is lost",
    "the {} is back",
    "the {} refuses the request",
    "the source executes: park",
    "the source executes: unpark",
    "the destination executes: publish",
    "the destination executes: give",
    "the message 'publish' is lost",
    "the message 'close' is lost",
    "the watchdog of the destination times out",
    "other requests take the cached blocks",
    "there is no room at the destination",
    "the client leaves",
)
STAGES = ("reserve", "read", "write", "stop", "stopping", "commit", "redirect", "release", "arrive")


@pytest.mark.parametrize(
    ("bounds", "least"),
    [
        pytest.param(Bounds(), 90_000, id="an engine breaks"),
        pytest.param(Bounds(tokens=5, breaks=0), 25_000, id="two copies while it decodes"),
        pytest.param(Bounds(tokens=2, moves=2), 45_000, id="one move after another"),
    ],
)
def test_every_interleaving_keeps_the_invariants(bounds: Bounds, least: int) -> None:
    found = explore(HandOver(bounds=bounds))
    assert found.broken is None, str(found)
    assert found.num_states > least
    assert found.num_ends >= 10
    if bounds == Bounds():
        events = {event.format(where) for event in EVENTS for where in WHERE}
        given_up = {f"the move is cancelled, or its time or its link ends, in {stage!r}" for stage in STAGES}
        assert events | given_up <= found.labels


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_breaks_its_invariant(fault: Fault) -> None:
    broken, bounds = FAULTS[fault]
    found = explore(HandOver(fault, bounds))
    assert found.broken == broken, f"with the fault {fault!r}: {found}"
    assert found.trace


def test_every_fault_has_its_invariant() -> None:
    assert set(FAULTS) == set(get_args(Fault))


def test_a_move_can_come_to_its_end() -> None:
    """The invariants would hold too if no move ever finished."""
    seen: set[str] = set()
    bounds = Bounds(tokens=5, breaks=0)

    class Watched(HandOver):
        def broken(self, state: State, *, is_end: bool) -> str | None:
            if state.move.at == "arrive" and state.request.arrived and state.request.at == "destination":
                seen.add("arrived")
                if state.content > 2 * bounds.block:
                    seen.add("with two copies and a last one")
            if state.move.at == "idle" and state.request.at == "source" and state.content:
                seen.add("stayed after a commit")
            return super().broken(state, is_end=is_end)

    explore(Watched(bounds=bounds))
    assert seen == {"arrived", "with two copies and a last one", "stayed after a commit"}
