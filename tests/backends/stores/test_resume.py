"""A killed conversion is resumed, and never uses files of another conversion."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotswap.abc import Manifest
from hotswap.backends.stores import NvmeStore
from hotswap.backends.stores.convert import Progress, convert
from hotswap.backends.stores.partial import JOURNAL_NAME
from hotswap.backends.stores.writer import sweep

FILE_BYTES = 8192
OPTIONS: dict[str, Any] = {"model_id": "tiny", "max_file_bytes": FILE_BYTES, "world_size": 2}

# Kills itself when so many bytes are written.
_CHILD = """
    import os, signal, sys
    from hotswap.backends.stores.convert import convert

    def die(progress):
        if progress.done_bytes >= int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)

    convert(sys.argv[1], sys.argv[2], model_id="tiny", max_file_bytes=8192, world_size=2, progress=die)
"""


def killed(source: Path, root: Path, at: int) -> Path:
    """Convert in a process that is killed, and return the directory that it left."""
    command = [sys.executable, "-c", textwrap.dedent(_CHILD), str(source), str(root), str(at)]
    subprocess.run(command, check=False, capture_output=True)
    (left,) = root.iterdir()
    return left


def interrupted(source: Path, root: Path, at: int) -> None:
    """Convert up to so many bytes, as if the process had been interrupted there."""

    def interrupt(progress: Progress) -> None:
        if progress.phase == "write" and progress.done_bytes >= at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, root, **OPTIONS, progress=interrupt)


def contents(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / "tiny").iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> tuple[Manifest, dict[str, bytes]]:
    """The result of an undisturbed conversion."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("whole")
    return convert(checkpoint, root, **OPTIONS), contents(root)


async def opened(root: Path) -> NvmeStore:
    """Open a store, which removes leftovers, and close it."""
    async with NvmeStore(root) as store:
        assert store.view().residency == ()
    return store


def test_a_killed_conversion_is_continued(
    tmp_path: Path, checkpoint: Path, whole: tuple[Manifest, dict[str, bytes]]
) -> None:
    manifest, expected = whole
    at = manifest.weight_bytes * 2 // 3
    left = killed(checkpoint, tmp_path, at)
    done = [path for path in left.glob("*.bin") if path.stat().st_size == FILE_BYTES]
    assert len(done) > 2
    anyio.run(opened, tmp_path)
    assert left.exists(), "a store swept what a conversion could go on from"
    stamps = {path.name: path.stat().st_mtime_ns for path in done}
    seen: list[Progress] = []
    assert convert(checkpoint, tmp_path, **OPTIONS, progress=seen.append) == manifest
    assert contents(tmp_path) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    kept = [name for name in stamps if (tmp_path / "tiny" / name).stat().st_mtime_ns == stamps[name]]
    assert len(kept) * FILE_BYTES >= at - 2 * FILE_BYTES, "it began again"
    writes = [progress.done_bytes for progress in seen if progress.phase == "write"]
    assert writes[0] == len(kept) * FILE_BYTES
    assert writes == sorted(writes)
    assert writes[-1] == manifest.weight_bytes


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_interruptions_and_any_damage_end_in_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    checkpoint: Path,
    whole: tuple[Manifest, dict[str, bytes]],
    data: st.DataObject,
) -> None:
    manifest, expected = whole
    root = tmp_path_factory.mktemp("root")
    for _ in range(data.draw(st.integers(1, 3))):
        interrupted(checkpoint, root, data.draw(st.integers(1, manifest.weight_bytes)))
        for left in root.iterdir():
            assert left.name.endswith(".partial")
            damage(left, data)
    assert convert(checkpoint, root, **OPTIONS) == manifest
    assert contents(root) == expected
    assert [path.name for path in root.iterdir()] == ["tiny"]


def damage(directory: Path, data: st.DataObject) -> None:
    """Perhaps delete, truncate or change one of the files that were left."""
    path = data.draw(st.sampled_from(sorted(directory.iterdir())))
    content = path.read_bytes()
    match data.draw(st.sampled_from(["nothing", "lose", "cut", "flip"])):
        case "lose":
            path.unlink()
        case "cut":
            path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
        case "flip" if content:
            at = data.draw(st.integers(0, len(content) - 1))
            path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])


def test_nothing_is_kept_of_another_source_or_other_options(tmp_path: Path, checkpoint: Path) -> None:
    source, root = tmp_path / "source", tmp_path / "root"
    shutil.copytree(checkpoint, source)
    interrupted(source, root, 30_000)
    (first,) = root.iterdir()
    weights = source / "model.safetensors"
    stat = weights.stat()
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    interrupted(source, root, 30_000)
    (second,) = root.iterdir()
    assert first.name != second.name
    seen: list[Progress] = []
    convert(source, root, model_id="tiny", progress=seen.append)
    assert [progress.done_bytes for progress in seen][:2] == [0, 0]
    assert [path.name for path in root.iterdir()] == ["tiny"]


def test_what_has_finished_nothing_is_swept(tmp_path: Path, checkpoint: Path) -> None:
    left = killed(checkpoint, tmp_path, 1)
    assert (left / JOURNAL_NAME).exists()
    assert sweep(tmp_path) == [left]


def test_another_writer_of_the_same_does_not_share_the_directory(
    tmp_path: Path, checkpoint: Path, whole: tuple[Manifest, dict[str, bytes]]
) -> None:
    def overtake(progress: Progress) -> None:
        if progress.done_bytes > 20_000 and not (tmp_path / "tiny").exists():
            convert(checkpoint, tmp_path, **OPTIONS)

    convert(checkpoint, tmp_path, **{**OPTIONS, "replace_existing": True}, progress=overtake)
    assert contents(tmp_path) == whole[1]
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_an_error_leaves_nothing_to_continue(tmp_path: Path, checkpoint: Path) -> None:
    def fail(progress: Progress) -> None:
        if progress.done_bytes > 30_000:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        convert(checkpoint, tmp_path, **OPTIONS, progress=fail)
    assert list(tmp_path.iterdir()) == []
