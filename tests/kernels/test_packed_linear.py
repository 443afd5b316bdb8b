"""`packed_linear`: its results, whose bits do not depend on packing, other rows or threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels import threads as kernel_threads
from hotswap.kernels.packed_linear import (
    PANEL,
    call,
    linear,
    linear_packed,
    pack,
    packed_bytes,
    supported,
)
from tests.patience import PATIENCE_S

DTYPES = [torch.float32, torch.bfloat16]
NAN = float("nan")


@pytest.fixture(autouse=True)
def available(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips the tests without AVX-512, unless it is hidden: with AVX2 the kernel works in float32, slowly."""
    if request.config.getoption("--hide-avx512"):
        monkeypatch.setattr(call, "supported", lambda dtype: dtype is torch.float32)
    elif not supported(torch.float32):
        pytest.skip("this CPU has no AVX-512")


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest, available: None) -> torch.dtype:
    chosen: torch.dtype = request.param
    if not call.supported(chosen):
        pytest.skip(f"the kernel does not support {chosen} on this CPU")
    return chosen


def weight_of(outputs: int, inputs: int, dtype: torch.dtype, layout: str = "rows", seed: int = 0) -> Tensor:
    """Random `[outputs, inputs]` in a memory layout: rows, columns, a part of a larger tensor, or strided."""
    random = torch.Generator().manual_seed(seed)
    if layout == "columns":
        return torch.randn(inputs, outputs, generator=random).to(dtype).t()
    if layout == "part":
        return torch.randn(outputs + 2, inputs + 3, generator=random).to(dtype)[1:-1, 1:-2]
    if layout == "strided":
        return torch.randn(outputs, inputs, 2, generator=random).to(dtype)[..., 1]
    return torch.randn(outputs, inputs, generator=random).to(dtype)


