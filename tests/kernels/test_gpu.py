"""The FP8 kernels on a GPU compute the same as the float64 reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hotswap.kernels.fp8_gemm import (
    Fp8Product,
    Fp8Weight,
    Tile,
    Workspace,
    choose,
    fp8_linear,
    fp8_linear_reference,
    pack,
    warm_up,
)
from hotswap.kernels.targets import device_of, runs_triton
from tests.kernels.fp8_weights import BOUNDS, error, every_value, input_of, weight_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

DTYPES = [torch.bfloat16, torch.float16]
# Bounds of the dense path: PyTorch allows cuBLAS to sum parts of K in 16 bits.
DENSE_BOUNDS = {torch.bfloat16: 3.5e-3, torch.float16: 4.5e-4}


def on_gpu(weight: Fp8Weight) -> Fp8Weight:
    return pack(replace(weight, qweight=weight.qweight.cuda(), scales=weight.scales.cuda()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [128, None])
@pytest.mark.parametrize("shape", [(1280, 8192), (4096, 1024), (1000, 1100)])
@pytest.mark.parametrize("scale_bits", [4, 24])
def test_products_match_float64_and_repeat_bit_for_bit(
    scale_bits: int, shape: tuple[int, int], group: int | None, dtype: torch.dtype
) -> None:
    weight, space = weight_of(*shape, group, dtype, scale_bits=scale_bits), Workspace(torch.device("cuda"))
    packed = on_gpu(weight)
    assert runs_triton(packed.qweight.device)
    warm_up([(packed, None)], dtype, space)
    for rows in (1, 7, 17, 33, 64, 100, 300, 700):
        x = input_of(rows, shape[1], dtype)
        found = fp8_linear(x.cuda(), packed, workspace=space)
        tile = choose(rows, shape, str(dtype).removeprefix("torch."), group, device_of(packed.qweight.device))
        bound = (BOUNDS if tile.path == "fused" else DENSE_BOUNDS)[dtype]
        assert error(found.cpu(), fp8_linear_reference(x, weight)) <= bound
        assert torch.equal(fp8_linear(x.cuda(), packed, workspace=space), found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_finite_value_is_multiplied_exactly(dtype: torch.dtype) -> None:
    """The input is the identity, so each sum has one nonzero term."""
    weight = replace(every_value(), qweight=every_value().qweight.repeat(16, 1), scales=torch.ones(64, 1))
    found = fp8_linear(torch.eye(64, dtype=dtype).cuda(), on_gpu(weight))
    assert torch.equal(found.cpu().T.double(), fp8_linear_reference(torch.eye(64), weight).T)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1280, 8192), (1000, 1100)])
def test_launches_that_are_kept_give_the_same_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, space = on_gpu(weight_of(*shape, 128, dtype)), Workspace(torch.device("cuda"))
    for bias in (None, input_of(1, shape[0], dtype)[0].cuda()):
        product = Fp8Product(weight, bias, space)
        for rows in (1, 7, 17, 1, 33, 300, 700, 7):
            x = input_of(rows, shape[1], dtype, seed=rows).cuda()
            expected = fp8_linear(x, weight, bias)
            assert torch.equal(product(x), expected)
            assert torch.equal(product(x.view(1, rows, -1)), expected[None])
            odd = torch.cat((x[:, :1], x), dim=1)[:, 1:]
            assert torch.equal(product(odd), expected), "rows that are neither aligned nor contiguous"


def test_the_dense_path_adds_a_bias_in_every_block() -> None:
    shape = (5000, 14336)
    weight, bias = weight_of(*shape, 128, torch.bfloat16), input_of(1, shape[0], torch.bfloat16)[0]
    x = input_of(65, shape[1], torch.bfloat16)
    found = fp8_linear(x.cuda(), on_gpu(weight), bias.cuda(), tile=Tile(path="dense"))
    assert error(found.cpu(), fp8_linear_reference(x, weight, bias)) <= DENSE_BOUNDS[torch.bfloat16]
