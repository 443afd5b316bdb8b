"""Seeded arrivals of requests: the same seed gives the same hour, request by request."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

import anyio

from hotswap.errors import ConfigError
from hotswap.request import ModelId, Request, RequestId
from hotswap.sampling import Sampling

__all__ = [
    "Arrival",
    "Lengths",
    "gamma_gaps",
    "log_normal_lengths",
    "play",
    "poisson_gaps",
    "workload",
    "zipf_mix",
]

Lengths: TypeAlias = Callable[[Random], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request that arrives `arrive_s` seconds after the start of its workload."""

    arrive_s: float
    model: ModelId
    prompt: tuple[int, ...]
    sampling: Sampling

    def request(self, id: str) -> Request:
        """Return the request of this arrival for an engine; a fleet makes its own."""
        return Request(
            id=RequestId(id),
            model=self.model,
            prompt=self.prompt,
            sampling=self.sampling,
            arrived_s=self.arrive_s,
        )


def poisson_gaps(random: Random, *, rate_per_s: float) -> Iterator[float]:
    """Yield seconds between arrivals of a Poisson process: exponential, of coefficient of variation 1."""
    while True:
        yield random.expovariate(rate_per_s)


def gamma_gaps(random: Random, *, rate_per_s: float, cv: float) -> Iterator[float]:
    """Yield Gamma-distributed seconds between arrivals; a coefficient of variation over 1 makes bursts.

    Shape `1 / cv**2`, scale `cv**2 / rate`: the recipe of Fu et al., ServerlessLLM, OSDI 2024, section 7.1
    (cv=8).
    """
    while True:
        yield random.gammavariate(1 / cv**2, cv**2 / rate_per_s)


def log_normal_lengths(median: float, *, sigma: float = 1.0, most: int = 4096) -> Lengths:
    """Return a draw of token counts from 1 to `most`, of a median and a spread as traces of chats have."""

    def draw(random: Random) -> int:
        return min(most, max(1, round(random.lognormvariate(math.log(median), sigma))))

    return draw


def zipf_mix(models: Sequence[str], *, exponent: float = 1.0) -> dict[str, float]:
    """Return shares that fall with rank: the k-th model gets `1 / k**exponent` of the first one's."""
    return {model: 1 / rank**exponent for rank, model in enumerate(models, start=1)}


def workload(
    seed: int,
    *,
    models: Mapping[str, float],
    rate_per_s: float,
    seconds: float,
    start_s: float = 0.0,
    cv: float = 1.0,
    prompt_tokens: Lengths | None = None,
    output_tokens: Lengths | None = None,
    vocabulary: int = 32_000,
) -> list[Arrival]:
    """Return the arrivals of `seconds` seconds in order, shared among the models by weight.

    A shifting load is the sum of such lists with different `start_s` and `models`.

    Args:
        seed: the seed of all randomness.
        models: weights by model id; they need not add up to 1.
        rate_per_s: the rate of all models together.
        seconds: its length, from `start_s` on.
        start_s: when the workload begins.
        cv: coefficient of variation of the gaps: 1 is a Poisson process, more comes in bursts (`gamma_gaps`).
        prompt_tokens: draws prompt lengths; by default log-normal with median 128.
        output_tokens: draws `max_tokens`, which every generation reaches; by default log-normal with median
            64.
        vocabulary: prompt ids lie below it.

    Raises:
        ConfigError: no model has a weight, or the rate is not positive.
    """
    if not models or sum(models.values()) <= 0 or rate_per_s <= 0:
        raise ConfigError(
            f"A workload needs weighted models and a rate over 0, not {models} at {rate_per_s}."
        )
    random = Random(seed)
    prompts = prompt_tokens or log_normal_lengths(128)
    outputs = output_tokens or log_normal_lengths(64)
    gaps = (
        poisson_gaps(random, rate_per_s=rate_per_s)
        if cv == 1
        else gamma_gaps(random, rate_per_s=rate_per_s, cv=cv)
    )
    arrivals: list[Arrival] = []
    at_s = next(gaps)
    while at_s <= seconds:
        model = random.choices(list(models), list(models.values()))[0]
        prompt = tuple(random.choices(range(vocabulary), k=prompts(random)))
        sampling = Sampling(max_tokens=outputs(random), ignore_eos=True)
        arrivals.append(
            Arrival(arrive_s=start_s + at_s, model=ModelId(model), prompt=prompt, sampling=sampling)
        )
        at_s += next(gaps)
    return arrivals


async def play(arrivals: Sequence[Arrival], serve: Callable[[Arrival], Coroutine[Any, Any, object]]) -> None:
    """Call `serve` for each arrival at its time from now, each in a task of its own, and wait for all.

    An exception from one call cancels the others, so `serve` handles expected failures itself.
    """
    start_s = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        for arrival in sorted(arrivals, key=lambda arrival: arrival.arrive_s):
            await anyio.sleep_until(start_s + arrival.arrive_s)
            tasks.start_soon(serve, arrival)
