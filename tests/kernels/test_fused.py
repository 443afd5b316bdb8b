"""`fused`: norms match float64 rounded where PyTorch rounds; rotations have the bits of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels.fused import DTYPES, Scaling, call, rms_norm, rotate
from tests.kernels.test_packed_linear import same_bits, weight_of

ALL = sorted(DTYPES, key=str)


def scaled(normed: Tensor, weight: Tensor, scaling: Scaling) -> Tensor:
    """Apply the weights of an RMSNorm as a model does, with the rounding of PyTorch."""
    if scaling is Scaling.CAST_FIRST:
        return normed.to(weight.dtype) * weight
    factors = weight.double() + (1 if scaling is Scaling.ONE_PLUS else 0)
    return (normed * factors).to(weight.dtype)


@pytest.mark.parametrize("scaling", Scaling)
@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_norms_match_float64(dtype: torch.dtype, scaling: Scaling) -> None:
    @given(
        rows=st.integers(1, 40),
        width=st.integers(1, 300),
        size=st.sampled_from([1e-4, 1.0, 1e4]),
        epsilon=st.sampled_from([1e-6, 1e-5, 1e-2]),
    )
    def check(rows: int, width: int, size: float, epsilon: float) -> None:
        hidden, weight = weight_of(rows, width, dtype) * size, weight_of(1, width, dtype, seed=1)[0]
        found = rms_norm(hidden, weight, epsilon=epsilon, scaling=scaling)
        wide = hidden.double()
        normed = wide / (wide.square().mean(1, keepdim=True) + epsilon).sqrt()
        expected = scaled(normed, weight, scaling)
        assert found.dtype is dtype
        # If float32 and float64 are on different sides of a tie, the results are adjacent.
        torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps * 4, atol=1e-30)
        assert dtype is torch.float32 or float((found != expected).float().mean()) <= 0.02 + 2 / found.numel()

    check()


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_the_bits_of_a_norm_do_not_depend_on_other_rows(
    dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    hidden, weight = weight_of(300, 520, dtype), weight_of(1, 520, dtype, seed=1)[0]
    assert hidden.numel() >= call._SHARED_NUMBERS
    options: dict[str, Any] = {"epsilon": 1e-6, "scaling": Scaling.CAST_FIRST}
    threads(1)
    together = rms_norm(hidden, weight, **options)
    threads(3)
    assert same_bits(rms_norm(hidden, weight, **options), together)
    assert same_bits(rms_norm(hidden[7:12], weight, **options), together[7:12])
    strided = torch.stack([hidden, hidden], 1)[:, 0]
    assert not strided.is_contiguous()
    assert same_bits(rms_norm(strided, weight, **options), together)
    assert rms_norm(hidden.view(3, 100, 520), weight, **options).shape == (3, 100, 520)


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cosines[:, None] + torch.cat([-x[..., half:], x[..., :half]], -1) * sines[:, None]


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_rotations_have_the_bits_of_pytorch(
    dtype: torch.dtype, num_threads: int, threads: Callable[[int], None]
) -> None:
    threads(num_threads)

    @given(
        rows=st.integers(1, 60),
        heads=st.integers(1, 9),
        kv_heads=st.integers(1, 4),
        half=st.integers(1, 70),
        rest=st.integers(0, 5),
        rows_first=st.booleans(),
    )
    def check(rows: int, heads: int, kv_heads: int, half: int, rest: int, rows_first: bool) -> None:
        def some(count: int, seed: int) -> Tensor:
            """Heads of which only a part is rotated, as some models do."""
            first, second = (rows, count) if rows_first else (count, rows)
            lying = weight_of(first * second, 2 * half + rest, dtype, seed=seed).view(1, first, second, -1)
            return (lying.transpose(1, 2) if rows_first else lying)[..., : 2 * half]

        queries, keys = some(heads, 1), some(kv_heads, 2)
        cosines, sines = (weight_of(rows, 2 * half, dtype, seed=seed)[None] for seed in (3, 4))
        found = rotate(queries, keys, cosines, sines)
        assert found is not None
        assert same_bits(found[0], rotated(queries, cosines, sines))
        assert same_bits(found[1], rotated(keys, cosines, sines))

    check()


def test_a_nan_stays_in_its_row() -> None:
    hidden, weight = torch.ones(2, 64).bfloat16(), torch.ones(64).bfloat16()
    hidden[0, 3] = torch.nan
    found = rms_norm(hidden, weight, epsilon=1e-6, scaling=Scaling.SCALE_FIRST)
    assert found[0].isnan().all()
    assert (found[1] == 1).all()


def test_arguments_that_do_not_match_are_refused() -> None:
    hidden, weight = torch.ones(2, 64), torch.ones(64)
    for wrong in (weight[:60], weight.bfloat16(), torch.ones(128)[::2]):
        with pytest.raises(ConfigError, match="cannot scale"):
            rms_norm(hidden, wrong, epsilon=1e-6, scaling=Scaling.ONE_PLUS)
    with pytest.raises(ConfigError, match="float16"):
        rms_norm(hidden.half(), weight.half(), epsilon=1e-6, scaling=Scaling.ONE_PLUS)
    queries, angles = torch.ones(1, 2, 3, 8), torch.ones(1, 3, 8)
    assert rotate(queries, queries, angles, angles) is not None
    for others in (
        (queries.half(), queries.half(), angles.half(), angles.half()),
        (queries, queries.bfloat16(), angles, angles),
        (queries, queries, angles.bfloat16(), angles.bfloat16()),
        (queries.repeat(2, 1, 1, 1), queries, angles, angles),
        (queries[:, :, :2], queries, angles, angles),
        (queries, queries, angles[:, :2], angles),
        (queries[..., :7], queries[..., :7], angles[..., :7], angles[..., :7]),
        (queries.transpose(2, 3), queries.transpose(2, 3), torch.ones(1, 8, 3), torch.ones(1, 8, 3)),
        (queries, queries, angles[0], angles[0]),
    ):
        assert rotate(*others) is None
