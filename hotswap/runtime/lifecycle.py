"""The life of a request as a function: what happens to it, and what it does next.

    waiting --assigned--> running --last token, rejected, expired, given up--> ended
       ^                     |
       +------ requeue ------+   evicted, lost, failed, interrupted
                             |
       running <-- go to ----+   moved: the next instance has been made ready for it

A running request that leaves its instance unfinished goes on as the same request with a longer prompt, so one
rule serves Snowflake's eviction, ServerlessLLM's token migration (Fu et al., OSDI 2024, section 5.3) and
failures. The function knows no tasks and no clock: a fleet drives it from one task for each request (`flow`),
the event simulation from its events.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from hotswap.errors import InstanceError, InstanceLost, RequestEvicted

__all__ = [
    "NEW",
    "End",
    "Event",
    "Evicted",
    "Failed",
    "Finished",
    "GoOn",
    "GoTo",
    "GotToken",
    "History",
    "Interrupted",
    "Lost",
    "Moved",
    "Next",
    "Rejected",
    "Requeue",
    "departure",
    "doubled",
    "step",
]

# So many errors in a row, without a token in between, or losses without a stay that decoded, and a request is
# given up. The first token of a stay comes of its prefill, the next of a decode.
MAX_ERRORS, MAX_LOSSES = 3, 5
DECODED_TOKENS = 2
# From so many losses on it is a suspect.
SUSPECT_LOSSES = 2
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 1.0


@dataclass(frozen=True, slots=True)
class History:
    """How often a request left instances unfinished since its latest token.

    Attributes:
        num_stalls: For whatever reason but a move.
        num_errors: Because the engine failed it.
        num_losses: Because the instance was lost; since the latest stay that decoded.
    """

    num_stalls: int = 0
    num_errors: int = 0
    num_losses: int = 0


NEW = History()


@dataclass(frozen=True, slots=True)
class GotToken:
    """It has got a token."""


@dataclass(frozen=True, slots=True)
class Finished:
    """It has its last token."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """The engine gave it back."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The instance was lost with it."""

    error: InstanceLost


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine failed it, and serves on."""

    error: InstanceError


@dataclass(frozen=True, slots=True)
class Rejected:
    """It can be served nowhere: a fault of its own, its deadline, or the end of the fleet."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The fleet ended its stay, to have it go on elsewhere or for another model."""


@dataclass(frozen=True, slots=True)
class Moved:
    """It left for the instance that a move has made ready for it."""


Event: TypeAlias = GotToken | Finished | Evicted | Lost | Failed | Rejected | Interrupted | Moved


@dataclass(frozen=True, slots=True)
class GoOn:
    """Run on where it is."""


@dataclass(frozen=True, slots=True)
class Requeue:
    """Wait for an instance again, after a pause.

    A `suspect` has lost instances in a row before it decoded. It runs beside no other suspect until it gets
    a token, which tells a request that takes its instance down from those that were beside it. One that has
    `stalled` has left its latest instance without a token.
    """

    pause_s: float = 0.0
    suspect: bool = False
    stalled: bool = False


@dataclass(frozen=True, slots=True)
class GoTo:
    """Run on the next instance, to which it is assigned already."""


@dataclass(frozen=True, slots=True)
class End:
    """End: with all tokens, or by an error."""

    error: Exception | None = None


Next: TypeAlias = GoOn | Requeue | GoTo | End


def departure(error: Exception) -> Event:
    """Return what has happened to a request that an error has taken from its instance."""
    match error:
        case RequestEvicted():
            return Evicted()
        case InstanceLost():
            return Lost(error)
        case InstanceError():
            return Failed(error)
        case _:
            return Rejected(error)


def step(history: History, event: Event) -> tuple[History, Next]:
    """Return a request's history after an event, and what it does next."""
    match event:
        case GotToken():
            return (History(num_losses=history.num_losses) if history.num_losses else NEW), GoOn()
        case Finished():
            return history, End()
        case Rejected(error):
            return history, End(error)
        case Moved():
            return history, GoTo()
        case Interrupted():
            return history, _requeue(history)
        case Evicted():
            after = replace(history, num_stalls=history.num_stalls + 1)
        case Lost(error):
            num_losses = history.num_losses + 1
            after = replace(history, num_stalls=history.num_stalls + 1, num_losses=num_losses)
            if num_losses >= MAX_LOSSES:
                return after, End(_given_up(error, num_losses))
        case Failed(error):
            num_errors = history.num_errors + 1
            after = replace(history, num_stalls=history.num_stalls + 1, num_errors=num_errors)
            if num_errors >= MAX_ERRORS:
                return after, End(error)
    return after, _requeue(after)


def _requeue(history: History) -> Requeue:
    """The second stall in a row waits a little, and each one after it twice as long."""
    stalls = history.num_stalls
    pause_s = 0.0 if stalls <= 1 else doubled(FIRST_PAUSE_S, stalls - 2, LONGEST_PAUSE_S)
    return Requeue(pause_s, suspect=history.num_losses >= SUSPECT_LOSSES, stalled=stalls > 0)


def doubled(first_s: float, times: int, most_s: float) -> float:
    """Return a pause that doubles so many times, however many, up to `most_s`."""
    return min(first_s * 2.0 ** min(times, 64), most_s)


def _given_up(error: InstanceLost, num_losses: int) -> InstanceLost:
    given_up = InstanceLost(
        f"The request was given up: {num_losses} instances in a row were lost while it ran on them, before "
        f"it got a second token there; the last time: {error}"
    )
    given_up.__cause__ = error
    return given_up
