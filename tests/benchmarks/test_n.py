"""Eight samples of a prompt compute it once; eight requests with prompts of their own compute each."""

from __future__ import annotations

from benchmarks.n import measure


def test_samples_compute_their_prompt_once() -> None:
    report = measure(repeats=2, prompt=320, samples=8, hidden=128, layers=2)
    tokens = report["prefill_tokens"]
    assert tokens["one"] == [320, 320]
    assert max(tokens["samples"]) <= 320 + 7 * 32
    assert tokens["separate"] == [8 * 320, 8 * 320]
    assert report["distinct_samples"] > 1
    assert min(figure for series in report["first_tokens_s"].values() for figure in series) > 0
