"""The example with vLLM does what it says, and the block of the guide runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples import vllm_fleet
from hotswap import Fleet, Model, Sampling
from hotswap.backends.stores import NvmeStore
from tests.docs.running import run, runnable


async def test_every_model_answers_one_question_in_one_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = vllm_fleet.make_checkpoints(tmp_path)
    answers = await vllm_fleet.main(checkpoints, tmp_path)
    assert {model: len(seen) for model, seen in answers.items()} == {"ada": 1, "bea": 1, "cleo": 1}
    assert len(set.union(*answers.values())) == 3
    assert capsys.readouterr().out.count(" -> ") >= 3


async def test_the_fleet_of_the_guide_serves(tmp_path: Path) -> None:
    source, *_ = vllm_fleet.make_checkpoints(tmp_path)
    names: dict[str, Any] = {
        "Fleet": Fleet,
        "models": [Model("a", source)],
        "store": NvmeStore(tmp_path / "store"),
    }
    await run(runnable("vllm.md", "VllmEngine(", {"20 GiB": "64 MiB"}), names)
    async with names["fleet"] as fleet:
        done = await fleet.generate("a", (5, 6, 7), Sampling(max_tokens=4, ignore_eos=True))
    assert len(done.tokens) == 4
