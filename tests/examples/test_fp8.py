"""The demo's models in FP8 recite as their dequantised selves do, and are no less sure of their texts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from examples.demo.checkpoints import RECIPES, Checkpoint
from hotswap import Model, ModelCard, ModelId, Request, RequestId, Sampling
from hotswap.backends.stores import NvmeStore
from hotswap.backends.stores.convert import convert
from hotswap.backends.torch import TorchEngine
from hotswap.backends.torch.fp8 import SCHEMES
from hotswap.backends.torch.quantize import quantizable
from hotswap.backends.torch.weights import named_tensors
from tests.backends.torch.test_dequantize import rounded

NAMES = [recipe.name for recipe in RECIPES]
M = ModelId("m")


def model_of(directory: Path, *, dtype: torch.dtype) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def ids_of(checkpoint: Checkpoint) -> tuple[list[int], int]:
    """The text, with its end, and how many tokens of it are its opening."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(checkpoint.path)
    ids: list[int] = tokenizer(checkpoint.text)["input_ids"]
    return [*ids, int(tokenizer.eos_token_id)], len(tokenizer(checkpoint.opening)["input_ids"])


def perplexity(model: Any, ids: list[int], given: int) -> float:
    """Of the text after its first words, which nothing foretells."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, given - 1 : -1].float()
    return math.exp(float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[given:]))))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", NAMES)
async def test_greedy_tokens_are_all_those_of_the_dequantised_model(
    name: str, scheme: str, checkpoints: tuple[Checkpoint, ...], tmp_path: Path
) -> None:
    checkpoint = next(each for each in checkpoints if each.name == name)
    convert(checkpoint.path, tmp_path, model_id=M, quantize=scheme)
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
    assert received[0] == ids[given:], "and they are still those of the text"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", NAMES)
def test_perplexity_is_within_a_hundredth_of_bfloat16(
    name: str, scheme: str, checkpoints: tuple[Checkpoint, ...]
) -> None:
    checkpoint = next(each for each in checkpoints if each.name == name)
    ids, given = ids_of(checkpoint)
    plain = perplexity(model_of(checkpoint.path, dtype=torch.bfloat16), ids, given=given)
    model = model_of(checkpoint.path, dtype=torch.bfloat16)
    state = dict(named_tensors(model))
    with torch.no_grad():
        for weight in quantizable(model):
            state[weight].copy_(rounded(state[weight], SCHEMES[scheme]))
    assert perplexity(model, ids, given=given) <= 1.01 * plain
