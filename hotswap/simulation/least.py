"""The fewest engines with which a trace meets its targets, found without the belief that more are better."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from hotswap.errors import ConfigError
from hotswap.router import Router
from hotswap.scheduler import Scheduler
from hotswap.simulation.cluster import Cluster
from hotswap.simulation.outcome import Outcome, Slo
from hotswap.simulation.run import simulate
from hotswap.simulation.trace import Trace

__all__ = ["Fewest", "fewest_engines"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fewest:
    """What a search has found.

    Attributes:
        engines: The smallest number of engines from which on every number that was tried is enough; `None` if
            the most is not.
        attainment: The share of requests that met their targets, by number of engines tried, in order.
        share: What was asked for.
    """

    engines: int | None
    attainment: Mapping[int, float]
    share: float

    @property
    def gaps(self) -> tuple[int, ...]:
        """Numbers that are not enough though a smaller one is: with them the policy is not monotone."""
        enough = [number for number, met in self.attainment.items() if met >= self.share]
        return tuple(
            n for n, met in self.attainment.items() if met < self.share and enough and n > min(enough)
        )

    def __str__(self) -> str:
        tried = ", ".join(f"{number}: {met:.3f}" for number, met in self.attainment.items())
        return f"{self.engines if self.engines is not None else 'not enough'} ({tried})"


def fewest_engines(
    trace: Trace,
    cluster: Cluster,
    *,
    router: Router | None = None,
    scheduler: Scheduler | None = None,
    slo: Slo | None = None,
    share: float = 0.99,
    warm_s: float = 0.0,
    most: int = 64,
    guess: int = 4,
    interval_s: float = 0.5,
) -> Fewest:
    """Return the smallest number of engines of the cluster with which enough requests meet their targets.

    Policies need not be monotone: one engine more can be worse. So the search, which begins at `guess`, goes
    down until two numbers in a row are not enough, and up until two in a row are.

    Args:
        trace: What is asked.
        cluster: The engines, whose number is ignored.
        router: As of `simulate`.
        scheduler: Likewise.
        slo: The targets of each request.
        share: The share of requests that must meet them.
        warm_s: Requests that arrive before are served, and not counted.
        most: The most engines that are tried.
        guess: The number that is tried first.
        interval_s: Seconds between plans.

    Raises:
        ConfigError: a number is out of range, or no request arrives after the warm-up.
    """
    if not 0 < share <= 1:
        raise ConfigError(f"share is {share!r}; give a share of requests, over 0 and at most 1.")
    if not 1 <= guess <= most:
        raise ConfigError(f"guess is {guess!r} and most is {most!r}; give 1 or more, and no larger guess.")
    if not warm_s <= trace.seconds:
        raise ConfigError(f"warm_s is {warm_s!r}; {trace.name!r} has no request after {trace.seconds:g} s.")
    slo, met = slo or Slo(), dict[int, float]()

    def attainment(number: int) -> float:
        if number not in met:
            played = simulate(
                trace,
                replace(cluster, num_engines=number),
                router=router,
                scheduler=scheduler,
                interval_s=interval_s,
                driver="events",
            )
            met[number] = attainment_after(played, warm_s, slo)
        return met[number]

    def until(numbers: Iterable[int], *, enough: bool) -> int | None:
        """Try numbers until two in a row are enough, or are not; return the first of them, or of one row."""
        first, in_a_row = None, 0
        for number in numbers:
            if (attainment(number) >= share) is not enough:
                first, in_a_row = None, 0
                continue
            first, in_a_row = first or number, in_a_row + 1
            if in_a_row == 2:
                break
        return first

    above = until(range(guess, most + 1), enough=True)
    until(range((above or guess) - 1, 0, -1), enough=False)
    met = dict(sorted(met.items()))
    first = next((n for n in met if all(met[more] >= share for more in met if more >= n)), None)
    return Fewest(engines=first, attainment=met, share=share)


def attainment_after(outcome: Outcome, warm_s: float, slo: Slo) -> float:
    """Return the share of the requests from `warm_s` on that met their targets; 1 of none."""
    counted = [slo.met(request) for request in outcome.requests if request.arrived_s >= warm_s]
    return fmean(counted) if counted else 1.0
