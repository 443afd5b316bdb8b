"""Cuts keep exactly what they should, and a draw is the inverse of the cumulative sum, at any size."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from hotswap.backends.torch.distribution import (
    Workspace,
    cut_together,
    draw,
    keep_from,
    to_weights,
    top_k_threshold,
    top_p_threshold,
    uniform,
)

sizes = st.sampled_from([1, 2, 7, 511, 512, 513, 5000, 40_000])
scales = st.sampled_from([0.0, 0.01, 1.0, 3.0, 10.0, 100.0])


def logits_of(size: int, scale: float, seed: int, *, rounded: bool = False) -> Tensor:
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(seed)) * scale
    return logits.round() if rounded else logits


def weights_of(logits: Tensor, temperatures: list[float]) -> Tensor:
    rows = Workspace().rows(len(logits), logits.shape[1], logits.device)
    rows.copy_(logits)
    to_weights(rows, temperatures, rows.amax(-1))
    return rows


@given(size=sizes, scale=scales, seed=st.integers(0, 99), rounded=st.booleans(), p=st.floats(1e-3, 0.999999))
@example(size=5000, scale=0.0, seed=0, rounded=False, p=0.5)
def test_top_p_keeps_the_fewest_weights_that_reach_their_part(
    size: int, scale: float, seed: int, rounded: bool, p: float
) -> None:
    weights = weights_of(logits_of(size, scale, seed, rounded=rounded), [1.0])[0]
    threshold = top_p_threshold(weights, p, Workspace())
    total, slack = weights.double().sum(), 1e-5  # of sums in fp32
    kept = weights[weights >= threshold].double().sum() / total
    without = weights[weights > threshold].double().sum() / total
    assert threshold in weights
    assert kept >= p - slack
    assert without < p + slack


@given(size=sizes, scale=scales, seed=st.integers(0, 99), k=st.integers(1, 6000))
def test_top_k_keeps_k_weights_and_those_that_equal_the_last(
    size: int, scale: float, seed: int, k: int
) -> None:
    weights = weights_of(logits_of(size, scale, seed, rounded=True), [1.0])[0]
    threshold = top_k_threshold(weights, k)
    assert int((weights >= threshold).sum()) >= min(k, size)
    assert k >= size or int((weights > threshold).sum()) < k


cuts = st.tuples(
    st.sampled_from([0, 1, 5, 600, 50_000]),
    st.sampled_from([1.0, 0.999, 0.5, 0.01]),
    st.sampled_from([0.0, 0.1]),
)


@given(size=sizes, scale=scales, seed=st.integers(0, 99), cuts=st.lists(cuts, min_size=1, max_size=4))
def test_rows_that_are_cut_together_keep_what_each_keeps_alone(
    size: int, scale: float, seed: int, cuts: list[tuple[int, float, float]]
) -> None:
    logits = torch.cat([logits_of(size, scale, seed + row) for row in range(len(cuts))])
    weights = weights_of(logits, [1.0] * len(cuts))
    together = weights.clone()
    cut_together(together, *zip(*cuts, strict=True))
    for row, mine, (k, p, part) in zip(weights, together, cuts, strict=True):
        keep_from(row, top_k_threshold(row, k))
        keep_from(row, part * float(row.amax()))
        slack = 1e-5 if p < 1 else 0.0  # of sums in fp32
        kept, reached = mine > 0, mine.double().sum() / row.double().sum()
        assert torch.equal(mine[kept], row[kept])
        assert reached >= min(p, 1 - slack) - slack or part
        if p == 1:
            assert torch.equal(mine, row)
        else:
            least = mine[kept].min()
            assert torch.equal(kept, row >= least)
            assert (row[row > least].double().sum() / row.double().sum()) < p + slack


@given(size=sizes, scale=scales, seed=st.integers(0, 99), parts=st.lists(st.floats(0, 1, exclude_max=True)))
@example(size=5000, scale=100.0, seed=0, parts=[0.0, 1 - 2**-53])
@example(size=513, scale=0.0, seed=0, parts=[0.0, 0.5, 1 - 2**-53])
def test_a_draw_inverts_the_cumulative_sum(size: int, scale: float, seed: int, parts: list[float]) -> None:
    if not parts:
        return
    weights = weights_of(logits_of(size, scale, seed).repeat(len(parts), 1), [1.0] * len(parts))
    sums = weights[0].double().cumsum(-1) / weights[0].double().sum()
    for token, part in zip(draw(weights, parts).tolist(), parts, strict=True):
        assert weights[0, token] > 0
        assert sums[token] >= part - 1e-5
        assert token == 0 or sums[token - 1] <= part + 1e-5


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-3, 0.5, 1.0, 50.0, 1e6])
def test_weights_are_finite_at_any_temperature(temperature: float) -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0, -math.inf, 3e38, -3e38]])
    weights = weights_of(logits, [temperature])
    assert weights.isfinite().all()
    assert weights.sum() == pytest.approx(1)
    assert weights[0, 3] == 0
    assert weights.argmax() == 4


def test_numbers_of_neighbouring_seeds_and_positions_are_independent_and_uniform() -> None:
    grid = torch.tensor(
        [[uniform(seed, index) for index in range(200)] for seed in range(-100, 100)], dtype=torch.float64
    )
    assert float(grid.min()) >= 0
    assert float(grid.max()) < 1
    counts = torch.histc(grid, bins=100, min=0, max=1)
    # Chi-square with 99 degrees of freedom: 160 has a probability of one in ten thousand.
    assert float(((counts - 400) ** 2 / 400).sum()) < 160
    centred = grid - 0.5
    for shifted in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1], centred.T * centred):
        assert abs(float(shifted.mean())) < 5 * (1 / 12) / shifted.numel() ** 0.5
