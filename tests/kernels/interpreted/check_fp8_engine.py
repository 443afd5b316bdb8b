"""An engine with the interpreted FP8 kernel: weights are packed by `load` and dequantized in each step.

Run by `test_interpreted`, with Triton's interpreter on the CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from hotswap import Model, ModelId, Request, RequestId, Sampling
from hotswap.abc import ModelCard
from hotswap.backends.stores import NvmeStore
from hotswap.backends.stores.convert import convert
from hotswap.backends.torch import TorchEngine
from tests.backends.torch.zoo import COMMON, make_model

M = ModelId("m")


@pytest.mark.parametrize("scheme", ["fp8-e4m3", "fp8-e4m3-channel"])
async def test_tokens_are_those_of_dequantized_weights(scheme: str, tmp_path: Path) -> None:
    kept, dequantized = await kept_and_dequantized(scheme, tmp_path)
    assert kept == dequantized


async def kept_and_dequantized(scheme: str, tmp_path: Path, device: str = "cpu") -> list[list[int]]:
    """Return the tokens of an engine that keeps FP8 weights, and of one that dequantizes them."""
    config = transformers.LlamaConfig(**{**COMMON, "num_hidden_layers": 1, "vocab_size": 128})
    make_model(config, dtype=torch.float16, sharpness=8.0).save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path, model_id=M, quantize=scheme)
    request = Request(id=RequestId("r"), model=M, prompt=(5, 6, 7), sampling=Sampling(max_tokens=6))
    received: list[list[int]] = []
    async with NvmeStore(tmp_path) as store:
        card = ModelCard.of(Model(M), await store.manifest(M))
        for keep in (True, False):
            async with TorchEngine("e0", device=device, kv_tokens=128, threads=1, keep_fp8=keep) as engine:
                await engine.load(card, store)
                async with engine.stream(request) as stream:
                    received.append([token.id async for token in stream])
                serving = engine._models.serving
                layers = getattr(serving, "skeleton").fp8_linears  # noqa: B009 - of a model in this process
                assert all(layer.weight.is_packed for layer in layers)
                assert bool(layers) is keep
    return received
