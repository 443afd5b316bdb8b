"""Seeded arrivals of requests: the same seed gives the same hour, request by request."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

import anyio

from hotswap.checks import check_positive
from hotswap.errors import ConfigError
from hotswap.request import ModelId, Request, RequestId
from hotswap.sampling import Sampling

__all__ = [
    "Arrival",
    "Lengths",
    "check_arrivals",
    "check_weights",
    "gamma_gaps",
    "log_normal_lengths",
    "play",
    "poisson_gaps",
    "power_law_lengths",
    "workload",
    "zipf_mix",
]

Lengths: TypeAlias = Callable[[Random], int]

# More than memory holds, and than a burst of anything has.
MOST_REQUESTS, MOST_CV = 10_000_000, 1000.0

_EXPONENTS: Mapping[float, float] = {128: 2.0, 256: 1.5, 512: 1.15, 1024: 1.0005}


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
    """Return a draw of token counts from 1 to `most`, of a median and a spread as traces of chats have.

    Raises:
        ConfigError: a number is not over 0.
    """
    check_positive(ConfigError, median=median, sigma=sigma, most=most)

    def draw(random: Random) -> int:
        return min(most, max(1, round(random.lognormvariate(math.log(median), sigma))))

    return draw


def power_law_lengths(mean: float, *, most: int = 6144) -> Lengths:
    """Return a draw of the truncated power laws of Sun et al., Llumnix, OSDI 2024, section 6.1.

    Ranks from 1 to `2 mean - 1` come with a chance proportional to `rank ** -alpha` (alpha 2, 1.5, 1.15 and
    1.0005 for means of 128, 256, 512 and 1024), are scaled to the mean, rounded up, and cut at `most`.

    Raises:
        ConfigError: there is no exponent for that mean.
    """
    if mean not in _EXPONENTS:
        raise ConfigError(f"There is no power law with a mean of {mean!r}; give one of {sorted(_EXPONENTS)}.")
    ranks = range(1, 2 * int(mean))
    weights: list[float] = [rank ** -_EXPONENTS[mean] for rank in ranks]
    total = sum(weights)
    scale = mean * total / sum(rank * weight for rank, weight in zip(ranks, weights, strict=True))
    below = [so_far / total for so_far in itertools.accumulate(weights)]

    def draw(random: Random) -> int:
        rank = min(bisect_left(below, random.random()), len(below) - 1) + 1
        return min(most, math.ceil(rank * scale))

    return draw


def zipf_mix(models: Sequence[str], *, exponent: float = 1.0) -> dict[str, float]:
    """Return shares that fall with rank: the k-th model gets `1 / k**exponent` of the first one's.

    Raises:
        ConfigError: the exponent is not between -100 and 100.
    """
    if not -100 <= exponent <= 100:
        raise ConfigError(f"exponent is {exponent!r}; give a number between -100 and 100.")
    return {model: 1 / rank**exponent for rank, model in enumerate(models, start=1)}


def check_weights(models: Mapping[str, float]) -> None:
    """Raise `ConfigError` unless weights of models are finite, 0 or more, and one of them over 0."""
    weights = models.values()
    if not (all(weight >= 0 for weight in weights) and 0 < sum(weights) < math.inf):
        raise ConfigError(f"The models are {dict(models)}; give weights, at least one of them over 0.")


def check_arrivals(models: Mapping[str, float], *, rate_per_s: float, seconds: float, cv: float) -> None:
    """Raise `ConfigError` unless arrivals of these models can be drawn, and are no more than memory holds."""
    check_weights(models)
    check_positive(ConfigError, rate_per_s=rate_per_s, seconds=seconds, cv=cv)
    if cv > MOST_CV:
        raise ConfigError(f"cv is {cv!r}; give at most {MOST_CV:g}, a burst of a million requests.")
    if rate_per_s * seconds > MOST_REQUESTS:
        what = f"{rate_per_s:g} requests/s for {seconds:g} s"
        raise ConfigError(f"{what} are over {MOST_REQUESTS:,} requests; give a lower rate, or less time.")


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
        ConfigError: no model has a weight, or a number is out of range.
    """
    check_arrivals(models, rate_per_s=rate_per_s, seconds=seconds, cv=cv)
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
