"""The example with vLLM does what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import vllm_fleet


async def test_every_model_answers_one_question_in_one_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = vllm_fleet.make_checkpoints(tmp_path)
    answers = await vllm_fleet.main(checkpoints, tmp_path)
    assert {model: len(seen) for model, seen in answers.items()} == {"ada": 1, "bea": 1, "cleo": 1}
    assert len(set.union(*answers.values())) == 3
    assert capsys.readouterr().out.count(" -> ") >= 3
