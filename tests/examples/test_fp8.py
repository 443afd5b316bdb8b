"""The demo's models in FP8 give the tokens of the dequantised models, with about their perplexity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from examples.demo.checkpoints import RECIPES, Checkpoint
from hotswap import Model, ModelId, Request, RequestId, Sampling
from hotswap.abc import ModelCard
from hotswap.backends.stores import NvmeStore
from hotswap.backends.stores.convert import convert
from hotswap.backends.torch import TorchEngine, smaller_steps
from hotswap.backends.torch.fp8 import SCHEMES
from hotswap.backends.torch.sampling import Choice, Sampler

NAMES = [recipe.name for recipe in RECIPES]
M = ModelId("m")


def ids_of(checkpoint: Checkpoint) -> tuple[list[int], int]:
    """The token ids of the text with its end token, and how many of them are the opening."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(checkpoint.path)
    ids: list[int] = tokenizer(checkpoint.text)["input_ids"]
    return [*ids, int(tokenizer.eos_token_id)], len(tokenizer(checkpoint.opening)["input_ids"])


async def perplexity(
    directory: Path, ids: list[int], given: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, int]:
    """The perplexity of the text after its first `given` tokens, by the engine's logits."""
    seen: list[torch.Tensor] = []

    def recite(
        logits: torch.Tensor, _: Sequence[Sampler], indices: Sequence[int], *others: object
    ) -> list[Choice]:
        seen.extend(logits.clone())
        return [Choice(ids[given + index]) for index in indices]

    monkeypatch.setattr(smaller_steps, "sample", recite)
    sampling = Sampling(max_tokens=len(ids) - given, ignore_eos=True)
    request = Request(id=RequestId("r"), model=M, prompt=tuple(ids[:given]), sampling=sampling)
    async with (
        NvmeStore(directory) as store,
        TorchEngine("e0", kv_tokens=2048, threads=1, keep_fp8=True) as e,
    ):
        await e.load(ModelCard.of(Model(M), await store.manifest(M)), store)
        async with e.stream(request) as stream:
            assert [token.id async for token in stream] == ids[given:]
        weight_bytes = e.status().weight_bytes
    assert seen[0].dtype is torch.bfloat16
    return math.exp(
        float(torch.nn.functional.cross_entropy(torch.stack(seen).float(), torch.tensor(ids[given:])))
    ), weight_bytes


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", NAMES)
async def test_greedy_tokens_are_all_those_of_the_dequantised_model(
    name: str, scheme: str, checkpoints: tuple[Checkpoint, ...], tmp_path: Path
) -> None:
    checkpoint = next(each for each in checkpoints if each.name == name)
    convert(checkpoint.path, tmp_path, model_id=M, dtype="bfloat16", quantize=scheme)
    ids, given = ids_of(checkpoint)
    request = Request(
        id=RequestId("r"), model=M, prompt=tuple(ids[:given]), sampling=Sampling(max_tokens=len(ids))
    )
    received: list[list[int]] = []
    async with NvmeStore(tmp_path) as store:
        card = ModelCard.of(Model(M), await store.manifest(M))
        for keep in (True, False):
            async with TorchEngine("e0", kv_tokens=2048, threads=1, keep_fp8=keep) as engine:
                await engine.load(card, store)
                async with engine.stream(request) as stream:
                    received.append([token.id async for token in stream])
    assert received[0] == received[1]
    assert received[0] == ids[given:], "the tokens of the text"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", NAMES)
async def test_perplexity_is_within_a_hundredth_of_bfloat16(
    name: str,
    scheme: str,
    checkpoints: tuple[Checkpoint, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = next(each for each in checkpoints if each.name == name)
    ids, given = ids_of(checkpoint)
    convert(checkpoint.path, tmp_path / "plain", model_id=M, dtype="bfloat16")
    convert(checkpoint.path, tmp_path / "quantized", model_id=M, dtype="bfloat16", quantize=scheme)
    plain, plain_bytes = await perplexity(tmp_path / "plain", ids, given, monkeypatch)
    quantized, quantized_bytes = await perplexity(tmp_path / "quantized", ids, given, monkeypatch)
    assert quantized_bytes < plain_bytes, "weights stay quantized"
    assert quantized <= 1.01 * plain
    # The models are overfit, so that perplexities are nearly 1 and their logarithms tell more.
    assert math.log(quantized) <= 1.1 * math.log(plain)