def in_words(weight: Tensor) -> Tensor:
    """Return the expected result of `pack`: for each 32 outputs, the words ordered by input."""
    outputs, inputs = weight.shape
    per_word = 4 // weight.itemsize
    padded = torch.zeros(-(-outputs // PANEL) * PANEL, -(-inputs // per_word) * per_word, dtype=weight.dtype)
    padded[:outputs, :inputs] = weight
    return padded.view(torch.float32).view(-1, PANEL, padded.shape[1] // per_word).transpose(1, 2)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


LAYOUTS = st.sampled_from(["rows", "columns", "part", "strided"])


def test_results_match_float64(dtype: torch.dtype) -> None:
    @given(
        outputs=st.integers(1, 150),
        inputs=st.integers(1, 1200),
        rows=st.integers(1, 40),
        layout=LAYOUTS,
        with_bias=st.booleans(),
    )
    def check(outputs: int, inputs: int, rows: int, layout: str, with_bias: bool) -> None:
        weight, hidden = weight_of(outputs, inputs, dtype, layout), weight_of(rows, inputs, dtype, seed=1)
        bias = weight_of(1, outputs, dtype, seed=2)[0] if with_bias else None
        found = linear(hidden, weight, bias)
        products = hidden.double()[:, None] * weight.double()
        exact = products.sum(2) if bias is None else products.sum(2) + bias.double()
        # Each addition in a run, of runs and of the bias rounds once, and each product that is not fused.
        size = products.abs().sum(2) + (0 if bias is None else bias.double().abs())
        summing = size * (min(inputs, 1024) + inputs / 512 + 2) * torch.finfo(torch.float32).eps / 2
        rounding = exact.abs() * (0 if dtype is torch.float32 else torch.finfo(dtype).eps / 2)
        assert found.dtype is dtype
        assert ((found.double() - exact).abs() <= 1.01 * (summing + rounding)).all()

    check()


def test_many_small_inputs_are_not_lost_beside_a_large_one(dtype: torch.dtype) -> None:
    """Added one by one, ones that follow 2 ** 24 would all be rounded away in float32."""
    inputs, run = 6000, 512 * 4 // dtype.itemsize
    weight = torch.ones(3, inputs, dtype=dtype)
    weight[:, 0], weight[:, -1] = 2.0**24, -(2.0**24)
    found = linear(torch.ones(5, inputs, dtype=dtype), weight)
    assert same_bits(found, torch.full((5, 3), float(inputs - run - 1)).to(dtype))


def test_bits_depend_neither_on_packing_nor_on_other_rows(dtype: torch.dtype) -> None:
    @given(
        outputs=st.integers(1, 150),
        inputs=st.integers(1, 700),
        rows=st.integers(1, 30),
        first=st.integers(0, 29),
        layout=LAYOUTS,
    )
    def check(outputs: int, inputs: int, rows: int, first: int, layout: str) -> None:
        weight, hidden = weight_of(outputs, inputs, dtype, layout), weight_of(60, inputs, dtype, seed=1)
        bias, packed = weight_of(1, outputs, dtype, seed=2)[0], pack(weight)
        found = linear_packed(hidden, packed, weight.shape, bias)
        assert same_bits(linear(hidden, weight, bias), found)
        some = slice(first, first + rows)
        assert same_bits(linear_packed(hidden[some], packed, weight.shape, bias), found[some])
        assert same_bits(linear(hidden[some], weight.contiguous(), bias), found[some])

    check()


def test_a_packed_weight_is_the_weight_in_words(dtype: torch.dtype) -> None:
    @given(outputs=st.integers(1, 150), inputs=st.integers(1, 150), layout=LAYOUTS)
    def check(outputs: int, inputs: int, layout: str) -> None:
        weight = weight_of(outputs, inputs, dtype, layout)
        packed = pack(weight)
        assert same_bits(packed, in_words(weight))
        assert packed.nbytes == packed_bytes(outputs, inputs, dtype)

    check()


def test_a_weight_is_packed_into_out(dtype: torch.dtype) -> None:
    weight = weight_of(70, 33, dtype)
    size_bytes = packed_bytes(70, 33, dtype)
    area = torch.zeros(size_bytes + 8, dtype=torch.uint8)
    packed = pack(weight, area[:size_bytes])
    assert packed.data_ptr() == area.data_ptr()
    assert same_bits(packed, pack(weight))
    assert not area[size_bytes:].any()
    for wrong in (
        area,
        area[: size_bytes - 4],
        area[:size_bytes].view(torch.int8),
        area[: 2 * size_bytes : 2],
    ):
        with pytest.raises(ConfigError, match="contiguous uint8"):
            pack(weight, wrong)


@pytest.mark.parametrize("workers", ["OpenMP", "thread pool"])
def test_the_requested_number_of_threads_run_together(workers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    all_there = Barrier(3)  # passed only by three threads together

    def meet(_: int) -> None:
        all_there.wait(PATIENCE_S)

    for_c = ctypes.CFUNCTYPE(None, ctypes.c_int64)(meet)

    kernel = SimpleNamespace(ctypes=for_c, address=ctypes.cast(for_c, ctypes.c_void_p).value)

    if workers == "thread pool":
        monkeypatch.setattr(kernel_threads, "_openmp_parallel", lambda: None)
    elif kernel_threads._openmp_parallel() is None:
        pytest.skip("PyTorch is not built with an OpenMP that can be found")
    kernel_threads.run_threads(kernel, (0,), 3)
    assert not all_there.broken


def test_the_openmp_library_of_pytorch_is_found_among_others() -> None:
    home = Path(torch.__file__).parent
    inside, beside = (
        str(home / "lib" / "libgomp.so.1"),
        str(home.with_name("torch.libs") / "libgomp-a34b.so.1"),
    )
    other, unrelated = (
        str(home.with_name("scikit_learn.libs") / "libgomp-d22c.so.1"),
        str(home / "lib" / "libtorch.so"),
    )
    assert kernel_threads._of_torch({inside, other, unrelated}) == [inside]
    assert kernel_threads._of_torch({beside, other}) == [beside]
    assert kernel_threads._of_torch({"/usr/lib/libgomp.so.1", unrelated}) == ["/usr/lib/libgomp.so.1"]
    assert kernel_threads._of_torch({"/usr/lib/libgomp.so.1", other}) == []
    assert kernel_threads._of_torch({unrelated}) == []


def test_rows_may_have_any_strides(dtype: torch.dtype) -> None:
    weight, base = weight_of(40, 64, dtype), weight_of(7, 129, dtype, seed=1)
    for rows in (base[:, 1:65], base[::2, :64], base.t()[:64].t(), base[:, :128].reshape(7, 2, 64)[:, 1]):
        assert same_bits(linear(rows, weight), linear(rows.clone(), weight))
    assert linear(base[:6, :64].reshape(2, 3, 64), weight).shape == (2, 3, 40)
    assert linear(base[:0, :64], weight).shape == (0, 40)


@pytest.mark.parametrize("rows", [1, 9])
def test_a_nan_stays_in_its_row_and_its_column(dtype: torch.dtype, rows: int) -> None:
    weight, hidden = weight_of(70, 33, dtype), weight_of(rows + 1, 33, dtype, seed=1)
    expected = linear(hidden, weight)
    weight[40, 5], hidden[rows, 7] = NAN, NAN
    found = linear(hidden, weight)
    assert found[rows].isnan().all()
    assert found[:, 40].isnan().all()
    others = [column for column in range(70) if column != 40]
    assert same_bits(found[:rows, others], expected[:rows, others])


@pytest.mark.parametrize("packs", [False, True], ids=["as stored", "packed"])
@pytest.mark.parametrize("workers", ["OpenMP", "thread pool"])
@pytest.mark.parametrize("num_threads", [2, 3])
def test_bits_do_not_depend_on_threads(
    dtype: torch.dtype,
    workers: str,
    num_threads: int,
    packs: bool,
    threads: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, hidden = weight_of(1030, 600, dtype), weight_of(5, 600, dtype, seed=1)
    assert packed_bytes(1030, 600, dtype) >= call._SHARED_BYTES
    threads(1)
    expected = linear(hidden, weight)
    threads(num_threads)
    if workers == "thread pool":
        monkeypatch.setattr(kernel_threads, "_openmp_parallel", lambda: None)
    for _ in range(20):
        found = linear_packed(hidden, pack(weight), weight.shape) if packs else linear(hidden, weight)
        assert same_bits(found, expected)


def test_arguments_that_do_not_match_are_refused(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hidden = weight_of(40, 64, dtype), weight_of(3, 64, dtype)
    packed = pack(weight)
    other = torch.float64
    with pytest.raises(ConfigError, match="cannot multiply \\[3, 63\\]"):
        linear(hidden[:, 1:], weight)
    with pytest.raises(ConfigError, match="float64"):
        linear(hidden.to(other), weight)
    for rows, shape in ((hidden, (70, 64)), (hidden[:, :63], (40, 64)), (hidden[:, :60], (40, 60))):
        with pytest.raises(ConfigError, match="packed as"):
            linear_packed(rows, packed, shape)
    with pytest.raises(ConfigError, match="biases"):
        linear(hidden, weight, hidden[0])
    with pytest.raises(ConfigError, match="biases"):
        linear(hidden, weight, weight[:, 0].to(other))
    monkeypatch.setattr(call, "supported", lambda _: False)
    call._kernel.cache_clear()
    with pytest.raises(ConfigError, match="no kernel"):
        pack(weight)
    call._kernel.cache_clear()
