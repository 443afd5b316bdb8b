"""PyTorch has one default dtype for a process: models are built without changing it, and no step heeds it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from hotswap import Sampling
from hotswap.backends.stores.streaming import open_checkpoint
from hotswap.backends.torch import SkeletonCache
from hotswap.backends.torch.default_dtype import own_default_dtype
from hotswap.backends.torch.sampling import Sampler, sample
from hotswap.backends.torch.weights import load_checkpoint, named_tensors
from hotswap.kernels.recurrent import Spans, delta_rule, selective_scan, state_space
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.hybrids import HYBRIDS, OTHERS, make_hybrid
from tests.backends.torch.test_recurrent import ask, prompts_of, serving, tokens_of
from tests.backends.torch.zoo import CONFIGS, generate, make_model

KINDS = CONFIGS | HYBRIDS | OTHERS


@contextmanager
def default(dtype: torch.dtype) -> Generator[None]:
    """As while another thread of the process builds a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The default dtypes that were set for the process."""
    seen: list[torch.dtype] = []
    original = torch.set_default_dtype

    def set_default(dtype: torch.dtype) -> None:
        seen.append(dtype)
        original(dtype)

    monkeypatch.setattr(torch, "set_default_dtype", set_default)
    return seen


def built(kind: str) -> dict[str, torch.dtype]:
    models: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = models.from_config(KINDS[kind](), dtype=torch.bfloat16, attn_implementation="eager")
    return {name: tensor.dtype for name, tensor in named_tensors(model)}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_tensors_have_the_dtypes_that_transformers_gives_them(kind: str, changes: list[torch.dtype]) -> None:
    with own_default_dtype():
        mine = built(kind)
    assert changes == []
    assert torch.bfloat16 in mine.values()
    assert mine == built(kind)
    assert torch.bfloat16 in changes, "transformers alone sets it for the process"


def test_models_are_read_and_loaded_without_a_change_of_the_default(
    tmp_path: Path, changes: list[torch.dtype]
) -> None:
    model = make_hybrid("bamba", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    changes.clear()
    with open_checkpoint(tmp_path, torch.bfloat16, memory_bytes=1 << 30) as blueprint:
        streamed = {name: source.dtype for name, source in blueprint.sources.items()}
    assert streamed == {
        name: one.dtype for name, one in named_tensors(load_checkpoint(tmp_path, torch.bfloat16))
    }
    store = DictStore()
    store.add("m", model)
    SkeletonCache().borrow(store.manifests["m"].config, torch.device("cpu"))
    assert changes == []


@pytest.mark.parametrize("kind", ["llama", "lfm2", "qwen3_5", "bamba", "jamba"])
async def test_a_default_that_others_set_meanwhile_changes_no_token(kind: str) -> None:
    model = make_model(kind) if kind in CONFIGS else make_hybrid(kind)
    (prompt,) = prompts_of(Random(3), 20)
    expected = generate(model, prompt, 40)
    async with serving(model) as engine:
        with default(torch.bfloat16):
            assert await tokens_of(engine, ask(prompt, max_tokens=40)) == expected


def test_logits_are_compared_in_full_whatever_the_default() -> None:
    logits = torch.tensor([[1.0, 1.001, 0.5]], dtype=torch.float32)
    with default(torch.bfloat16):
        (choice,) = sample(logits, [Sampler(Sampling(), (), ())], [0])
    assert choice.token == 1


@pytest.mark.parametrize("kind", ["delta", "space", "scan"])
def test_the_memory_of_results_does_not_depend_on_the_default(kind: str) -> None:
    """A kernel would write beyond it: its numbers have four bytes each."""

    def some(*shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float32, generator=torch.Generator().manual_seed(len(shape)))

    spans = Spans(torch.tensor([[0, 0, 3, 1]], dtype=torch.int32), 3)

    def result() -> Tensor:
        if kind == "delta":
            keys, values, decays = some(3, 2, 8), some(3, 4, 8), -some(3, 4)
            return delta_rule(keys, keys, values, decays, -decays, some(1, 4, 8, 8), spans)
        if kind == "space":
            inputs, writes = some(3, 4, 8), some(3, 2, 16)
            return state_space(inputs, -some(3, 4), writes, writes, some(1, 4, 16, 8), spans)
        inputs, writes = some(3, 8), some(3, 16)
        return selective_scan(inputs, inputs, -some(8, 16), writes, writes, some(1, 16, 8), spans)

    expected = result()
    with default(torch.bfloat16):
        assert torch.equal(result(), expected)
