"""FP8 quantization: exact values, bounded errors, and the choice of weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hotswap.backends.torch.fp8 import FP8_DTYPE, SCHEMES, Scheme, dequantize, quantize
from hotswap.backends.torch.quantize import Quantizer, quantizable
from hotswap.errors import ConfigError, ShardCorrupt
from tests.backends.torch.zoo import CONFIGS, make_model

GROUPED, CHANNEL = SCHEMES["fp8-e4m3"], SCHEMES["fp8-e4m3-channel"]
FINITE = [code for code in range(256) if code & 0x7F != 0x7F]

schemes = st.sampled_from(list(SCHEMES.values()))
dtypes = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
widths = st.sampled_from([1, 2, 100, 127, 128, 129, 255, 256, 257, 300])


def meaning(code: int) -> float:
    """Return the value of an e4m3 byte (OCP): 1 sign bit, 4 exponent bits, bias 7, 3 mantissa bits."""
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -magnitude if code & 0x80 else magnitude


def spread(scales: Tensor, scheme: Scheme, k: int) -> Tensor:
    """Return the scale of each weight."""
    return scales.repeat_interleave(scheme.width(k), -1)[..., :k]


def weights_of(seed: int, rows: int, k: int, dtype: torch.dtype) -> Tensor:
    """Return random weights of sizes that differ by up to 2**24, so that some values are subnormal."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-12, 12, (rows, k), generator=generator)
    return torch.ldexp(torch.randn(rows, k, generator=generator), sizes).to(dtype)


# ------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("scale", [1.0, 2.0**-126, 3.1e-5, 0.7, 7.5e35])
def test_every_finite_value_is_dequantized_exactly(scale: float) -> None:
    quantized = torch.tensor([FINITE], dtype=torch.uint8).view(FP8_DTYPE)
    scales = torch.full((1, 1), scale)
    values = dequantize(quantized, scales, CHANNEL)
    # In float64 the product of 4 and 24 bits is exact, so this rounds once, to float32.
    wanted = (torch.tensor([[meaning(code) for code in FINITE]]).double() * scales.double()).float()
    assert torch.equal(values, wanted)
    assert torch.equal(values.signbit(), wanted.signbit())


@pytest.mark.parametrize("code", [0x00, 0x80, 0x01, 0x07, 0x87, 0x08, 0x7E, 0xFE])
def test_fp8_values_are_quantized_to_themselves(code: int) -> None:
    weights = torch.tensor([[448.0, meaning(code), meaning(code)]])  # the first makes the scale 1
    quantized, scales = quantize(weights, CHANNEL)
    assert quantized.view(torch.uint8).tolist() == [[0x7E, code, code]]
    assert scales.tolist() == [[1.0]]


@given(st.integers(0, 2**32), st.integers(1, 5), widths, dtypes, schemes)
def test_the_error_of_a_weight_is_at_most_half_a_step(
    seed: int, rows: int, k: int, dtype: torch.dtype, scheme: Scheme
) -> None:
    weights = weights_of(seed, rows, k, dtype)
    quantized, scales = quantize(weights, scheme)
    error = (dequantize(quantized, scales, scheme).double() - weights.double()).abs()
    # Half a unit of the third bit, or of the smallest subnormal; and a little for rounding the scale.
    bound = torch.maximum(weights.double().abs() * 2.0**-4, spread(scales, scheme, k).double() * 2.0**-10)
    assert (error <= bound * (1 + 2.0**-20)).all()


@given(st.integers(0, 2**32), widths, dtypes, schemes, st.integers(-100, 60))
def test_dequantized_weights_are_bfloat16_numbers(
    seed: int, k: int, dtype: torch.dtype, scheme: Scheme, size: int
) -> None:
    weights = torch.ldexp(weights_of(seed, 3, k, torch.float32), torch.tensor(size)).to(dtype)
    weights = weights.nan_to_num(0, 1, -1)  # the sizes may overflow some dtypes
    quantized, scales = quantize(weights, scheme)
    exact = quantized.double() * spread(scales, scheme, k).double()
    assert torch.equal(exact.bfloat16().double(), exact)
    assert torch.equal(dequantize(quantized, scales, scheme).double(), exact)


