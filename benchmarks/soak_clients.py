"""The clients of a soak: each sends requests, perhaps leaves early, and compares with an undisturbed run."""

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

from hotswap import Fleet, Sampling
from hotswap.errors import DeadlineExceeded, HotswapError

__all__ = ["CheckedRequest", "ClientPool", "ClientResults"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """A request, and the tokens that an undisturbed engine generates for it."""

    model: str
    prompt: tuple[int, ...]
    sampling: Sampling
    adapter: str | None = None
    expected: tuple[int, ...] = ()


@dataclass(slots=True)
class ClientResults:
    """What clients received.

    Attributes:
        ends: How requests ended: `done`; `left` by their client; `late`, at a deadline of the client;
            `error`.
        tokens: Number of tokens received.
        pauses_s: Times between two tokens of a client.
        hops: Number of instances that a request ran on.
        wrong: Requests whose tokens differ from those of the undisturbed run.
        errors: Errors that clients should not have received.
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
class ClientPool:
    """Clients, each of which sends one request after the other.

    Attributes:
        size: Number of clients.
        think_s: Mean of the exponential time between two requests of a client.
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
        requests: Sequence[CheckedRequest],
        random: Random,
        results: ClientResults,
        *,
        num_requests: int | None = None,
        seconds: float = float("inf"),
    ) -> None:
        """Send `num_requests` requests, or requests for `seconds`; return when all have ended."""
        turns = iter(range(sys.maxsize if num_requests is None else num_requests))
        until_s = anyio.current_time() + seconds

        async def one_after_the_other(random: Random) -> None:
            while anyio.current_time() < until_s and next(turns, None) is not None:
                await self._send(fleet, random.choice(requests), random, results)
                await anyio.sleep(random.expovariate(1 / self.think_s))

        async with anyio.create_task_group() as tasks:
            for _ in range(self.size):
                tasks.start_soon(one_after_the_other, Random(random.getrandbits(64)))

    async def _send(
        self, fleet: Fleet, request: CheckedRequest, random: Random, results: ClientResults
    ) -> None:
        reader = _Reader(fleet, request, results)
        leaving = random.choice(("tokens", "time", "deadline")) if random.random() < self.leaving else ""
        stay_s = random.expovariate(1 / self.stay_s)
        if leaving == "tokens":
            reader.leaves_after = random.randrange(1, len(request.expected) + 1)
        elif leaving == "deadline":
            reader.deadline_s = stay_s
        with anyio.move_on_after(stay_s if leaving == "time" else None):
            await reader.run()


class _Reader:
    """Reads one stream. However it ends, the tokens read must be a prefix of the expected ones."""

    def __init__(self, fleet: Fleet, request: CheckedRequest, results: ClientResults) -> None:
        self.leaves_after: int | None = None
        self.deadline_s: float | None = None
        self._fleet, self._request, self._results = fleet, request, results
        self._read: list[int] = []
        self._num_hops = 0

    async def run(self) -> None:
        end = "left"
        try:
            end = await self._stream()
        except DeadlineExceeded as exc:
            end = "late" if self.deadline_s is not None else self._unexpected(exc)
        except HotswapError as exc:
            end = self._unexpected(exc)
        finally:
            self._note(end)

    async def _stream(self) -> str:
        request, last_s = self._request, None
        async with self._fleet.stream(
            request.model,
            request.prompt,
            request.sampling,
            adapter=request.adapter,
            deadline_s=self.deadline_s,
        ) as tokens:
            async for token in tokens:
                now_s = anyio.current_time()
                if last_s is not None:
                    self._results.pauses_s.append(now_s - last_s)
                last_s, self._num_hops = now_s, tokens.num_hops
                self._read.append(token.id)
                if len(self._read) == self.leaves_after:
                    return "left"
        return "done"

    def _unexpected(self, error: HotswapError) -> str:
        self._results.errors.append(f"{type(error).__name__}: {error}")
        return "error"

    def _note(self, end: str) -> None:
        read = tuple(self._read)
        self._results.ends[end] += 1
        self._results.tokens += len(read)
        self._results.hops[self._num_hops] += 1
        if read != self._request.expected[: None if end == "done" else len(read)]:
            self._results.wrong.append(f"{self._request} gave {read} and was {end}")


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {}
    cuts = statistics.quantiles(seconds, n=1000, method="inclusive")
    return {"p50": cuts[499], "p99": cuts[989], "p99.9": cuts[998], "max": max(seconds)}
