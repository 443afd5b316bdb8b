"""`recurrent`: layers match float64, and their bits depend neither on cuts, other requests nor threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels.recurrent import (
    DTYPES,
    Spans,
    call,
    convolve,
    delta_rule,
    selective_scan,
    softplus,
    state_space,
)
from hotswap.kernels.recurrent.reference import (
    convolve_reference,
    delta_rule_reference,
    selective_scan_reference,
    state_space_reference,
)

T, SLOTS = 40, 6


def some(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def spans_of(*rows: tuple[int, int, int, int]) -> Spans:
    table = torch.tensor(rows, dtype=torch.int32).view(-1, 4)
    return Spans(table, int((table[:, 2] - table[:, 1]).sum()))


class Layer:
    """A kernel with the inputs of `T` rows; rows can be computed in any order of spans."""

    def __init__(
        self,
        kernel: Callable[..., Tensor],
        reference: Callable[..., Tensor],
        by_row: tuple[Tensor, ...],
        states: Tensor,
        fixed: Callable[[tuple[Tensor, ...]], tuple[Any, ...]] = tuple,
    ) -> None:
        self.kernel, self.reference, self.by_row, self.states, self.fixed = (
            kernel, reference, by_row, states, fixed,
        )  # fmt: skip

    def run(self, rows: list[int], spans: Spans, states: Tensor, *, by: str = "kernel") -> Tensor:
        taken = tuple(one[rows] for one in self.by_row)
        made: Tensor = getattr(self, by)(*self.fixed(taken), states, spans)
        return made


def convolution(dtype: torch.dtype, *, width: int = 70, taps: int = 4, silu: bool = True) -> Layer:
    weight, bias = some(width, taps, seed=2, dtype=dtype), some(width, seed=3, dtype=dtype)
    return Layer(
        partial(convolve, silu=silu),
        partial(convolve_reference, silu=silu),
        (some(T, width, seed=1, dtype=dtype),),
        some(SLOTS, taps - 1, width, seed=4, dtype=dtype),
        lambda taken: (*taken, weight, bias if silu else None),
    )


def delta(*, per_key: bool, heads: int = 4, key_heads: int = 2) -> Layer:
    decays = some(T, heads, 24, seed=4) if per_key else some(T, heads, seed=4)
    return Layer(
        delta_rule,
        delta_rule_reference,
        (
            some(T, key_heads, 24, seed=1),
            some(T, key_heads, 24, seed=2),
            some(T, heads, 20, seed=3),
            -decays.abs(),
            some(T, heads, seed=5).sigmoid(),
        ),
        some(SLOTS, heads, 24, 20, seed=6),
    )


def space() -> Layer:
    return Layer(
        state_space,
        state_space_reference,
        (some(T, 6, 20, seed=1), -some(T, 6, seed=2).abs(), some(T, 3, 16, seed=3), some(T, 3, 16, seed=4)),
        some(SLOTS, 6, 16, 20, seed=5),
    )


def scan(*, width: int = 530) -> Layer:
    rates = -some(width, 9, seed=3).exp()
    return Layer(
        selective_scan,
        selective_scan_reference,
        (some(T, width, seed=1), some(T, width, seed=2).abs(), some(T, 9, seed=4), some(T, 9, seed=5)),
        some(SLOTS, 9, width, seed=6),
        lambda taken: (taken[0], taken[1], rates, taken[2], taken[3]),
    )


LAYERS: dict[str, Callable[[], Layer]] = {
    "convolution": lambda: convolution(torch.float32),
    "convolution of many channels": lambda: convolution(torch.float32, width=1100, taps=3, silu=False),
    "delta rule": lambda: delta(per_key=False),
    "delta rule with a decay per key": lambda: delta(per_key=True, key_heads=4),
    "state space": space,
    "selective scan": scan,
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_match_float64(name: str) -> None:
    layer = LAYERS[name]()
    spans = spans_of((3, 2, 12, 0), (0, 12, 13, 1), (5, 13, 37, 1), (1, 37, 38, 0))
    rows = list(range(T))
    mine, theirs = layer.states.clone(), layer.states.double()
    found, expected = layer.run(rows, spans, mine), layer.run(rows, spans, theirs, by="reference")
    used = slice(2, 38)
    torch.testing.assert_close(found[used].double(), expected[used], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(mine.double(), theirs, rtol=2e-5, atol=2e-5)
    assert torch.equal(mine[[2, 4]], layer.states[[2, 4]])


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_a_convolution_rounds_once_and_once_after_its_activation(dtype: torch.dtype) -> None:
    layer = convolution(dtype)
    spans = spans_of((3, 0, 30, 0))
    found = layer.run(list(range(T)), spans, layer.states.clone())[:30].double()
    expected = layer.run(list(range(T)), spans, layer.states.double(), by="reference")[:30]
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=8 * eps, atol=16 * eps)


@pytest.mark.parametrize("name", LAYERS)
def test_bits_depend_neither_on_cuts_nor_on_other_requests_nor_on_threads(
    name: str, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "_SHARED_NUMBERS", 0)
    layer, random = LAYERS[name](), Random(1)
    threads(1)
    whole = layer.states.clone()
    expected = layer.run(list(range(T)), spans_of((2, 0, T, 1)), whole)
    for num_threads in (1, 3):
        threads(num_threads)
        states, at = layer.states.clone(), 0
        while at < T:
            count = min(random.choice([1, 1, 2, 3, 7, 11]), T - at)
            before, after = random.randint(0, 3), random.randint(0, 3)
            # Rows of other requests around those of the request.
            rows = [*range(before), *range(at, at + count), *range(after)]
            others = [
                (slot, number, number + 1, 0) for slot, number in zip((0, 3, 5), range(before), strict=False)
            ]
            mine = (2, before, before + count, int(at == 0))
            found = layer.run(rows, spans_of(*others, mine), states)
            assert torch.equal(found[before : before + count], expected[at : at + count]), (at, count)
            at += count
        assert torch.equal(states[2], whole[2])


def test_the_bits_of_a_softplus_do_not_depend_on_its_place(threads: Callable[[int], None]) -> None:
    values = torch.cat([some(5000, seed=1) * 10, torch.tensor([25.0, -90.0, 0.0])])
    threads(1)
    found = softplus(values)
    torch.testing.assert_close(found, torch.nn.functional.softplus(values))
    threads(3)
    for first, end in ((0, 1), (17, 300), (4999, 5003)):
        assert torch.equal(softplus(values[first:end]), found[first:end])


def test_tensors_that_do_not_fit_are_refused() -> None:
    layer = convolution(torch.float32)
    with pytest.raises(ConfigError, match="fit together"):
        layer.run([0, 1], spans_of((0, 0, 2, 1)), layer.states[:, :1])
    with pytest.raises(ConfigError, match="fit together"):
        delta(per_key=False).run([0, 1], spans_of((0, 0, 2, 1)), torch.zeros(SLOTS, 4, 24, 21))
    with pytest.raises(ConfigError, match="fit together"):
        space().run([0, 1], spans_of((0, 0, 2, 1)), torch.zeros(SLOTS, 6, 16, 20).double())
    with pytest.raises(ConfigError, match="fit together"):
        scan().run([0, 1], spans_of((0, 0, 2, 1)), torch.zeros(SLOTS, 9, 531))
    with pytest.raises(ConfigError, match="float64"):
        call.compile_for(torch.float64)
