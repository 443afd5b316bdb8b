"""Requests at random, valid, invalid and hostile: a slice of `benchmarks requests`, which detects faults."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.requests import call_of, throw, write_models
from hotswap.runtime.texts import ModelText

NUM_REQUESTS = 1600


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    write_models(directory)
    return directory


async def test_every_request_ends_by_itself_and_harms_no_other(models: Path) -> None:
    report = await throw(models, 1, range(NUM_REQUESTS))
    assert not report.failures
    assert report.num_requests == sum(report.outcomes.values()) == NUM_REQUESTS
    assert not report.logged
    assert report.outcomes["known: tokens"] == NUM_REQUESTS / 8
    assert report.outcomes["valid: tokens"] > NUM_REQUESTS / 4
    assert report.outcomes["hostile: InvalidRequest"] > NUM_REQUESTS / 4


def test_a_request_depends_on_the_seed_and_its_number_only() -> None:
    assert [repr(call_of(3, number).fields) for number in range(3)] == [
        repr(call_of(3, number).fields) for number in range(3)
    ]
    assert Counter(call_of(3, number).kind for number in range(80)) == {
        "known": 10,
        "valid": 30,
        "hostile": 40,
    }


async def test_untyped_errors_are_noticed(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = ModelText.encode

    async def broken(self: ModelText, prompt: Any, sampling: Any, **more: Any) -> tuple[int, ...]:
        if isinstance(prompt, str):
            raise KeyError("prompt")
        return await encode(self, prompt, sampling, **more)

    monkeypatch.setattr(ModelText, "encode", broken)
    assert any("KeyError" in failure for failure in (await throw(models, 1, range(40))).failures)


async def test_other_answers_than_known_ones_are_noticed(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = ModelText.encode
    num_encoded = Counter[str]()

    async def broken(self: ModelText, prompt: Any, sampling: Any, **more: Any) -> tuple[int, ...]:
        num_encoded["all"] += 1
        tokens = await encode(self, prompt, sampling, **more)
        return tokens if num_encoded["all"] <= 24 else (*tokens, 7)  # the known ones are learned first

    monkeypatch.setattr(ModelText, "encode", broken)
    failures = (await throw(models, 1, range(40))).failures
    assert sum("another answer than alone" in failure for failure in failures) == 5
