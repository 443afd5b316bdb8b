"""A model's generation_config.json as sampling parameters: every field is used, or told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import GenerationConfig

from hotswap import InvalidRequest, Sampling
from hotswap.generation import sampling_of, unmapped

WHOLE: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "max_new_tokens": 2048,
    "min_new_tokens": 3,
    "suppress_tokens": [1, 2],
    "begin_suppress_tokens": [220, 50256],
    "forced_eos_token_id": 50257,
    "bad_words_ids": [[5, 6], [7]],
    "stop_strings": "STOP",
    "eos_token_id": [1, 2],
    "bos_token_id": 0,
    "pad_token_id": 0,
    "transformers_version": "5.23.0",
}


def test_every_field_has_its_place() -> None:
    assert sampling_of(WHOLE) == Sampling(
        temperature=0.7,
        top_k=20,
        top_p=0.8,
        min_p=0.05,
        repetition_penalty=1.05,
        max_tokens=2048,
        min_tokens=3,
        suppress_tokens=[1, 2],
        begin_suppress_tokens=[220, 50256],
        forced_end_tokens=[50257],
        bad_words_ids=[[5, 6], [7]],
        stop="STOP",
    )
    assert unmapped(WHOLE) == []


def test_what_the_caller_gives_goes_before() -> None:
    sampling = sampling_of(WHOLE, temperature=0.0, stop=(), max_tokens=2, seed=7)
    assert sampling == replace(
        sampling_of(WHOLE), temperature=0.0, stop=(), max_tokens=2, min_tokens=2, seed=7
    )


def test_without_do_sample_the_answer_is_greedy() -> None:
    for flag in ({}, {"do_sample": False}, {"do_sample": None}):
        assert sampling_of({**flag, "temperature": 0.9, "top_p": 0.5, "top_k": 3}) == Sampling()
    assert sampling_of({"do_sample": True}) == Sampling(temperature=1.0)
    assert sampling_of({"temperature": 0.9}, temperature=0.5) == Sampling(temperature=0.5)


def test_a_grammar_decides_where_a_generation_ends() -> None:
    assert sampling_of({"min_new_tokens": 5}, regex="a+") == Sampling(regex="a+")


def test_nothing_is_dropped_in_silence() -> None:
    asked = {"no_repeat_ngram_size": 3, "num_beams": 4, "typical_p": 0.9, "sequence_bias": [[[1], 2.0]]}
    assert unmapped({**WHOLE, **asked}) == sorted(asked)


def test_a_file_of_defaults_asks_for_nothing() -> None:
    config = GenerationConfig()
    assert unmapped({**config.to_dict(), "max_length": 20}) == []
    assert unmapped(dict.fromkeys(config.to_dict())) == []
    assert sampling_of(config.to_dict()) == Sampling()


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": "many"},
        {"suppress_tokens": [-1]},
        {"max_new_tokens": 0},
        {"bad_words_ids": [[]]},
        {"min_new_tokens": "5"},
    ],
    ids=repr,
)
def test_a_value_that_cannot_be_used_is_told_of_the_file(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"generation_config\.json"):
        sampling_of({"do_sample": True, **wrong})
    with pytest.raises(InvalidRequest, match="temperature") as caught:
        sampling_of({}, temperature="hot")
    assert "generation_config" not in str(caught.value)
