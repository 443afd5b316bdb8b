"""`low_rank`: updates match float64, and their bits depend only on the row and its adapter."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels.low_rank import ALIGNMENT, DTYPES, add_low_rank, call
from hotswap.kernels.low_rank.sizes import TOGETHER

ALL = sorted(DTYPES, key=str)


def some(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(spans: list[tuple[int, int, int]]) -> Tensor:
    return torch.tensor(spans, dtype=torch.int32).view(-1, 3)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_rows_get_the_update_of_their_own_ranks(dtype: torch.dtype) -> None:
    @given(
        rows=st.integers(1, 20),
        width_in=st.integers(1, 200),
        width_out=st.integers(1, 200),
        seed=st.integers(0, 9),
    )
    def check(rows: int, width_in: int, width_out: int, seed: int) -> None:
        random = Random(seed)
        hidden, out = some(dtype, rows, width_in, seed=1), some(dtype, rows, width_out, seed=2)
        down, up = some(dtype, 48, width_in, seed=3), some(dtype, 48, width_out, seed=4)
        spans: list[tuple[int, int, int]] = []
        for row in random.sample(range(rows), random.randint(0, rows)):
            first = random.randrange(0, 48, ALIGNMENT)
            spans.append((row, first, random.randrange(first, 48, ALIGNMENT) + ALIGNMENT))
        expected, sizes = out.double(), out.double().abs()
        for row, first, last in spans:
            inner = hidden[row].double() @ down[first:last].double().t()
            most = hidden[row].double().abs() @ down[first:last].double().abs().t()
            expected[row] += inner @ up[first:last].double()
            sizes[row] += most @ up[first:last].double().abs()
        unchanged = [row for row in range(rows) if row not in {row for row, _, _ in spans}]
        before = out.clone()
        add_low_rank(hidden, out, down, up, ints(spans))
        assert ((out.double() - expected).abs() <= 3 * torch.finfo(dtype).eps * sizes).all()
        assert torch.equal(out[unchanged], before[unchanged])

    check()


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_the_bits_of_a_row_do_not_depend_on_other_rows_or_the_place_of_its_ranks(
    dtype: torch.dtype, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, out = some(dtype, 60, 520, seed=1), some(dtype, 60, 300, seed=2)
    down, up = some(dtype, 64, 520, seed=3), some(dtype, 64, 300, seed=4)
    down[40:64], up[40:64] = down[8:32], up[8:32]
    spans = [(row, 8, 8 + 8 * (1 + row % 3)) for row in range(0, 60, 2)]
    threads(1)
    together = out.clone()
    add_low_rank(hidden, together, down, up, ints(spans))
    for row, first, last in spans[::5]:
        for moved in (0, 32):
            lone = out[row : row + 1].clone()
            add_low_rank(hidden[row : row + 1], lone, down, up, ints([(0, first + moved, last + moved)]))
            assert torch.equal(lone[0], together[row])
    few = spans[: 4 * TOGETHER - 1]  # taken one by one
    all_of_them = [*spans, *((row, 8, 16) for row in range(1, 60, 2))]
    by_range = sorted(all_of_them, key=lambda span: span[1:])
    alone = out.clone()
    for span in all_of_them:
        add_low_rank(hidden, alone, down, up, ints([span]))
    threads(3)
    monkeypatch.setattr(call, "_SHARED_NUMBERS", 1)
    for _ in range(10):
        for order in (few, by_range, Random(0).sample(all_of_them, len(all_of_them))):
            shared, rows = out.clone(), [row for row, _, _ in order]
            add_low_rank(hidden, shared, down, up, ints(order))
            assert torch.equal(shared[rows], alone[rows])


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_rows_of_one_adapter_have_the_same_bits_together_and_alone(dtype: torch.dtype) -> None:
    count, before = 4 * TOGETHER + 3, 3  # groups of four are not aligned with the spans taken
    for width_in, width_out in ((77, 200), (1024, 40), (16, 1)):
        hidden, out = some(dtype, count, width_in, seed=1), some(dtype, count, width_out, seed=2)
        down, up = some(dtype, 24, width_in, seed=3), some(dtype, 24, width_out, seed=4)
        spans = [(row, 8 * (row >= before), 24) for row in range(count)]
        lone = out.clone()
        for span in spans:
            add_low_rank(hidden, lone, down, up, ints([span]))
        add_low_rank(hidden, out, down, up, ints(spans))
        assert torch.equal(out, lone)


def test_ranks_of_other_adapters_are_not_read() -> None:
    hidden, out = some(torch.float32, 20, 100), torch.zeros(20, 30)
    down, up = torch.full((40, 100), torch.nan), torch.full((40, 30), torch.nan)
    down[16:24], up[16:24] = 1.0, 1.0
    add_low_rank(hidden, out, down, up, ints([(row, 16, 24) for row in range(20)]))
    assert torch.allclose(out, 8 * hidden.sum(1, keepdim=True).expand(20, 30), atol=1e-4)


def test_rows_may_have_any_strides() -> None:
    hidden, down, up = some(torch.float32, 4, 200), some(torch.float32, 8, 100), some(torch.float32, 8, 30)
    found: list[Tensor] = []
    for rows in (hidden[:, ::2], hidden[:, ::2].clone(), hidden[:, :100], hidden[:, :100].clone()):
        found.append(torch.zeros(4, 30))
        add_low_rank(rows, found[-1], down, up, ints([(row, 0, 8) for row in range(4)]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])


def test_arguments_that_do_not_match_are_refused() -> None:
    fitting: dict[str, Any] = {
        "hidden": torch.ones(3, 20),
        "out": torch.ones(3, 10),
        "down": torch.ones(16, 20),
        "up": torch.ones(16, 10),
        "spans": ints([(0, 0, 8)]),
    }
    add_low_rank(**fitting)
    for name, wrong in (
        ("out", torch.ones(2, 10)),
        ("out", torch.ones(10, 3).t()),
        ("down", torch.ones(16, 21)),
        ("down", torch.ones(16, 20).half()),
        ("up", torch.ones(15, 10)),
        ("up", torch.ones(16, 11)),
        ("spans", ints([(0, 0, 8)]).long()),
        ("spans", ints([(0, 0, 8)])[:, :2]),
    ):
        with pytest.raises(ConfigError, match="do not fit"):
            add_low_rank(**(fitting | {name: wrong}))
    with pytest.raises(ConfigError, match="float64"):
        add_low_rank(
            *(tensor.double() if tensor.is_floating_point() else tensor for tensor in fitting.values())
        )
