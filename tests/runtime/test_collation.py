"""More models than instances: requests are put together by model, and waits have a bound."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hotswap import Sampling, SwapRecord
from hotswap.offline.virtual_time import run
from hotswap.policies import WeightedLoadSwap
from tests.runtime.support import engine_of, idle, sim_fleet

RULE = WeightedLoadSwap(t1=2, t2=50, b=1.5, patience_s=3.0, sigmas=0)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: when it came, for what, and when its last token came."""

    model: str
    arrived_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a workload on one engine."""

    requests: tuple[Asked, ...]
    swaps: tuple[SwapRecord, ...]

    @property
    def served(self) -> str:
        """The models of requests in the order in which they ended."""
        return "".join(r.model for r in sorted(self.requests, key=lambda request: request.ended_s))

    @property
    def turns(self) -> list[tuple[str, float, float]]:
        """Which model was served from when to when."""
        ends = [swap.started_s for swap in self.swaps[1:]] + [float("inf")]
        return [
            (str(swap.model_after), swap.started_s + swap.seconds, end_s)
            for swap, end_s in zip(self.swaps, ends, strict=True)
        ]

    def waited_s(self, request: Asked) -> float:
        """How long it took until its model was served."""
        starts = (
            start_s
            for model, start_s, end_s in self.turns
            if model == request.model and end_s > request.arrived_s
        )
        return max(0.0, next(starts) - request.arrived_s)


def played(
    arrivals: Iterable[tuple[float, str]], rule: WeightedLoadSwap, *, tokens: int = 20, **options: Any
) -> Outcome:
    """Play requests at their times to one engine; each takes a hundredth of a second for a token."""
    order = sorted(arrivals)
    models = sorted({model for _, model in order})
    requests: list[Asked] = []
    interval_s, max_requests = options.pop("interval_s", 0.5), options.pop("max_requests", 8)

    async def scenario() -> Sequence[SwapRecord]:
        engine = engine_of("e0", max_requests=max_requests)
        async with sim_fleet(*models, engines=[engine], scheduler=rule, interval_s=interval_s) as fleet:

            async def ask(model: str) -> None:
                arrived_s = anyio.current_time()
                await fleet.generate(model, (1, 2, 3), Sampling(max_tokens=tokens, ignore_eos=True))
                requests.append(Asked(model, arrived_s, anyio.current_time()))

            async with anyio.create_task_group() as clients:
                for at_s, model in order:
                    await anyio.sleep_until(at_s)
                    clients.start_soon(ask, model)
            idle(fleet)
            return fleet.swaps

    swaps = run(scenario)
    assert all(swap.outcome == "done" for swap in swaps)
    return Outcome(tuple(requests), tuple(swaps))


def in_turns(models: str, rounds: int, gap_s: float) -> list[tuple[float, str]]:
    """ABCABC..., one after every gap."""
    return [(n * gap_s, model) for n, model in enumerate(models * rounds)]


def bound_s(outcome: Outcome, rule: WeightedLoadSwap, interval_s: float) -> float:
    """What `WeightedLoadSwap` says: (M - 1) (max(P, R) + I + S) + S."""
    assert rule.patience_s is not None
    num_models = len({request.model for request in outcome.requests})
    swap_s = max(swap.seconds for swap in outcome.swaps)
    return (num_models - 1) * (max(rule.patience_s, rule.min_residency_s) + interval_s + swap_s) + swap_s


@pytest.mark.parametrize("rounds", [2, 5])
@pytest.mark.parametrize("max_requests", [1, 8])
def test_abcabc_is_served_as_aabbcc(rounds: int, max_requests: int) -> None:
    """One load for each model, where serving them as they come would take one for each request."""
    outcome = played(in_turns("abc", rounds, 0.02), RULE, max_requests=max_requests)
    assert outcome.served == "a" * rounds + "b" * rounds + "c" * rounds
    assert [swap.model_after for swap in outcome.swaps] == ["a", "b", "c"]


def test_without_a_least_residency_a_slow_abcabc_is_a_swap_for_each() -> None:
    """Single requests are served one by one, and idle models are evicted at once: a choice, not thrashing."""
    arrivals = in_turns("abc", 8, 1.0)
    bare = played(arrivals, RULE)
    assert len(bare.swaps) == 24


@pytest.mark.parametrize("residency_s", [4.0, 8.0])
def test_a_least_residency_puts_together_what_comes_slowly(residency_s: float) -> None:
    """No model is given up sooner, so there are at most so many swaps, and waits have a bound."""
    arrivals = in_turns("abc", 8, 1.0)
    rule = WeightedLoadSwap(t1=2, t2=50, b=1.5, patience_s=3.0, min_residency_s=residency_s, sigmas=0)
    outcome = played(arrivals, rule)
    seconds = max(request.ended_s for request in outcome.requests)
    assert len(outcome.swaps) <= ceil(seconds / residency_s) + 1
    assert all(end_s - start_s >= residency_s for _, start_s, end_s in outcome.turns)
    assert max(map(outcome.waited_s, outcome.requests)) <= bound_s(outcome, rule, 0.5)


# Three models with more work than the engine does, each with a queue that its turns do not empty.
OVERLOAD = in_turns("abc", 60, 0.05)


def test_a_long_queue_does_not_keep_a_newcomer_out() -> None:
    """Two models have queues from the beginning, which last for minutes; a third one comes later."""
    arrivals = [(0.0, "a")] * 200 + [(0.01, "b")] * 200 + [(1.0, "c")]
    outcome = played(arrivals, RULE, max_requests=1)
    (late,) = [request for request in outcome.requests if request.model == "c"]
    assert outcome.waited_s(late) <= bound_s(outcome, RULE, 0.5)
    assert late.ended_s < 0.2 * max(request.ended_s for request in outcome.requests)


def test_turns_last_as_long_as_patience_and_go_round() -> None:
    outcome = played(OVERLOAD, RULE, tokens=50, max_requests=2)
    first = [model for model, _, _ in outcome.turns][:6]
    assert first == ["a", "b", "c", "a", "b", "c"]
    lengths = [end_s - start_s for _, start_s, end_s in outcome.turns[:6]]
    assert all(3.0 <= seconds <= 3.0 + 0.5 + 0.1 for seconds in lengths)


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[float, str]]:
    """Bursts, streams and stragglers of two to four models."""
    models = "abcd"[: draw(st.integers(2, 4))]
    arrivals = [(0.0, model) for model in models]
    for _ in range(draw(st.integers(1, 6))):
        start_s, gap_s = draw(st.floats(0, 20)), draw(st.sampled_from([0.0, 0.05, 0.7]))
        model, count = draw(st.sampled_from(models)), draw(st.integers(1, 30))
        arrivals += [(start_s + n * gap_s, model) for n in range(count)]
    return arrivals


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    workloads(),
    st.sampled_from([0.0, 0.5, 3.0]),
    st.sampled_from([0.0, 1.0, 5.0]),
    st.sampled_from([0.1, 1.0]),
    st.sampled_from([1, 8]),
)
@example([(0.0, "a")] * 60 + [(0.01, "b")] * 60 + [(1.0, "c")], 1.0, 0.0, 0.1, 1)
def test_no_model_waits_longer_than_is_said(
    arrivals: list[tuple[float, str]],
    patience_s: float,
    residency_s: float,
    interval_s: float,
    max_requests: int,
) -> None:
    rule = WeightedLoadSwap(
        t1=0.5, t2=50, b=1.5, patience_s=patience_s, min_residency_s=residency_s, sigmas=0
    )
    outcome = played(arrivals, rule, interval_s=interval_s, max_requests=max_requests)
    assert len(outcome.requests) == len(arrivals)
    longest_s = max(map(outcome.waited_s, outcome.requests))
    assert longest_s <= bound_s(outcome, rule, interval_s) + 1e-6
    for (_, start_s, end_s), _ in itertools.pairwise(outcome.turns):
        assert end_s - start_s >= residency_s - 1e-6
