"""The same model on engines of three kinds, TorchEngine, vLLM and llama.cpp, in one fleet."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from hotswap.abc import Engine
from hotswap.backends.torch import TorchEngine
from hotswap.backends.vllm import VllmEngine

if find_spec("xllamacpp") is None:
    pytest.skip("xllamacpp is not installed", allow_module_level=True)

from tests.backends.llamacpp.gguf_files import GgufStore
from tests.backends.llamacpp.kinds import (
    MODEL,
    assert_alike,
    assert_goes_on_across,
    make_llama_cpp,
    make_stores,
)


def make_engines(files: GgufStore) -> dict[str, Engine]:
    return {
        "torch": TorchEngine("torch", kv_tokens=2048, threads=1),
        "vllm": VllmEngine(
            "vllm", dtype="float32", kv_bytes="8 MiB", kv_block_tokens=32, memory_bytes="256 MiB"
        ),
        "llamacpp": make_llama_cpp(files),
    }


async def test_all_kinds_serve_the_same_prompts_alike(tmp_path: Path) -> None:
    modules, files = make_stores(tmp_path)
    await assert_alike(make_engines(files), modules.card(MODEL), modules)


async def test_a_request_goes_on_from_its_tokens_on_every_other_kind(tmp_path: Path) -> None:
    modules, files = make_stores(tmp_path)
    await assert_goes_on_across(make_engines(files), modules, num_hops=7)
