"""The fewest engines: found without monotone policies, by command and from Python."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from hotswap import FleetView
from hotswap.abc import Action, Scheduler
from hotswap.cli import main
from hotswap.errors import ConfigError
from hotswap.policies import CostSwap, KeepAliveSwap, LeastLoadedRouter
from hotswap.simulation import Cluster, Fewest, Slo, Trace, fewest_engines, generate, simulate
from hotswap.simulation.least import attainment_after

TRACE = generate(5, models={"a": 3, "b": 2, "c": 1}, rate_per_s=4, seconds=60)
CLUSTER = Cluster(disk_bytes_per_s=50e9)


@dataclass(frozen=True)
class Stubborn(Scheduler):
    """Serves with any number of engines but some."""

    refused: frozenset[int]

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        return () if len(fleet.instances) in self.refused and fleet.now_s < 50 else CostSwap().plan(fleet)


def least(scheduler: Scheduler, *, guess: int = 4, most: int = 8) -> Fewest:
    return fewest_engines(
        TRACE, CLUSTER, scheduler=scheduler, slo=Slo(ttft_s=5.0), warm_s=10.0, guess=guess, most=most
    )


@pytest.mark.parametrize("guess", [1, 3, 8])
def test_the_fewest_are_enough_and_one_less_is_not_from_any_guess(guess: int) -> None:
    found = least(CostSwap(), guess=guess)
    assert found.engines is not None
    assert found.attainment[found.engines] >= 0.99
    assert found.engines == 1 or found.attainment[found.engines - 1] < 0.99
    assert found.gaps == ()


def test_a_policy_that_fails_with_more_engines_is_not_taken_by_its_luck() -> None:
    alone = least(CostSwap()).engines
    assert alone is not None
    found = least(Stubborn(frozenset({alone + 1})), guess=alone)
    assert found.engines == alone + 2
    assert found.gaps == (alone + 1,)


def test_where_the_most_is_not_enough_there_is_no_number() -> None:
    found = least(Stubborn(frozenset(range(9))))
    assert found.engines is None
    assert 8 in found.attainment
    assert str(found).startswith("not enough")


def test_only_requests_after_the_warm_up_count() -> None:
    outcome = simulate(TRACE, CLUSTER, scheduler=KeepAliveSwap(), router=LeastLoadedRouter(), driver="events")
    slo = Slo(ttft_s=1.0)
    late = [slo.met(request) for request in outcome.requests if request.arrived_s >= 30.0]
    assert attainment_after(outcome, 30.0, slo) == sum(late) / len(late)
    assert attainment_after(outcome, 0.0, slo) == outcome.attainment(slo)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"share": 0.0}, "share"),
        ({"guess": 9}, "guess"),
        ({"warm_s": 61.0}, "warm_s"),
        ({"guess": 0}, "guess"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(wrong: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        fewest_engines(TRACE, CLUSTER, most=8, **wrong)  # type: ignore[arg-type]


def test_the_command_searches_for_each_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["least", "poisson:rate=2,seconds=60,models=4", "--warm", "10", "--most", "8"]
    assert main([*words, "--scheduler", "KeepAliveSwap()", "--scheduler", "CostSwap()", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["scheduler"] for one in told["searches"]] == ["KeepAliveSwap()", "CostSwap()"]
    for one in told["searches"]:
        assert one["attainment"][str(one["engines"])] >= told["share"]
    assert main(words) == 0  # without a scheduler it is the default
    assert capsys.readouterr().out.splitlines()[1].startswith("CostSwap()")


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ConfigError):
        fewest_engines(Trace(()), CLUSTER)


def test_a_trace_whose_requests_come_all_at_once_has_a_fewest() -> None:
    one = TRACE.first(1)
    at_once = Trace.of(replace(request, arrive_s=0.0) for request in one.requests)
    assert fewest_engines(at_once, CLUSTER, most=2, guess=1).engines == 1
