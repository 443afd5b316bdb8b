"""The same model on engines of three kinds, TorchEngine, vLLM and llama.cpp, in one fleet."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("xllamacpp") is None:
    pytest.skip("xllamacpp is not installed", allow_module_level=True)

from tests.backends.llamacpp.kinds import (
    MODEL,
    assert_alike,
    assert_goes_on_across,
    assert_parts_are_those_of_their_kinds,
    make_engines,
    make_stores,
)

KINDS = ("torch", "vllm", "llamacpp")


async def test_all_kinds_serve_the_same_prompts_alike(tmp_path: Path) -> None:
    modules, files = make_stores(tmp_path)
    await assert_alike(make_engines(KINDS, files), modules.card(MODEL), modules)


async def test_a_request_goes_on_from_its_tokens_on_every_other_kind(tmp_path: Path) -> None:
    modules, files = make_stores(tmp_path)
    await assert_goes_on_across(make_engines(KINDS, files), modules, num_hops=7)


async def test_each_part_of_an_evicted_request_is_what_its_kind_gives_alone(tmp_path: Path) -> None:
    modules, files = make_stores(tmp_path)
    assert await assert_parts_are_those_of_their_kinds(make_engines(KINDS, files), modules, 20) > 20
