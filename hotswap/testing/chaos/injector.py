"""Which faults there are, how often they come, and the counting of those that came."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, fields
from random import Random

import anyio

from hotswap.errors import ConfigError

__all__ = ["EngineFaults", "Injector", "StoreFaults"]

_TIMES = ("loss_every_s", "delay_s", "stall_s", "bytes_per_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFaults:
    """What goes wrong with an engine; chances are from 0 to 1, and times are means of exponential ones.

    Attributes:
        loss_every_s: Between two losses of the engine, whatever it does then.
        stuck: Chance that an `unload` brings a lost engine not back; the next one may.
        delay: Chance that a verb begins later than it was asked for, entering a stream included.
        delay_s: How much later.
        stall: Chance that a stream pauses before a token.
        stall_s: For how long.
        no_memory: Chance that a load, a preload, an adapter beside others or a reservation of KV blocks finds
            no room.
        abort: Chance that a verb of a move of KV blocks gives the move up.
    """

    loss_every_s: float = math.inf
    stuck: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.05
    stall: float = 0.0
    stall_s: float = 0.05
    no_memory: float = 0.0
    abort: float = 0.0

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFaults:
    """What goes wrong with a store; chances are from 0 to 1, and times are means of exponential ones.

    Attributes:
        bytes_per_s: Nothing is read faster.
        delay: Chance that a chunk comes late.
        delay_s: By how much.
        missing: Chance that a manifest or a shard that is asked for is not there.
        error: Chance that the read of a shard breaks off, at its beginning or anywhere in it.
        corrupt: Chance that a shard is found damaged, anywhere in it or after its last chunk.
        refuse: Chance that the store would rather not lend a rank in place, or read a shard into place.
    """

    bytes_per_s: float = math.inf
    delay: float = 0.0
    delay_s: float = 0.05
    missing: float = 0.0
    error: float = 0.0
    corrupt: float = 0.0
    refuse: float = 0.0

    def __post_init__(self) -> None:
        _check(self)


class Injector:
    """Draws faults from a `Random`, and counts them.

    Attributes:
        armed: While it is false no fault comes, and nothing is drawn.
        injected: How many faults came, by kind.
    """

    def __init__(self, random: Random) -> None:
        self.armed = True
        self.injected: Counter[str] = Counter()
        self._random = random

    def hits(self, kind: str, chance: float) -> bool:
        """Whether a fault comes now; it is counted if it does."""
        hit = self.armed and chance > 0 and self._random.random() < chance
        if hit:
            self.injected[kind] += 1
        return hit

    def share(self) -> float:
        """Draw a place from 0 to 1."""
        return self._random.random()

    async def pause(self, kind: str, chance: float, mean_s: float) -> None:
        """Sleep, if that comes now, for a time whose mean is `mean_s`; without it not even a checkpoint."""
        if self.hits(kind, chance):
            await anyio.sleep(self._random.expovariate(1 / mean_s))

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.injected.items()))
        return f"<Injector [{'armed' if self.armed else 'calm'} | injected: {counts or 'none'}]>"


def _check(faults: EngineFaults | StoreFaults) -> None:
    for field in fields(faults):
        value: float = getattr(faults, field.name)
        if field.name in _TIMES:
            if not value > 0:
                raise ConfigError(f"{field.name} is {value!r}; give a number over 0 (inf is no fault).")
        elif not 0 <= value <= 1:
            raise ConfigError(f"{field.name} is {value!r}; give a chance from 0 to 1.")
