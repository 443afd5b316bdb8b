"""The faults that can be injected, their chances, and the count of injected faults."""

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
    """The faults of an engine; chances are from 0 to 1, and times are means of exponential distributions.

    Attributes:
        loss_every_s: Seconds between two losses of the engine, which may come at any moment.
        stuck: Chance that an `unload` does not bring a lost engine back; a later one may.
        delay: Chance that a method call starts late, entering a stream included.
        delay_s: Seconds of that delay.
        stall: Chance that a stream pauses before a token.
        stall_s: Seconds of that pause.
        no_memory: Chance that a load, a preload, a further adapter or a reservation of KV blocks runs out of
            memory.
        abort: Chance that a call during a move of KV blocks aborts the move.
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
    """The faults of a store; chances are from 0 to 1, and times are means of exponential distributions.

    Attributes:
        bytes_per_s: The highest bandwidth of a read.
        delay: Chance that a chunk comes late.
        delay_s: Seconds of that delay.
        missing: Chance that a requested manifest or shard is missing.
        error: Chance that the read of a shard fails, at its beginning or anywhere in it.
        corrupt: Chance that a shard is found damaged, anywhere in it or after its last chunk.
        refuse: Chance that the store declines to lend a rank in place, or to read a shard into place.
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
        armed: While false, no fault is injected and nothing is drawn.
        injected: The number of injected faults by kind.
    """

    def __init__(self, random: Random) -> None:
        self.armed = True
        self.injected: Counter[str] = Counter()
        self._random = random

    def hits(self, kind: str, chance: float) -> bool:
        """Return whether to inject a fault now; an injected fault is counted."""
        hit = self.armed and chance > 0 and self._random.random() < chance
        if hit:
            self.injected[kind] += 1
        return hit

    def share(self) -> float:
        """Draw a number from 0 to 1."""
        return self._random.random()

    async def pause(self, kind: str, chance: float, mean_s: float) -> None:
        """Sleep for `mean_s` on average, by chance; without the fault there is not even a checkpoint."""
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
