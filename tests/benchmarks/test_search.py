"""The search for the smallest number that is enough, and estimates from several of them."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.search import Estimate, smallest


@given(st.integers(1, 60), st.integers(0, 60), st.integers(-10, 140), st.integers(1, 130))
def test_it_finds_the_least_of_a_range_or_says_that_none_is_enough(
    low: int, width: int, guess: int, threshold: int
) -> None:
    high = low + width
    asked: list[int] = []

    def enough(number: int) -> bool:
        asked.append(number)
        return number >= threshold

    found = smallest(enough, low, high, guess=guess)
    assert found == (None if threshold > high else max(low, threshold))
    assert all(low <= number <= high for number in asked)
    assert len(asked) == len(set(asked)), "asked twice"


@given(st.integers(2, 1000), st.integers(-1, 1))
def test_a_good_guess_takes_four_trials_at_most(threshold: int, off: int) -> None:
    asked: list[int] = []

    def enough(number: int) -> bool:
        asked.append(number)
        return number >= threshold

    assert smallest(enough, 1, 2000, guess=threshold + off) == threshold
    assert len(asked) <= 4


def test_an_estimate_is_students() -> None:
    """Worked by hand: five figures with a standard deviation of 1.5811, 2.776 of its fifth root."""
    estimate = Estimate.of([1, 2, 3, 4, 5])
    assert (estimate.median, estimate.mean) == (3, 3)
    assert estimate.high - estimate.mean == pytest.approx(2.776 * 1.5811 / 5**0.5, rel=1e-4)
    assert estimate.mean - estimate.low == pytest.approx(estimate.high - estimate.mean)
    assert Estimate.of([4, 4, 4]).low == Estimate.of([4, 4, 4]).high == 4
    assert Estimate.of([4]).high == inf
