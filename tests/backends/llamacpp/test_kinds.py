"""The same model on engines of two kinds, a TorchEngine and a llama.cpp engine, in one fleet."""

from __future__ import annotations

from pathlib import Path

from hotswap.backends.torch import TorchEngine
from tests.backends.llamacpp.kinds import (
    MODEL,
    assert_alike,
    assert_goes_on_across,
    make_llama_cpp,
    make_stores,
)


def make_torch() -> TorchEngine:
    return TorchEngine("torch", kv_tokens=2048, threads=1)


async def test_both_kinds_serve_the_same_prompts_alike(tmp_path: Path) -> None:
    modules, files = make_stores(tmp_path)
    kinds = {"torch": make_torch(), "llamacpp": make_llama_cpp(files)}
    await assert_alike(kinds, modules.card(MODEL), modules)


async def test_a_request_goes_on_from_its_tokens_on_the_other_kind(tmp_path: Path) -> None:
    modules, files = make_stores(tmp_path)
    kinds = {"torch": make_torch(), "llamacpp": make_llama_cpp(files)}
    await assert_goes_on_across(kinds, modules, num_hops=6)
