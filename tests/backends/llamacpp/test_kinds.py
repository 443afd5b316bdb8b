"""The same model on engines of two kinds, a TorchEngine and a llama.cpp engine."""

from __future__ import annotations

from pathlib import Path

from tests.backends.llamacpp.kinds import (
    MODEL,
    assert_alike,
    assert_goes_on_across,
    assert_parts_are_those_of_their_kinds,
    make_engines,
    make_stores,
)

KINDS = ("torch", "llamacpp")


async def test_both_kinds_serve_the_same_prompts_alike(tmp_path: Path) -> None:
    modules, files = make_stores(tmp_path)
    await assert_alike(make_engines(KINDS, files), modules.card(MODEL), modules)


async def test_a_request_goes_on_from_its_tokens_on_the_other_kind(tmp_path: Path) -> None:
    modules, files = make_stores(tmp_path)
    await assert_goes_on_across(make_engines(KINDS, files), modules, num_hops=6)


async def test_each_part_of_an_evicted_request_is_what_its_kind_gives_alone(tmp_path: Path) -> None:
    modules, files = make_stores(tmp_path)
    assert await assert_parts_are_those_of_their_kinds(make_engines(KINDS, files), modules, 20) > 20
