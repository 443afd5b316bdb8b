"""Rows of a product of attention have the bits that they have among any others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from hotswap.backends.torch import rounding
from hotswap.backends.torch.device import multiplies_bf16
from hotswap.backends.torch.rounding import keys_across, least_rows

CPU = torch.device("cpu")


@pytest.mark.parametrize("threads", [1, 2])
@given(
    st.integers(0, 1 << 32),
    st.tuples(st.integers(1, 6), st.integers(1, 8)),
    st.integers(2, 32).map(lambda eighth: 8 * eighth),
    st.integers(1, 40).map(lambda blocks: 16 * blocks),
    st.integers(1, 40),
)
def test_rows_that_are_filled_up_are_rounded_as_among_many(
    threads: int, seed: int, batch: tuple[int, int], width: int, num_keys: int, num_rows: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        _compare(seed, batch, width, num_keys, num_rows)
    finally:
        torch.set_num_threads(before)


def _compare(seed: int, batch: tuple[int, int], width: int, num_keys: int, num_rows: int) -> None:
    torch.manual_seed(seed)
    least = least_rows(CPU, torch.get_num_threads(), torch.float32)
    keys, values = torch.randn(*batch, num_keys, width), torch.randn(*batch, min(num_keys, 128), width)
    queries, weights = torch.randn(*batch, 70, width), torch.rand(*batch, 70, values.shape[-2])
    columns = keys.transpose(-1, -2)
    kept = columns.contiguous() if keys_across(torch.float32, least) else columns
    for left, right, many in ((queries, kept, queries @ columns), (weights, values, weights @ values)):
        few = functional.pad(left[..., :num_rows, :], (0, 0, 0, max(0, least - num_rows)))
        assert torch.equal((few @ right)[..., :num_rows, :], many[..., :num_rows, :])


def test_a_cpu_that_rounds_four_rows_in_another_way_gets_more(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = rounding._Rounding(few_rows=False, columns=False)
    monkeypatch.setattr(rounding, "_tried", lambda threads: refused)
    assert [least_rows(CPU, threads, torch.float32) for threads in (1, 2)] == [8, 12]
    assert not keys_across(torch.float32, 8)


def test_other_dtypes_and_devices_go_by_what_was_measured() -> None:
    assert least_rows(CPU, 1, torch.bfloat16) == (2 if multiplies_bf16() else 4)
    assert least_rows(torch.device("cuda"), 1, torch.float32) == 0
    assert not keys_across(torch.bfloat16, 8)
    assert not keys_across(torch.float32, 2), "two rows are multiplied by keys as they lie"


def test_trying_it_out_leaves_the_callers_threads_alone() -> None:
    before = torch.get_num_threads()
    rounding._tried.cache_clear()
    least_rows(CPU, before + 1, torch.float32)
    assert torch.get_num_threads() == before
