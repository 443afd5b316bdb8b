"""Writing: a model appears whole or not at all, whatever fails while it is written."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotswap import ModelId
from hotswap.backends.stores import NvmeStore
from hotswap.backends.stores.writer import Progress, sweep, write_model
from hotswap.errors import ConfigError, StoreError, TierFull
from tests.backends.stores.models import UNIT, blank, content, put, read_rank

M = ModelId("m")


class Interrupted(Exception):
    """Raised by a caller from `progress` to end a conversion."""


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def write(root: Path, **options: object) -> None:
    manifest = blank()
    write_model(root, manifest, [[memoryview(rank)] for rank in content(manifest)], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("file_bytes", [1, UNIT, 3 * UNIT, 1 << 30])
def test_files_are_aligned_and_no_longer_than_asked(tmp_path: Path, file_bytes: int) -> None:
    manifest, _ = put(tmp_path, size=7 * UNIT + 100, file_bytes=file_bytes)
    sizes = [(tmp_path / M / shard.file).stat().st_size for shard in manifest.shards]
    assert sizes == [shard.size_bytes for shard in manifest.shards]
    assert sum(sizes) == manifest.buffer_bytes == 8 * UNIT
    assert all(size % UNIT == 0 and size <= max(file_bytes, UNIT) for size in sizes)


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    put(tmp_path, "before")

    def interrupt(progress: Progress) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        write(tmp_path, progress=interrupt)
    assert names(tmp_path) == ["before"]


async def test_a_failed_replacement_leaves_the_former_model(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path)

    def pieces() -> Iterator[memoryview]:
        yield memoryview(bytes(UNIT))
        raise OSError("unplugged")

    with pytest.raises(StoreError, match="Check the disk"):
        write_model(tmp_path, blank(), [pieces()], replace_existing=True)
    async with NvmeStore(tmp_path) as store:
        assert await read_rank(store, manifest) == ranks[0]
    assert names(tmp_path) == [M]


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_replacement_takes_the_place_of_the_former(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    put(tmp_path, seed=0)
    if not at_once:  # as where the system knows no exchange of names
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    manifest = blank()
    ranks = content(manifest, seed=1)
    written = write_model(tmp_path, manifest, [[memoryview(ranks[0])]], replace_existing=True)
    async with NvmeStore(tmp_path) as store:
        assert await read_rank(store, written) == ranks[0]
    assert names(tmp_path) == [M]


def test_two_writers_of_one_model_make_one(tmp_path: Path) -> None:
    def overtake(progress: Progress) -> None:
        if not (tmp_path / M).exists():
            put(tmp_path)

    with pytest.raises(ConfigError, match="--replace"):
        write(tmp_path, progress=overtake)
    assert names(tmp_path) == [M]


# The child says "writing" once it has written something, and then waits for its end.
_CHILD = """
    import sys
    from pathlib import Path
    from hotswap.backends.stores.writer import write_model
    from tests.backends.stores.models import blank, content

    def wait(progress):
        print("writing", flush=True)
        sys.stdin.read()

    write_model(Path(sys.argv[1]), blank(), [[memoryview(r)] for r in content(blank())], progress=wait)
"""


def start_writing(root: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_CHILD), str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    return child


async def test_a_killed_conversion_leaves_nothing_half_made(tmp_path: Path) -> None:
    with start_writing(tmp_path) as child:
        (leftover,) = names(tmp_path)
        assert leftover.endswith(".partial")
        assert sweep(tmp_path) == [], "a living writer's directory was swept"
        assert names(tmp_path) == [leftover]
        child.send_signal(signal.SIGKILL)
    assert names(tmp_path) == [leftover]
    async with NvmeStore(tmp_path) as store:
        assert store.view().residency == ()
        assert names(tmp_path) == []


async def test_a_sweep_leaves_a_living_writer_alone(tmp_path: Path) -> None:
    with start_writing(tmp_path) as child:
        async with NvmeStore(tmp_path):
            pass
        child.communicate("")
    assert child.returncode == 0
    assert names(tmp_path) == [M]


@pytest.fixture
def file_size_limit() -> Iterator[int]:
    """No file of this process may be longer; writing on fails as on a full disk, root or not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = 3 * UNIT
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_disk_that_fills_up_leaves_what_was_there(tmp_path: Path, file_size_limit: int) -> None:
    before, ranks = put(tmp_path, "before", size=2 * UNIT)
    with pytest.raises(TierFull, match=f"{tmp_path}.*{5 * UNIT} bytes"):
        write(tmp_path, max_file_bytes=64 * UNIT)
    assert names(tmp_path) == ["before"]
    async with NvmeStore(tmp_path) as store:
        assert await read_rank(store, before) == ranks[0]


def test_a_disk_without_room_is_refused_before_writing(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    manifest = blank(size=free + (64 << 30))
    with pytest.raises(TierFull, match=str(tmp_path)):
        write_model(tmp_path / "root", manifest, [])
    assert names(tmp_path / "root") == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB, where the tests may mount one."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


async def test_a_real_disk_that_is_full_leaves_what_was_there(tiny_disk: Path) -> None:
    before, ranks = put(tiny_disk, "before", size=4 * UNIT)
    filler = tiny_disk / "filler"

    def others_write_too(progress: Progress) -> None:
        filler.write_bytes(bytes(min(9 * UNIT, os.statvfs(tiny_disk).f_bavail * UNIT)))

    manifest = blank(size=8 * UNIT)
    pieces = [
        memoryview(rank[start : start + UNIT])
        for rank in content(manifest)
        for start in range(0, 8 * UNIT, UNIT)
    ]
    with pytest.raises(TierFull, match=str(tiny_disk)):
        write_model(tiny_disk, manifest, [pieces], max_file_bytes=UNIT, progress=others_write_too)
    assert names(tiny_disk) == ["before", "filler"]
    async with NvmeStore(tiny_disk) as store:
        assert await read_rank(store, before) == ranks[0]
