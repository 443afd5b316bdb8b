"""In `BatchInvariantMode` functions that multiply by weights are right, and round a row independently."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from hotswap.backends.torch import batch_invariant
from hotswap.backends.torch.batch_invariant import BatchInvariantMode

NUM_ROWS = 140

# Each multiplies rows by a weight `[out, in]`, in the layout it needs, with or without a bias.
FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda rows, weight, bias: functional.linear(rows, weight, bias),
    "linear of a row": lambda rows, weight, bias: functional.linear(rows[None], weight, bias)[0],
    "addmm": lambda rows, weight, bias: torch.addmm(bias, rows, weight.t().contiguous()),
    "mm": lambda rows, weight, _: torch.mm(rows, weight.t()),
    "@": lambda rows, weight, _: rows @ weight.t(),
    "matmul": lambda rows, weight, _: rows[None].matmul(weight.t())[0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_bits_of_a_row_do_not_depend_on_other_rows(name: str, dtype: torch.dtype) -> None:
    multiply = FUNCTIONS[name]

    @given(outputs=st.integers(1, 1100), inputs=st.integers(1, 1100), rows=st.integers(1, NUM_ROWS))
    def check(outputs: int, inputs: int, rows: int) -> None:
        hidden, weight, bias = _random(dtype, (NUM_ROWS, inputs), (outputs, inputs), (outputs,))
        with BatchInvariantMode():
            whole, part = multiply(hidden, weight, bias), multiply(hidden[:rows], weight, bias)
        assert torch.equal(part, whole[:rows])
        torch.testing.assert_close(whole, multiply(hidden, weight, bias), atol=1e-3, rtol=2e-2)

    check()


@pytest.mark.parametrize("transposed", [False, True])
@given(counts=st.lists(st.integers(0, 30), min_size=1, max_size=5), extra=st.integers(0, 3))
def test_the_rows_of_an_expert_do_not_depend_on_those_of_others(
    counts: list[int], extra: int, transposed: bool
) -> None:
    rows, weights = _random(torch.float32, (sum(counts) + extra, 300), (len(counts), 200, 300))
    by = weights.transpose(1, 2).contiguous() if transposed else weights.transpose(1, 2)
    ends = list(accumulate(counts))
    with BatchInvariantMode():
        out = functional.grouped_mm(rows, by, offs=torch.tensor(ends, dtype=torch.int32))
        first = 0
        for weight, last in zip(weights, ends, strict=True):
            for row in range(first, last):
                assert torch.equal(out[row : row + 1], functional.linear(rows[row : row + 1], weight))
            first = last
    assert out[first:].eq(0).all(), "rows of no expert"


def test_other_products_are_computed_as_usual() -> None:
    rows, weight, bias = _random(torch.float64, (3, 8), (4, 8), (4,))
    batch, keys = _random(torch.float32, (2, 3, 8), (2, 8, 5))
    empty = torch.zeros(0, 8)

    def computed() -> list[Tensor]:
        return [
            functional.linear(rows, weight, bias),
            torch.addmm(bias, rows, weight.t(), alpha=2),
            torch.matmul(batch, keys),
            functional.linear(empty, weight.float()),
            torch.matmul(rows[0], weight[0]),
        ]

    with BatchInvariantMode():
        inside = computed()
    assert all(torch.equal(one, other) for one, other in zip(inside, computed(), strict=True))


def test_a_product_of_mismatched_sizes_fails_as_usual() -> None:
    rows, weight = torch.zeros(3, 8), torch.zeros(4, 7)
    with BatchInvariantMode(), pytest.raises(RuntimeError):
        functional.linear(rows, weight)


def test_without_kernels_all_products_are_computed_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_invariant, "supported_dtypes", frozenset)
    rows, weight, bias = _random(torch.float32, (3, 8), (4, 8), (4,))
    with BatchInvariantMode():
        inside = functional.linear(rows, weight, bias)
    assert torch.equal(inside, functional.linear(rows, weight, bias))


def _random(dtype: torch.dtype, *shapes: tuple[int, ...]) -> Any:
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
