"""The loading benchmark on a few megabytes: contestants deliver what was written, or are left out."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import checkpoints, load, pagecache
from benchmarks.measure import ratios, rounds
from benchmarks.peers import CONTESTANTS, LIMITS
from benchmarks.runner import Runner
from benchmarks.timed_run import Source
from tests.patience import PATIENCE_S

HERE = [contestant for contestant in CONTESTANTS if not contestant.apart]
SIZE = 3_000_000

pytestmark = pytest.mark.slow  # every contestant imports torch in a process of its own


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of one round, and two tries of each raw read: each run of each contestant is a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "_SWEEP", load._SWEEP[:1])
        return load.measure(
            load.Settings(
                sizes=(SIZE,),
                repeats=1,
                directory=tmp_path_factory.mktemp("bench"),
                peers_python=None,
                warm_up_bytes=1_000_000,
                rank_width=128,
                swap_bytes=(),
                timeout_s=PATIENCE_S,
            )
        )


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    warm_up = _write(tmp_path_factory.mktemp("runner"), "warm_up")
    defaults = {"threads": 2, "chunk_bytes": 1 << 20}
    with Runner(
        HERE, python=Path(sys.executable), peers_python=None, warm_up=warm_up, timeout_s=PATIENCE_S
    ) as runner:
        runner.defaults.update(dict.fromkeys(LIMITS.values(), defaults))
        yield runner


def _write(directory: Path, name: str, shape: str = "llama") -> Source:
    return checkpoints.write(directory / name, shape, SIZE, seed=1, peers_python=None)


def test_every_contestant_here_delivers_the_bytes_that_were_written(report: dict[str, Any]) -> None:
    assert report["faults"] == []
    assert [case["shape"] for case in report["cases"]] == ["llama", "one", "many", "as_is"]
    for case in report["cases"]:
        assert case["checked"] == [contestant.key for contestant in HERE]
        assert case["failed"] == {}
        assert case["bytes"] == SIZE // 128 * 128


def test_the_report_has_every_contestant(report: dict[str, Any]) -> None:
    for cache in ("cold", "warm"):
        found = report["cases"][0][cache]
        assert set(found) == {contestant.key for contestant in HERE if cache in contestant.caches}
        assert all(len(of["seconds"]) == 1 and min(of["seconds"]) > 0 for of in found.values())
        assert found["raw_direct"]["ratio"] == 1
        over = {key for key, of in found.items() if "over_hotswap" in of}
        assert {"safetensors", "safetensors_into", "torch_load"} <= over
    assert {"hotswap", "no_bulk", "no_direct"} <= set(report["ablation"]["seconds"])
    assert report["many_over_one"].keys() == {str(SIZE // 128 * 128)}
    assert report["machine"]["libraries"]["torch"]


def test_each_rank_reads_its_own_bytes_alone(report: dict[str, Any]) -> None:
    """And the four together the checkpoint, and what every rank has whole by design."""
    ranks = report["ranks"]
    assert ranks["foreign_bytes"] == [0, 0, 0, 0]
    assert 1 <= ranks["ratio"] <= 1.02


def test_peers_that_are_not_installed_are_named_with_the_reason(report: dict[str, Any]) -> None:
    assert set(report["unavailable"]) == {contestant.key for contestant in CONTESTANTS if contestant.apart}
    assert all("make bench-env" in reason for reason in report["unavailable"].values())


def test_a_contestant_that_delivers_other_bytes_is_out(runner: Runner) -> None:
    source = _write(runner.warm_up.directory.parent, "flipped")
    assert runner.check(runner.ready, source) == {}
    results, _ = runner.run_rounds(runner.ready[:2], source, "warm", 3)
    assert [len(runs) for runs in results.values()] == [3, 3]
    for file in (source.safetensors, source.flat_files[0]):
        _flip(file, at=file.stat().st_size // 2)
    out = runner.check(runner.ready, source)
    assert out["safetensors"] == out["raw_direct"] == "it delivered other bytes than were written"
    assert {key for key in out if key.startswith("hotswap")} == {
        contestant.key for contestant in HERE if contestant.kind == "hotswap"
    }
    assert "torch_load" not in out


def test_the_page_cache_is_seen_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(1 << 20))
    assert pagecache.fill([file]) == 1
    left = pagecache.empty([file])
    assert left == pagecache.resident_share([file])  # a file system in memory keeps all of it


def test_each_round_has_every_contestant_once_and_begins_with_the_next() -> None:
    turns = list(rounds("abc", 3))
    assert ["".join(turns[i : i + 3]) for i in (0, 3, 6)] == ["abc", "bca", "cab"]


def test_a_ratio_compares_what_ran_in_the_same_round() -> None:
    assert ratios([1.0, 10.0], [2.0, 20.0]) == [0.5, 0.5]


def _flip(file: Path, *, at: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 1]))
