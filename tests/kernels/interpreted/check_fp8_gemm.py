"""The kernels of `fp8_gemm` in Triton's interpreter, against float64; run by `test_interpreted`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels.fp8_gemm import (
    Fp8Product,
    Fp8Weight,
    Tile,
    Workspace,
    dequantize_rows,
    dequantized,
    fp8_linear,
    fp8_linear_reference,
    pack,
)
from hotswap.kernels.fp8_gemm.kernel import convert_words
from tests.kernels.fp8_weights import BOUNDS, DEQUANTIZED_BOUNDS, error, every_value, input_of, weight_of

TRITON: dict[torch.dtype, Any] = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
DTYPES = list(TRITON)
SMALL = Tile(16, 32, 64)


def run(x: Tensor, weight: Fp8Weight, tile: Tile, bias: Tensor | None = None, **more: Any) -> Tensor:
    """Return the product in memory that was filled with NaN, so that missing results are noticed."""
    dtype: torch.dtype = more.pop("dtype", x.dtype)
    out = torch.full((len(x), len(weight.qweight)), torch.nan, dtype=dtype)
    return fp8_linear(x, pack(weight), bias, tile=tile, out=out, **more)


@triton.jit  # type: ignore[untyped-decorator]
def convert_kernel(words_ptr: Any, out_ptr: Any, DTYPE: tl.constexpr, REBIAS: tl.constexpr) -> None:
    rows = tl.arange(0, 4)
    words = tl.load(words_ptr + rows[:, None] * 16 + tl.arange(0, 16)[None, :])
    places = out_ptr + rows[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(places, convert_words(words, DTYPE, REBIAS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rebias", [True, False])
def test_every_finite_value_is_converted_exactly(dtype: torch.dtype, rebias: bool) -> None:
    out = torch.full((4, 64), torch.nan, dtype=dtype)
    convert_kernel[(1,)](pack(every_value()).qweight, out, DTYPE=TRITON[dtype], REBIAS=rebias)
    factor = 1.0 if rebias else 2.0 ** (120 if dtype is torch.bfloat16 else 8)
    wanted = dequantized(every_value())
    assert torch.equal(out.double() * factor, wanted)
    assert torch.equal(out.signbit(), wanted.signbit())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_stay_zeros_however_large_the_input_is(dtype: torch.dtype) -> None:
    weight = weight_of(32, 128, 64, dtype)
    values = weight.qweight.view(torch.uint8)
    values[::2] = 0
    values[2::4] = 0x80
    out = run(input_of(3, 128, dtype) * 1000, weight, SMALL, dtype=torch.float32)
    assert (out[:, ::2] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights_left", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_the_error_is_that_of_rounding_the_result(dtype: torch.dtype, weights_left: bool, parts: int) -> None:
    weight, x = weight_of(192, 384, 128, dtype), input_of(24, 384, dtype)
    found = run(x, weight, Tile(32, 64, 128, parts=parts, weights_left=weights_left))
    assert error(found, fp8_linear_reference(x, weight)) <= BOUNDS[dtype]


@settings(max_examples=40)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(16, 80),
    width=st.one_of(st.integers(16, 300), st.sampled_from([64, 128, 256])),
    group=st.sampled_from([32, 64, 128, None]),
    parts=st.sampled_from([1, 2, 3, 8]),
    weights_left=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
)
def test_products_of_any_size_match_float64_and_repeat_bit_for_bit(
    rows: int,
    columns: int,
    width: int,
    group: int | None,
    parts: int,
    weights_left: bool,
    dtype: torch.dtype,
    with_bias: bool,
) -> None:
    weight = weight_of(columns, width, group, dtype, seed=rows)
    x = input_of(rows, width, dtype)
    bias = input_of(1, columns, dtype)[0] if with_bias else None
    tile = Tile(16 if rows <= 16 else 32, 32, 64, parts=parts, weights_left=weights_left)
    right, space = fp8_linear_reference(x, weight, bias), Workspace(x.device)
    found = run(x, weight, tile, bias, workspace=space, dtype=torch.float32)
    assert error(found, right) <= 3e-6, "a few numbers may cancel out"
    assert torch.equal(run(x, weight, tile, bias, workspace=space), found.to(dtype)), "rounded once"
    assert torch.equal(run(x, weight, tile, bias, workspace=space, dtype=torch.float32), found)
    assert not space.counters(0).any(), "counters are zero again for the next product"


def test_a_workspace_is_reused_by_products_of_many_sizes() -> None:
    space = Workspace(torch.device("cpu"))
    for rows, columns, parts in ((3, 96, 3), (33, 40, 2), (1, 96, 4), (3, 96, 3)):
        weight, x = weight_of(columns, 256, 64, torch.float16), input_of(rows, 256, torch.float16)
        tiles = triton.cdiv(rows, 16) * triton.cdiv(columns, 32)
        space.sums(tiles * parts * 16 * 32).fill_(torch.nan)  # earlier content must not matter
        found = run(x, weight, Tile(16, 32, 64, parts=parts), workspace=space)
        assert error(found, fp8_linear_reference(x, weight)) <= BOUNDS[torch.float16]


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("weights_left", [False, True])
def test_nothing_outside_the_result_is_written(parts: int, weights_left: bool) -> None:
    weight, x = weight_of(40, 192, 64, torch.float16), input_of(5, 192, torch.float16)
    around = torch.full((9, 56), 7.0, dtype=torch.float16)
    out = around[2:7, 8:48]
    tile = Tile(16, 32, 64, parts=parts, weights_left=weights_left)
    fp8_linear(x, pack(weight), tile=tile, out=out)
    assert error(out, fp8_linear_reference(x, weight)) <= BOUNDS[torch.float16]
    out.fill_(7.0)
    assert (around == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [64, 128, None])
def test_the_dequantization_kernel_is_exact(dtype: torch.dtype, group: int | None) -> None:
    weight = weight_of(40, 300, group, dtype)
    identity = torch.eye(300, dtype=dtype)
    found = fp8_linear(identity, pack(weight), tile=Tile(path="dense"))
    assert torch.equal(found.T, dequantize_rows(weight, slice(None), dtype))


@pytest.mark.parametrize("rows", [1, 17, 40, 65, 600])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("scale_bits", "bounds"), [(4, BOUNDS), (24, DEQUANTIZED_BOUNDS)])
def test_the_chosen_path_is_correct_for_any_number_of_rows(
    scale_bits: int, bounds: Mapping[torch.dtype, float], dtype: torch.dtype, rows: int
) -> None:
    weight, x = weight_of(96, 256, 128, dtype, scale_bits=scale_bits), input_of(rows, 256, dtype)
    found = fp8_linear(x.view(1, rows, 256), pack(weight))
    assert found.shape == (1, rows, 96)
    assert error(found[0], fp8_linear_reference(x, weight)) <= bounds[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_has_the_bits_of_the_function(dtype: torch.dtype) -> None:
    weight, bias = pack(weight_of(96, 256, 128, dtype)), input_of(1, 96, dtype)[0]
    product = Fp8Product(weight, bias, Workspace(torch.device("cpu")))
    for rows in (3, 0, 17, 600, 3):
        x = input_of(rows, 256, dtype)
        assert torch.equal(product(x.view(1, rows, 256)), fp8_linear(x, weight, bias)[None])
    with pytest.raises(ConfigError, match="x is"):
        product(input_of(2, 128, dtype))


def test_unaligned_inputs_give_the_same_bits() -> None:
    weight, x = weight_of(32, 128, 64, torch.float16), input_of(4, 130, torch.float16)
    odd = x[:, 1:129]
    assert torch.equal(run(odd, weight, SMALL), run(odd.clone(), weight, SMALL))
