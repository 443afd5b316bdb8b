"""The example with Ray does what it says, over engines of PyTorch on three nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import ray_cluster
from tests.backends.ray.local_cluster import NODES, LocalCluster


async def test_every_model_answers_one_question_in_one_way_on_the_nodes_of_a_cluster(
    cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = await ray_cluster.main(tmp_path)
    assert {model: len(seen) for model, seen in answers.items()} == {"ada": 1, "bea": 1, "cleo": 1}
    assert len(set.union(*answers.values())) == 3
    printed = capsys.readouterr().out
    assert all(f"{node}-0 on {node} serves" in printed for node in NODES)
