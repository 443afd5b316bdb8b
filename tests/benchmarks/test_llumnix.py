"""The benchmark of Llumnix's figures, in small: its requests, its verdicts, its claims."""

from __future__ import annotations

import json
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest

from benchmarks import llumnix
from benchmarks.llumnix_moves import move
from benchmarks.llumnix_paper import PAPER, TOLERANCES, Key, verdict
from benchmarks.llumnix_report import Values, claims, from_json, series_of, to_json
from benchmarks.llumnix_trace import START_S, lengths, with_priorities, workload
from benchmarks.partial import PartialResults

# Of the tokens of prompts, then of outputs, in decimal with commas between.
DIGESTS = {
    "S-S": "a1228676c11d6955",
    "M-M": "4e956b6e18522786",
    "L-L": "21fa0e8399315f95",
    "S-L": "937cc1572b01580c",
    "L-S": "aca8ad309edf6be2",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_lengths_are_those_of_the_artifact_to_the_token(name: str) -> None:
    text = ",".join(str(tokens) for series in lengths(name) for tokens in series)
    assert sha256(text.encode()).hexdigest()[:16] == DIGESTS[name]


@pytest.mark.parametrize(
    ("name", "row"),
    [("S-S", (38, 113, 413, 1464)), ("M-M", (32, 173, 1288, 4208)), ("L-L", (55, 582, 3113, 5166))],
)
def test_prompts_have_the_percentiles_of_the_papers_first_table(name: str, row: tuple[int, ...]) -> None:
    ordered = sorted(lengths(name)[0])
    assert [ordered[round(share * len(ordered) / 100)] for share in (50, 80, 95, 99)] == pytest.approx(
        row, rel=0.02
    )


def test_arrivals_go_by_the_seed_and_lengths_do_not() -> None:
    one, again, other = (workload("M-M", 8.0, seed) for seed in (1, 1, 2))
    assert one == again
    assert [r.prompt_tokens for r in one.requests] == [r.prompt_tokens for r in other.requests]
    assert [r.arrive_s for r in one.requests] != [r.arrive_s for r in other.requests]
    for trace in (one, workload("M-M", 8.0, 0), workload("M-M", 8.0, 3, cv=2.0)):
        assert trace.requests[0].arrive_s == START_S
        assert (len(trace.requests) - 1) / (trace.seconds - START_S) == pytest.approx(8.0, rel=0.06)


def test_the_first_seed_has_the_arrivals_of_the_artifact() -> None:
    """Its first gaps at one request a second, to five places."""
    gaps = [round(r.arrive_s - START_S, 5) for r in workload("S-S", 1.0, 0).requests[:4]]
    assert gaps == [0.0, 3.20631, 3.8045, 5.56007]


def test_a_share_of_requests_is_of_high_priority() -> None:
    counts = Counter(r.priority for r in with_priorities(workload("S-S", 26.0, 1), 0.1, 1).requests)
    assert counts[1] == pytest.approx(1000, rel=0.1)
    assert counts[0] + counts[1] == 10_000


def test_verdicts_go_by_the_tolerances() -> None:
    assert verdict("request_mean_s", 11.4, 10.0) == "within"
    assert verdict("request_mean_s", 11.6, 10.0) == "x1.16"
    assert verdict("request_mean_s", 8.4, 10.0) == "x0.84"
    assert verdict("prefill_p99_s", 3.4, 10.0) == "within"
    assert verdict("prefill_p99_s", 3.3, 10.0) == "x0.33"
    assert verdict("preemption_loss_s", 0.14, 0.0) == "within"
    assert verdict("preemption_loss_s", 0.4, 0.1) == "x4.00"
    assert verdict("avg_instances", 11.0, 11.6) == "within"
    assert verdict("avg_instances", 10.0, 11.6) == "x0.86"


def test_every_run_that_is_chosen_is_in_the_paper_but_round_robin() -> None:
    runs = list(llumnix.chosen(["11", "13", "14", "15"], 1))
    assert len({run.name for run in runs}) == len(runs) > 30
    for run in runs:
        rows = ("high", "normal") if run.figure == "13" else (run.row,)
        for row in rows if run.system != "Round-Robin" else ():
            known = PAPER[Key(run.figure, row, run.system, run.at)]
            assert known.keys() & TOLERANCES.keys(), run.name


@pytest.mark.parametrize("figure", ["11", "13", "14"])
def test_small_runs_give_every_figure_that_is_judged(figure: str) -> None:
    runs = [run for run in llumnix.chosen([figure], 1) if run.seed == 0][-2:]
    known = {run.name: llumnix.play(run, 40) for run in runs}
    series = series_of(known)
    judged = {metric for key in series for metric in PAPER.get(key, {}) if metric in TOLERANCES}
    for key, found in series.items():
        assert judged <= found.keys(), key
    assert any("within their tolerance" in line for line in claims(figure, series, PAPER))


def test_claims_are_of_medians_over_points() -> None:
    def runs(system: str, *seconds: float) -> dict[str, dict[str, dict[str, float]]]:
        figures = [{"prefill_p99_s": s, "preemption_loss_s": s / 10} for s in seconds]
        return {f"11/M-M/7.8/{system}/{seed}": {"M-M": of} for seed, of in enumerate(figures)}

    known = runs("Round-Robin", 500) | runs("INFaaS++", 100, 200, 300) | runs("Llumnix", 10, 20, 90)
    lines = "\n".join(claims("11", series_of(known), PAPER))
    assert "Round-Robin > INFaaS++: at 1 of 1" in lines
    assert "10.0 times (M-M 7.8)" in lines
    assert "90.0 % less on average" in lines


def test_a_report_has_what_its_tables_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def runs(system: str, *seconds: float) -> dict[str, dict[str, dict[str, float]]]:
        return {
            f"11/M-M/7.8/{system}/{seed}": {"M-M": {metric: at + s for at, metric in enumerate(TOLERANCES)}}
            for seed, s in enumerate(seconds)
        }

    series = series_of(runs("INFaaS++", 30, 10, 20) | runs("Llumnix", 3, 1, 2))
    assert from_json(to_json(series)) == series
    values = series[Key("11", "M-M", "Llumnix", 7.8)]["request_p99_s"]
    assert values == Values(median=3, least=2, most=4, first=4)
    (tmp_path / "r.json").write_text(json.dumps({"points": to_json(series)}))
    assert llumnix.main(["--show", str(tmp_path / "r.json")]) == 0
    assert "M-M 7.8, Llumnix" in capsys.readouterr().out


def test_an_interrupted_run_is_not_simulated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = next(llumnix.chosen(["11"], 1))
    path = tmp_path / "r.part"
    PartialResults(path).get(run.name, lambda: llumnix.play(run, 20))
    monkeypatch.setattr(llumnix, "play", lambda run: pytest.fail(f"{run.name} is simulated again"))
    assert llumnix.measure([run], False, PartialResults(path))["points"].keys() == {run.name[:-2]}


@pytest.mark.parametrize("context", [256, 2048])
def test_a_move_pauses_its_request_about_as_long_as_in_the_paper(context: int) -> None:
    theirs = PAPER[Key("10", "LLaMA-7B", "migration_downtime", float(context))]["ms"]
    assert move(context)["migration_downtime"] == pytest.approx(theirs, abs=5.0)
