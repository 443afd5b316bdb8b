"""Aegaeon (SOSP 2025): its example of quotas, and that a round makes the tokens that the formula gives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap.policies import quotas

SPEEDS = st.lists(st.floats(0.5, 40.0), min_size=1, max_size=8)


def test_three_models_that_are_four_times_as_fast_as_they_must_be() -> None:
    """n = 4 three times and three seconds of switches: alpha is 0.9375, a turn four seconds."""
    turns = quotas([4, 4, 4], 3.0, max_quota_s=4.0)
    assert turns.alpha == 0.9375
    assert turns.quotas_s == (4.0, 4.0, 4.0)
    assert turns.attainment == 1.0


@given(SPEEDS, st.floats(0.01, 20.0), st.floats(0.5, 8.0))
def test_a_round_makes_the_promised_share_of_the_tokens_that_are_due_in_it(
    n: list[float], c: float, max_quota_s: float
) -> None:
    """In its turn a model makes `n_i` times the tokens due in it, and is due tokens all round long."""
    turns = quotas(n, c, max_quota_s=max_quota_s)
    round_s = c + sum(turns.quotas_s)
    for n_i, quota_s in zip(n, turns.quotas_s, strict=True):
        assert n_i * quota_s / round_s == pytest.approx(1 / turns.alpha)
        assert quota_s <= max_quota_s * (1 + 1e-9)


@given(SPEEDS, st.floats(0.01, 20.0))
def test_no_turn_is_longer_than_it_need_be(n: list[float], c: float) -> None:
    """Longer ones switch less and so make more tokens, until alpha is 0.5, where more are of no use."""
    turns = quotas(n, c, max_quota_s=4.0)
    assert max(turns.quotas_s) == pytest.approx(4.0) or turns.alpha == 0.5


def test_more_work_than_an_engine_can_do_is_shared_evenly() -> None:
    turns = quotas([1.0, 1.0, 1.0], 1.0)
    assert turns.quotas_s == (4.0, 4.0, 4.0)
    assert turns.attainment == pytest.approx(4.0 / 13.0)
    assert quotas([40.0], 1.0).attainment == 1.0