@given(st.integers(0, 2**32), widths, dtypes, schemes)
def test_the_scale_has_the_least_error_of_all_candidates(
    seed: int, k: int, dtype: torch.dtype, scheme: Scheme
) -> None:
    weights = weights_of(seed, 3, k, dtype)
    quantized, scales = quantize(weights, scheme)
    for start in range(0, k, scheme.width(k)):
        group = weights[:, start : start + scheme.width(k)].double()
        part = quantized[:, start : start + scheme.width(k)].double()
        scale = scales[:, start // scheme.width(k)].double()
        off = (part * scale[:, None] - group).square().sum(-1)
        least = group.abs().amax(-1) / 448
        for steps in range(8, 16):
            exponent = torch.floor(torch.log2(least / steps)) + 1
            other = torch.ldexp(torch.full_like(least, steps), exponent.int())
            other = torch.where(other / 2 >= least, other / 2, other)  # the logarithm may be off by one
            other = torch.where(other < least, other * 2, other).clamp_min(2.0**-126)
            recoded = (group.float() / other[:, None].float()).to(FP8_DTYPE).double()
            others_off = (recoded * other[:, None] - group).square().sum(-1)
            assert (off <= others_off * (1 + 1e-4)).all(), steps


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=str)
def test_the_error_is_less_than_with_absmax_scales(scheme: Scheme) -> None:
    weights = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    groups = weights.view(256, -1, scheme.width(1024))
    scale = groups.abs().amax(-1, keepdim=True) / 448
    plain = ((groups / scale).to(FP8_DTYPE).float() * scale - groups).norm()
    off = (dequantize(*quantize(weights, scheme), scheme) - weights).norm()
    assert off < (0.94 if scheme.group else 0.99) * plain


@given(st.integers(0, 2**32), widths, schemes)
def test_groups_are_independent(seed: int, k: int, scheme: Scheme) -> None:
    weights = weights_of(seed, 4, k, torch.bfloat16)
    quantized, scales = quantize(weights, scheme)
    for group in range(scheme.num_groups(k)):
        columns = slice(group * scheme.width(k), (group + 1) * scheme.width(k))
        alone, scale = quantize(weights[:, columns], CHANNEL)
        assert torch.equal(alone.view(torch.uint8), quantized[:, columns].view(torch.uint8))
        assert torch.equal(scale[:, 0], scales[:, group])


@given(widths, dtypes, schemes)
def test_zeros_stay_zeros_of_their_sign(k: int, dtype: torch.dtype, scheme: Scheme) -> None:
    weights = torch.zeros(4, k, dtype=dtype)
    weights[1::2] = -0.0
    weights[2, 0] = 3.0  # also zeros in the group of another weight
    restored = dequantize(*quantize(weights, scheme), scheme)
    assert torch.equal(restored == 0, weights == 0)
    assert torch.equal(restored.signbit(), weights.signbit())


@pytest.mark.parametrize("tiny", [1e-45, 1e-40, 2.0**-126, 2.0**-117])
def test_very_small_weights_become_zero(tiny: float) -> None:
    weights = torch.full((1, 4), tiny)
    restored = dequantize(*quantize(weights, GROUPED), GROUPED)
    assert (restored - weights).abs().max() <= 2.0**-136


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 40), widths, schemes)
def test_rows_may_be_quantized_in_parts_and_stacks_at_once(
    seed: int, experts: int, cut: int, k: int, scheme: Scheme
) -> None:
    stack = weights_of(seed, experts * 40, k, torch.bfloat16).view(experts, 40, k)
    quantized, scales = quantize(stack, scheme)
    for expert, whole, scale in zip(stack, quantized, scales, strict=True):
        parts = [quantize(part, scheme) for part in (expert[:cut], expert[cut:])]
        assert torch.equal(torch.cat([c.view(torch.uint8) for c, _ in parts]), whole.view(torch.uint8))
        assert torch.equal(torch.cat([s for _, s in parts]), scale)


def test_large_tensors_are_quantized_like_small_ones() -> None:
    weights = weights_of(0, 3, 1 << 18, torch.bfloat16)  # each row is a block of its own
    quantized, scales = quantize(weights, GROUPED)
    alone, scale = quantize(weights[2:], GROUPED)
    assert torch.equal(quantized[2:].view(torch.uint8), alone.view(torch.uint8))
    assert torch.equal(scales[2:], scale)


