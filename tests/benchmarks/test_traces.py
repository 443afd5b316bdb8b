"""Real traces in small: what is searched for is what is reported, and loads are what their seeds draw."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.partial import PartialResults
from benchmarks.trace_loads import LOADS, Load, idle_ttft_s
from benchmarks.trace_policies import pins_of
from benchmarks.traces import SHARE, compared, main, measure
from hotswap.policies import LeastLoadedRouter
from hotswap.simulation import Cluster, Trace, TraceRequest, simulate
from tests.simulation.test_drivers import SWAP


def small(folder: Path, name: str) -> Load:
    """Thirty seconds of requests with prompts of some 600 tokens and answers of 40, for a few engines."""
    lines = [f"{number / 6},{300 + 7 * (number % 90)},40,m{number % 3}" for number in range(180)]
    (folder / "t.csv").write_text("\n".join(["arrival_s,input_tokens,output_tokens,model", *lines]) + "\n")
    return replace(
        LOADS[name],
        file="t.csv",
        take=lambda trace, random: trace.jittered(random.randrange(100), 1.0),
        cluster=replace(LOADS[name].cluster, profile="a10-llama-7b", token_budget=512),
        columns=(),
        warm_s=5.0,
        most=9,
        guess=4,
    )


def test_the_number_that_is_reported_is_enough_and_one_less_is_not(tmp_path: Path) -> None:
    report = measure("azure-models", small(tmp_path, "azure-models"), tmp_path, [1, 2])
    searched = 0
    for policy in report["policies"].values():
        for engines, shares in zip(policy["engines"], policy["attainment"], strict=True):
            if str(engines) in shares:
                searched += 1
                assert shares[str(engines)] >= SHARE
                assert shares.get(str(engines - 1), 0.0) < SHARE
    assert searched >= 6
    assert not report["policies"][report["best"]]["baseline"]
    pinned = report["policies"]["pinned"]["engines"]
    assert all(engines is None or engines >= 3 for engines in pinned), "a model was not pinned"


def test_an_interrupted_search_goes_on_with_what_was_found(tmp_path: Path) -> None:
    load, partial = small(tmp_path, "azure-models"), PartialResults(tmp_path / "report.part")
    report = measure("azure-models", load, tmp_path, [1], partial)
    again = measure(
        "azure-models", replace(load, most=1), tmp_path, [1], PartialResults(tmp_path / "report.part")
    )
    assert again["policies"] == report["policies"], "it was searched again"


def test_a_policy_that_fails_with_the_most_engines_has_no_estimate(tmp_path: Path) -> None:
    def runs(*engines: int | None, baseline: bool = False) -> dict[str, object]:
        return {"baseline": baseline, "engines": list(engines)}

    found = {
        "ours": runs(4, 5, 6),
        "worse": runs(6, 6, 6),
        "none": runs(4, None, 4),
        "theirs": runs(5, 7, 9, baseline=True),
        "never": runs(None, None, None, baseline=True),
    }
    report = compared(found)
    assert report["best"] == "ours"
    assert set(report["estimates"]) == {"ours", "worse", "theirs"}
    assert report["more"]["theirs"]["mean"] == 2  # 1, 2 and 3, seed by seed
    assert set(report["more"]) == {"theirs"}


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0.1, 100), min_size=1), st.integers(0, 20))
def test_every_model_is_pinned_and_no_other_engine_would_have_helped_more(
    work: dict[str, float], more: int
) -> None:
    pins = pins_of(work, len(work) + more)
    replicas = Counter(pins.values())
    assert sorted(pins) == sorted(f"e{number}" for number in range(len(work) + more))
    assert set(replicas) == set(work)
    worst = max(work[model] / replicas[model] for model in work)
    for model, count in replicas.items():
        if count > 1:  # no model got a second one while another had more work for each than now
            assert work[model] / (count - 1) >= worst * (1 - 1e-9)


@pytest.mark.parametrize("prompt_tokens", [1, 500, 2048, 5000])
def test_an_idle_engine_takes_as_long_as_a_target_supposes(prompt_tokens: int) -> None:
    cluster = Cluster(num_engines=1, token_budget=2048)
    warm = TraceRequest(arrive_s=0, prompt_tokens=1, output_tokens=1)
    asks = TraceRequest(arrive_s=60, prompt_tokens=prompt_tokens, output_tokens=1)
    outcome = simulate(Trace((warm, asks)), cluster, router=LeastLoadedRouter(), scheduler=SWAP)
    expected_s = idle_ttft_s(cluster.measured.device, cluster.token_budget, prompt_tokens)
    assert outcome.requests[1].ttft_s == pytest.approx(expected_s, rel=1e-3)


def test_without_traces_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert main(["--traces", str(tmp_path / "none")]) == 2
    assert "--traces" in capsys.readouterr().err
