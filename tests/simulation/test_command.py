"""`hotswap simulate`: policies side by side, files that are the same each time, pictures, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hotswap.cli import main
from tests.house.tree import ROOT

TRACE = "gamma:rate=2,seconds=40,models=5,zipf=1,cv=3,input=100,output=30"
SWAP = "WeightedLoadSwap(t1=2, t2=50, b=1.5, sigmas=0)"
OWN = f"{ROOT}/examples/write_a_scheduler.py:LongestWaitFirst()"


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["simulate", *words, "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_schedulers_are_put_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    words = (TRACE, "--engines", "2", "--scheduler", SWAP, "--scheduler", OWN, "--seed", "3")
    told = simulated(capsys, *words)
    outcomes = told["outcomes"]
    assert [outcome["scheduler"] for outcome in outcomes] == [SWAP, OWN]
    assert all(outcome["num_failed"] == 0 and outcome["num_swaps"] >= 5 for outcome in outcomes)
    assert outcomes[0]["num_evicted"] > outcomes[1]["num_evicted"] == 0  # one's own never evicts
    assert told == simulated(capsys, *words)
    assert main(["simulate", *words]) == 0
    head, *rows, foot = capsys.readouterr().out.splitlines()
    assert head.startswith("SCHEDULER")
    assert [row.startswith(text) for row, text in zip(rows, (SWAP, OWN), strict=True)] == [True, True]
    assert foot.startswith("ATTAINMENT: the share of requests with TTFT up to 10 s")


def test_outcomes_and_pictures_go_to_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (TRACE, "--engines", "2", "--scheduler", SWAP, "--lose", "e0@10", "--out")
    for place in ("one", "two"):
        simulated(capsys, *words, str(tmp_path / place), "--plots")
    one, two = (tmp_path / place for place in ("one", "two"))
    assert sorted(file.name for file in one.iterdir()) == [
        "latency.png",
        "memory-1.png",
        "outcome-1.json",
        "residency-1.png",
    ]
    assert (one / "outcome-1.json").read_bytes() == (two / "outcome-1.json").read_bytes()
    outcome = json.loads((one / "outcome-1.json").read_text())
    assert {sample["instance"] for sample in outcome["samples"]} == {"e0", "e1"}
    assert len(outcome["requests"]) == outcome["summary"]["num_requests"]
    assert all(file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for file in one.glob("*.png"))


def test_a_real_trace_can_be_scaled_and_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.csv"
    lines = (f"{n / 2},{100 + n},{5 + n % 7}" for n in range(200))
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "\n".join(lines) + "\n")
    told = simulated(
        capsys,
        str(path),
        "--rate",
        "20",
        "--requests",
        "60",
        "--engines",
        "1",
        "--scheduler",
        SWAP,
        "--ttft",
        "60",
    )
    trace, outcomes = told["trace"], told["outcomes"]
    assert trace == {"name": "t", "num_requests": 60, "models": {"m": 60}}
    assert outcomes[0]["attainment"] == 1.0
    assert outcomes[0]["seconds"] < 20


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere.csv", "--scheduler", SWAP], "nowhere.csv"),
        (["poisson:speed=3", "--scheduler", SWAP], "speed"),
        (["poisson:rate=fast", "--scheduler", SWAP], "fast"),
        (["poisson:input=100,law=power", "--scheduler", SWAP], "power law"),
        (["poisson:input=128,law=cosine", "--scheduler", SWAP], "cosine"),
        ([TRACE, "--scheduler", "Nothing()"], "Nothing"),
        ([TRACE, "--scheduler", SWAP, "--router", SWAP], "not a Router"),
        ([TRACE, "--scheduler", SWAP, "--device", "abacus"], "abacus"),
        ([TRACE, "--scheduler", SWAP, "--lose", "e0"], "e0@30"),
        ([TRACE, "--scheduler", SWAP, "--plots"], "--out"),
        ([TRACE, "--scheduler", SWAP, "--engines", "0"], "num_engines"),
        *((["poisson:models=" + wrong], "models is") for wrong in ("0", "-3", "1.5", "nan", "inf", "1e12")),
        *((["poisson:models=3,zipf=" + wrong], "exponent") for wrong in ("nan", "1e9", "-1e9")),
        *((["poisson:input=" + wrong], "median") for wrong in ("0", "-1", "nan")),
        *((["poisson:law=power,output=" + wrong], "power law") for wrong in ("nan", "inf", "128.7")),
        *((["gamma:cv=" + wrong], "cv is") for wrong in ("1e9", "1e200")),
        (["poisson:rate=1e7,seconds=1e9"], "requests"),
        ([TRACE, "--requests", "-1"], "num_requests"),
        ([TRACE, "--requests", "0"], "no requests"),
        ([TRACE, "--rate", "0"], "rate_per_s"),
        ([TRACE, "--ttft", "nan"], "ttft_s"),
        ([TRACE, "--tpot", "-1"], "tpot_s"),
        ([TRACE, "--token-budget", "0"], "token_budget"),
        ([TRACE, "--lose", "e0@nan"], "loss of 'e0'"),
        ([TRACE, "--engines", "1000000000"], "--engines is"),
        *(([TRACE, "--interval", wrong], "--interval is") for wrong in ("1e-9", "0", "nan")),
        ([TRACE, "--out", "/dev/null"], "--out"),
        ([TRACE, "--scheduler", "Chain(1)"], "Scheduler 1 is 1"),
        ([TRACE, "--scheduler", "FirstOf(CostSwap(), 2)"], "Scheduler 2 is 2"),
        ([TRACE, "--router", "FirstOfRouters(3)"], "Router 1 is 3"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words]) == 2
    assert says in capsys.readouterr().err