@pytest.mark.parametrize("shape", [(0, 128), (3, 0), (2, 0, 300), (2, 3, 300)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_shapes_are_right_for_empty_and_meta_tensors(shape: tuple[int, ...], device: str) -> None:
    quantized, scales = quantize(torch.zeros(shape, device=device), GROUPED)
    assert quantized.shape == shape
    assert scales.shape == (*shape[:-1], -(-shape[-1] // 128))
    assert (quantized.dtype, scales.dtype) == (FP8_DTYPE, torch.float32)


# ----------------------------------------------------------------------------------------- which weights


KEPT_MATRICES = {
    "gpt2": {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"},
    "gpt_oss": {"experts.gate_up_proj", "experts.down_proj"},
}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_weights_of_products_are_quantized_and_the_rest_is_kept(architecture: str) -> None:
    model = make_model(architecture)
    chosen = quantizable(model)
    kept = set(model.state_dict()) - chosen
    assert all(model.state_dict()[name].ndim >= 2 for name in chosen)
    assert not [name for name in chosen if "embed" in name or "norm" in name or "gate.weight" in name]
    # The other matrices: embeddings and tensors tied to them, routers, and transposed matrices [K, N].
    tied = model.config.tie_word_embeddings
    for name in kept:
        if model.state_dict()[name].ndim >= 2:
            is_known = any(part in name for part in KEPT_MATRICES.get(architecture, ()))
            is_router = name.endswith(("mlp.gate.weight", "mlp.router.weight"))
            is_embedding = any(part in name for part in ("embed", ".wte", ".wpe")) or (
                tied and name == "lm_head.weight"
            )
            assert is_known or is_router or is_embedding or name.endswith("_bias"), name
    assert ("lm_head.weight" in chosen) is not tied


def test_subclasses_of_linear_layers_are_not_quantized() -> None:
    class Router(nn.Linear):
        pass

    model = nn.ModuleDict({"plain": nn.Linear(16, 64), "router": Router(16, 64)})
    assert quantizable(model) == {"plain.weight"}


def test_gates_of_experts_are_not_quantized() -> None:
    class Experts(nn.Module):
        is_transposed = False

        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.zeros(4, 32, 16))
            self.bias = nn.Parameter(torch.zeros(4, 32))

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 4)

    block = nn.ModuleDict(
        {
            "experts": Experts(),
            "router": Router(),
            "shared_gate": nn.Linear(16, 1),
            "shared": nn.Linear(16, 32),
        }
    )
    outside = nn.Linear(16, 2)
    model = nn.ModuleDict({"mlp": block, "score": outside})
    assert quantizable(model) == {"mlp.experts.up", "mlp.shared.weight", "score.weight"}


def test_the_quantizer_names_values_and_scales_and_passes_other_tensors_through() -> None:
    model = make_model("mixtral", dtype=torch.bfloat16)
    quantizer = Quantizer("fp8-e4m3", model)
    assert quantizer.dtype is torch.bfloat16
    for name, tensor in model.state_dict().items():
        stored = dict(quantizer(name, tensor))
        if name in quantizer.names:
            assert list(stored) == [name, f"{name}.scale"]
            assert stored[name].dtype is FP8_DTYPE
        else:
            assert stored == {name: tensor}


def test_weights_of_another_dtype_are_not_quantized() -> None:
    model = make_model("llama", dtype=torch.bfloat16)
    model.lm_head.float()
    quantizer = Quantizer("fp8-e4m3", model)
    assert "lm_head.weight" not in quantizer.names
    name = "model.layers.0.mlp.up_proj.weight"
    assert name in quantizer.names
    wide = torch.zeros(2, 3)  # a checkpoint may have another dtype than the module
    assert quantizer(name, wide) == ((name, wide),)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_that_are_not_finite_are_refused_by_name(wrong: float, scheme: str) -> None:
    model: Any = nn.ModuleDict({"good": nn.Linear(300, 2), "bad": nn.Linear(300, 2)})
    quantizer = Quantizer(scheme, model)
    with torch.no_grad():
        model.bad.weight[1, 299] = wrong
    quantizer("good.weight", model.good.weight)
    with pytest.raises(ShardCorrupt, match=r"'bad\.weight'"):
        quantizer("bad.weight", model.bad.weight)


def test_an_unknown_scheme_is_refused_with_the_list_of_schemes() -> None:
    with pytest.raises(ConfigError, match=r"'fp4'.*fp8-e4m3, fp8-e4m3-channel"):
        Quantizer("fp4", nn.Linear(1, 1))
