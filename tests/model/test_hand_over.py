"""Every interleaving of a hand-over keeps every promise, and a protocol with a fault is found out."""

from __future__ import annotations

from typing import get_args

import pytest

from tests.model.explore import PROGRESS, explore
from tests.model.hand_over import (
    BOOKS,
    HELD,
    OWNER,
    PUBLISHED,
    TOKENS,
    WHERE,
    Bounds,
    Fault,
    HandOver,
    State,
)

# What breaks, and how large the system has to be for that.
SMALL, LARGE, TWICE = Bounds(tokens=2), Bounds(tokens=3), Bounds(tokens=1, moves=2)
FAULTS: dict[Fault, tuple[str, Bounds]] = {
    "publish before the copy": (PUBLISHED, SMALL),
    "publish the last block without its copy": (PUBLISHED, LARGE),
    "source frees before the last copy": (HELD, SMALL),
    "read what a preempted request gave back": (HELD, SMALL),
    "watchdog frees what is being written": (HELD, SMALL),
    "watchdog never frees": (BOOKS, SMALL),
    "cancel leaves a write behind": (HELD, SMALL),
    "no stop": (OWNER, SMALL),
    "release what has gone": (BOOKS, TWICE),
    "resume after release": (OWNER, SMALL),
    "stop cancelled half way stays": (PROGRESS, SMALL),
    "go on from the source, unread dropped": (TOKENS, SMALL),
    "go on from what was read at the stop": (TOKENS, SMALL),
    "abort keeps the charge": (BOOKS, SMALL),
    "failed release leaves the heading": (BOOKS, SMALL),
    "failed release gives back what the flight took over": (BOOKS, SMALL),
    "client leaves its heading behind": (BOOKS, SMALL),
}


# What befalls a hand-over, each of which has to come up.
EVENTS = (
    "the {} decodes a token",
    "the {} preempts the request",
    "the {} admits the request again",
    "the {} is evicted",
    "the {} is lost",
    "the {} is back",
    "the {} turns the request away",
    "the source does what it was asked: park",
    "the source does what it was asked: unpark",
    "the destination does what it was asked: publish",
    "the destination does what it was asked: give",
    "the message 'publish' is lost",
    "the message 'close' is lost",
    "the watchdog of the destination barks",
    "others take the cached blocks",
    "there is no room at the destination",
    "the client leaves",
)
STAGES = ("reserve", "read", "write", "stop", "stopping", "commit", "head", "release", "arrive")


@pytest.mark.parametrize(
    ("bounds", "least"),
    [
        pytest.param(Bounds(), 90_000, id="an engine breaks"),
        pytest.param(Bounds(tokens=5, breaks=0), 25_000, id="two copies while it decodes"),
        pytest.param(Bounds(tokens=2, moves=2), 45_000, id="one move after another"),
    ],
)
def test_every_interleaving_keeps_every_promise(bounds: Bounds, least: int) -> None:
    found = explore(HandOver(bounds=bounds))
    assert found.broken is None, str(found)
    assert found.num_states > least
    assert found.num_ends >= 10
    if bounds == Bounds():
        events = {event.format(where) for event in EVENTS for where in WHERE}
        given_up = {f"the move is cancelled, or its time or its link ends, in {stage!r}" for stage in STAGES}
        assert events | given_up <= found.labels


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: Fault) -> None:
    broken, bounds = FAULTS[fault]
    found = explore(HandOver(fault, bounds))
    assert found.broken == broken, f"with the fault {fault!r}: {found}"
    assert found.trace


def test_every_fault_has_its_invariant() -> None:
    assert set(FAULTS) == set(get_args(Fault))


def test_a_move_can_come_to_its_end() -> None:
    """What the invariants say would hold as well where nothing ever moved."""
    seen: set[str] = set()
    bounds = Bounds(tokens=5, breaks=0)

    class Watched(HandOver):
        def broken(self, state: State, *, is_end: bool) -> str | None:
            if state.move.at == "arrive" and state.flight.arrived and state.flight.at == "destination":
                seen.add("arrived")
                if state.content > 2 * bounds.block:
                    seen.add("with two copies and a last one")
            if state.move.at == "idle" and state.flight.at == "source" and state.content:
                seen.add("stayed after a commit")
            return super().broken(state, is_end=is_end)

    explore(Watched(bounds=bounds))
    assert seen == {"arrived", "with two copies and a last one", "stayed after a commit"}
