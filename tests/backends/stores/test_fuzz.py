"""Mutated models: a slice of `benchmarks.fuzz`, and checks that it detects faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import fuzz
from hotswap.abc import HostChunk, Shard
from hotswap.backends.stores import NvmeStore
from hotswap.backends.stores.files import BlockFile

NUM_CASES = 1000


def test_mutated_models_load_right_or_are_refused(tmp_path: Path) -> None:
    report = fuzz.fuzz(1, range(NUM_CASES), directory=tmp_path)
    assert not report.failures
    assert report.num_cases == sum(report.outcomes.values()) == NUM_CASES
    assert set(report.outcomes) == {"loaded", "ShardCorrupt", "ShardMissing", "UnsafeFile"}


def test_a_case_depends_on_the_seed_and_its_number_only(tmp_path: Path) -> None:
    together = fuzz.fuzz(5, range(12), directory=tmp_path).outcomes
    alone = [fuzz.fuzz(5, [case], directory=tmp_path).outcomes for case in range(12)]
    assert sum((outcomes for outcomes in alone), start=type(together)()) == together


def test_reads_outside_a_file_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockFile, "check_size", lambda self, end_bytes: None)
    failures = fuzz.fuzz(1, range(NUM_CASES), directory=tmp_path).failures
    assert any("bytes were read at" in failure for failure in failures)


def test_untyped_errors_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: NvmeStore, shard: Shard, destination: memoryview) -> HostChunk:
        raise KeyError(shard.file)

    monkeypatch.setattr(NvmeStore, "read_into", broken)
    failures = fuzz.fuzz(1, range(100), directory=tmp_path).failures
    assert any("KeyError" in failure for failure in failures)
