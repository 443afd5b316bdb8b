"""RMSNorms and rotary embeddings are fused in every model, and nothing else is."""

from __future__ import annotations

import json
from functools import wraps
from inspect import unwrap
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hotswap.backends.torch.fused import fuse
from hotswap.backends.torch.modeling import Skeleton
from tests.backends.torch.zoo import CONFIGS, make_model

WITHOUT = {"gpt2", "opt"}  # no RMSNorm and no rotary embeddings


def fused(module: nn.Module) -> list[str]:
    return [type(one.module).__name__ for one in fuse(module)]


@pytest.mark.parametrize("architecture", sorted(set(CONFIGS) - WITHOUT))
def test_every_norm_and_rotation_of_all_architectures_is_fused(architecture: str) -> None:
    model = make_model(architecture)
    wanted = [
        type(module).__name__
        for module in model.modules()
        if "RMSNorm" in type(module).__name__
        or "apply_rotary_pos_emb" in getattr(unwrap(type(module).forward), "__code__", fuse.__code__).co_names
    ]
    if architecture == "gpt_oss":  # its cosines have half the width
        wanted = [name for name in wanted if name != "GptOssAttention"]
    assert wanted
    assert fused(model) == wanted


def test_rotations_of_a_decorated_forward_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is since transformers 5.24."""
    kind = type(next(one.module for one in fuse(make_model("llama")) if "Attention" in str(type(one.module))))
    original: Any = kind.forward

    @wraps(original)
    def decorated(*args: Any, **named: Any) -> Any:
        return original(*args, **named)

    monkeypatch.setattr(kind, "forward", decorated)
    assert kind.__name__ in fused(make_model("llama"))


@pytest.mark.parametrize("architecture", sorted(WITHOUT))
def test_models_without_norms_and_rotations_are_not_changed(architecture: str) -> None:
    assert fused(make_model(architecture)) == []


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_logits_stay_those_of_the_model(architecture: str, dtype: torch.dtype) -> None:
    model: Any = make_model(architecture, dtype=dtype)
    ids = torch.arange(2, 40)[None]
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits.float()
        assert fused(model)
        found = model(ids, use_cache=False).logits.float()
    allowed = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 0.0}[dtype]
    assert float((found - expected).abs().max() / expected.abs().max()) <= allowed


class Norm(nn.Module):
    """An RMSNorm; the classes below differ from it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64), requires_grad=False)
        self.eps = 1e-5

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        return self.weight * (wide * torch.rsqrt(self.mean(wide) + self.eps)).to(hidden.dtype)

    def mean(self, wide: Tensor) -> Tensor:
        return wide.square().mean(-1, keepdim=True)


class WithoutEpsilon(Norm):
    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        return self.weight * (wide * torch.rsqrt(self.mean(wide))).to(hidden.dtype)


class EpsilonOutside(Norm):
    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        return self.weight * (wide / (self.mean(wide).sqrt() + self.eps)).to(hidden.dtype)


class Centred(Norm):
    def mean(self, wide: Tensor) -> Tensor:
        return wide.var(-1, correction=0, keepdim=True)


class InItsOwnDtype(Norm):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * (hidden * torch.rsqrt(self.mean(hidden) + self.eps))


class Halved(Norm):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * 0.5


class OfBatches(Norm):
    def mean(self, wide: Tensor) -> Tensor:
        return wide.square().mean((-2, -1), keepdim=True)


class WithBuffer(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(1))


def test_modules_that_differ_from_a_norm_are_not_fused() -> None:
    others = (WithoutEpsilon, EpsilonOutside, Centred, InItsOwnDtype, Halved, OfBatches, WithBuffer)
    assert fused(nn.Sequential(Norm(), *(other() for other in others), nn.LayerNorm(64), nn.PReLU(64))) == [
        "Norm"
    ]


def test_norms_of_one_class_may_differ_in_epsilon() -> None:
    first, second = Norm(), Norm()
    second.eps = 0.1
    hidden = torch.randn(3, 64)
    expected = [first(hidden), second(hidden)]
    assert fused(nn.Sequential(first, second)) == ["Norm", "Norm"]
    for norm, theirs in zip((first, second), expected, strict=True):
        torch.testing.assert_close(norm(hidden), theirs, rtol=1e-6, atol=0)


def apply_rotary_pos_emb(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The rotation of GPT-J: of neighbouring elements instead of halves."""

    def rotated(x: Tensor) -> Tensor:
        neighbours = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos[:, None] + neighbours * sin[:, None]

    return rotated(queries), rotated(keys)


class Attention(nn.Module):
    def forward(self, queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(queries, keys, cos, sin)


def test_a_rotation_of_another_kind_is_not_fused() -> None:
    assert fused(Attention()) == []


def test_the_reference_of_a_preflight_is_not_fused() -> None:
    """Otherwise both sides would have the faults of fused kernels, and the comparison would pass."""
    skeleton = Skeleton(json.dumps(CONFIGS["llama"]().to_dict()), torch.device("cpu"))
    parts = [one.module for one in skeleton._fused]
    assert parts
    with skeleton.eager():
        assert not any("forward" in vars(part) for part in parts)
    assert all("forward" in vars(part) for part in parts)
