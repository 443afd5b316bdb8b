"""Aegaeon (SOSP 2025) in virtual time: turns keep tokens on time for more models than whole requests do."""

from __future__ import annotations

import pytest

from benchmarks.aegaeon import SYSTEMS, TURNS, Tally, held, play, promised, trace_of
from hotswap.simulation import Trace, TraceRequest


@pytest.fixture(scope="module")
def tallies() -> dict[str, Tally]:
    """Five models an engine, answers twice as long as ShareGPT's, half a minute after the warm-up."""
    trace = trace_of(5, 1, 90.0, longer=2)
    return {name: play(trace, scheduler) for name, scheduler in SYSTEMS.items()}


def test_turns_make_the_share_of_tokens_of_the_formula(tallies: dict[str, Tally]) -> None:
    figures = tallies["turns"].figures()
    assert figures["tokens_on_time"] >= promised(5).attainment - 0.05


def test_with_whole_requests_more_first_tokens_come_late(tallies: dict[str, Tally]) -> None:
    """A request for an idle model waits for a whole request of each model before it."""
    first = {name: tally.figures()["first_tokens_on_time"] for name, tally in tallies.items()}
    assert first["turns"] > first["whole requests"] + 0.1
    assert tallies["turns"].num_swaps > tallies["whole requests"].num_swaps


def test_every_token_is_counted_and_a_lone_request_is_on_time() -> None:
    lone = TraceRequest(arrive_s=70.0, model="m00", prompt_tokens=100, output_tokens=50)
    early = TraceRequest(arrive_s=1.0, model="m00", prompt_tokens=100, output_tokens=50)
    tally = play(Trace((early, lone)), TURNS)
    assert (tally.num_tokens, tally.num_on_time) == (50, 50), "the warm-up does not count"
    assert (tally.num_requests, tally.num_first_on_time) == (1, 1)


def test_a_number_of_models_is_held_if_all_below_it_are() -> None:
    def point(*shares: float) -> dict[str, dict[str, dict[str, list[float]]]]:
        return {"systems": {"turns": {"tokens_on_time": list(shares)}}}

    points = {"10": point(0.95), "2": point(1.0, 0.5, 0.9), "4": point(0.89)}
    assert held(points, "turns", "tokens_on_time") == 2
