"""The clients of a soak: each asks, reads, perhaps leaves, and compares with an undisturbed run."""

from __future__ import annotations

import statistics
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import anyio

from hotswap import DeadlineExceeded, Fleet, HotswapError, Sampling

__all__ = ["Ask", "Crowd", "Seen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request that clients make, and the tokens that an undisturbed engine gives for it."""

    model: str
    prompt: tuple[int, ...]
    sampling: Sampling
    adapter: str | None = None
    expected: tuple[int, ...] = ()


@dataclass(slots=True)
class Seen:
    """What clients saw.

    Attributes:
        ends: How requests ended: `done`; `left` by their client; `late`, at a deadline that the client gave;
            `error`.
        tokens: How many came.
        pauses_s: Between two tokens of a client.
        hops: On how many instances, one after another, requests ran.
        wrong: Requests with other tokens than those of the undisturbed run.
        errors: What clients were told that they should not have been.
    """

    ends: Counter[str] = field(default_factory=Counter[str])
    tokens: int = 0
    pauses_s: array[float] = field(default_factory=lambda: array("d"))
    hops: Counter[int] = field(default_factory=Counter[int])
    wrong: list[str] = field(default_factory=list[str])
    errors: list[str] = field(default_factory=list[str])

    def report(self) -> dict[str, Any]:
        """The figures, as JSON takes them."""
        return {
            "requests": dict(sorted(self.ends.items())),
            "tokens": self.tokens,
            "requests_by_hops": {str(hops): self.hops[hops] for hops in sorted(self.hops)},
            "pause_s": _percentiles(self.pauses_s),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Clients, each of which makes one request after the other.

    Attributes:
        size: How many.
        think_s: Mean of the exponential time that one waits before it asks again.
        leaving: Share of the requests whose client leaves before the end: after some tokens, after some time,
            or by a deadline.
        stay_s: Mean of that time.
    """

    size: int = 100
    think_s: float = 0.2
    leaving: float = 0.2
    stay_s: float = 0.5

    async def run(
        self,
        fleet: Fleet,
        asks: Sequence[Ask],
        random: Random,
        seen: Seen,
        *,
        requests: int | None = None,
        seconds: float = float("inf"),
    ) -> None:
        """Ask until so many requests were made or so much time has passed, and return when all have ended."""
        turns = iter(range(sys.maxsize if requests is None else requests))
        until_s = anyio.current_time() + seconds

        async def one_after_the_other(random: Random) -> None:
            while anyio.current_time() < until_s and next(turns, None) is not None:
                await self._ask(fleet, random.choice(asks), random, seen)
                await anyio.sleep(random.expovariate(1 / self.think_s))

        async with anyio.create_task_group() as tasks:
            for _ in range(self.size):
                tasks.start_soon(one_after_the_other, Random(random.getrandbits(64)))

    async def _ask(self, fleet: Fleet, ask: Ask, random: Random, seen: Seen) -> None:
        reader = _Reader(fleet, ask, seen)
        leaving = random.choice(("tokens", "time", "deadline")) if random.random() < self.leaving else ""
        stay_s = random.expovariate(1 / self.stay_s)
        if leaving == "tokens":
            reader.leaves_after = random.randrange(1, len(ask.expected) + 1)
        elif leaving == "deadline":
            reader.deadline_s = stay_s
        with anyio.move_on_after(stay_s if leaving == "time" else None):
            await reader.run()


class _Reader:
    """Reads one stream; whatever becomes of it, what was read is the beginning of what was to be expected."""

    def __init__(self, fleet: Fleet, ask: Ask, seen: Seen) -> None:
        self.leaves_after: int | None = None
        self.deadline_s: float | None = None
        self._fleet, self._ask, self._seen = fleet, ask, seen
        self._read: list[int] = []
        self._num_hops = 0

    async def run(self) -> None:
        end = "left"
        try:
            end = await self._stream()
        except DeadlineExceeded as exc:
            end = "late" if self.deadline_s is not None else self._blame(exc)
        except HotswapError as exc:
            end = self._blame(exc)
        finally:
            self._note(end)

    async def _stream(self) -> str:
        ask, last_s = self._ask, None
        async with self._fleet.stream(
            ask.model, ask.prompt, ask.sampling, adapter=ask.adapter, deadline_s=self.deadline_s
        ) as tokens:
            async for token in tokens:
                now_s = anyio.current_time()
                if last_s is not None:
                    self._seen.pauses_s.append(now_s - last_s)
                last_s, self._num_hops = now_s, tokens.num_hops
                self._read.append(token.id)
                if len(self._read) == self.leaves_after:
                    return "left"
        return "done"

    def _blame(self, error: HotswapError) -> str:
        self._seen.errors.append(f"{type(error).__name__}: {error}")
        return "error"

    def _note(self, end: str) -> None:
        read = tuple(self._read)
        self._seen.ends[end] += 1
        self._seen.tokens += len(read)
        self._seen.hops[self._num_hops] += 1
        if read != self._ask.expected[: None if end == "done" else len(read)]:
            self._seen.wrong.append(f"{self._ask} gave {read} and was {end}")


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {}
    cuts = statistics.quantiles(seconds, n=1000, method="inclusive")
    return {"p50": cuts[499], "p99": cuts[989], "p99.9": cuts[998], "max": max(seconds)}
