"""Links through shared memory are for processes of one user, whatever others try."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

import pytest

from hotswap.backends.transports import connect_shared, serve_shared
from hotswap.errors import ConfigError, MigrationAborted
from tests.backends.transports.processes import run_module, said
from tests.backends.transports.recording import RecordingEngine
from tests.backends.transports.strangers import logged, move, served_at

OTHER = 65534  # a user without rights on most systems; it needs no name

needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root may start processes of another user"
)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@contextmanager
def umask(mask: int) -> Generator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def other_user(work: str, path: Path) -> AbstractAsyncContextManager[subprocess.Popen[str]]:
    """A process of another user, which does the work of `other_user.py` at a path."""
    return run_module("other_user", str(OTHER), work, str(path))


@contextmanager
def open_folder() -> Generator[Path]:
    """A directory that every user may pass through, unlike those of tests."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o711)
        yield Path(folder)


# ---------------------------------------------------------------------- paths


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
async def test_the_directory_and_the_socket_are_for_one_user(mask: int, tmp_path: Path) -> None:
    path = tmp_path / "links" / "s"
    with umask(mask):
        async with served_at(path, RecordingEngine()):
            assert (mode_of(path.parent), mode_of(path)) == (0o700, 0o600)
            async with await connect_shared(path) as channel:
                await move(channel)
    assert os.listdir(path.parent) == []


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory is in files here")
async def test_the_reason_why_there_is_no_memory_for_a_link_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_file(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    path = tmp_path / "links" / "s"
    async with served_at(path, RecordingEngine()):
        with monkeypatch.context() as patched:
            patched.setattr(os, "memfd_create", no_file)
            with pytest.raises(MigrationAborted, match=r"Too many open files\. The request"):
                await connect_shared(path)
        async with await connect_shared(path) as channel:
            await move(channel)


@pytest.mark.parametrize("mode", [0o755, 0o711, 0o770, 0o1777])
async def test_a_directory_that_is_open_to_others_is_refused_and_left_as_it_is(
    mode: int, tmp_path: Path
) -> None:
    folder = tmp_path / "links"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match=f"open to other users .mode {mode:o}.*`chmod 700`"):
        await serve_shared(RecordingEngine().import_kv, folder / "s")  # type: ignore[arg-type]
    assert (mode_of(folder), os.listdir(folder)) == (mode, [])


@needs_root
async def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "links"
    folder.mkdir(mode=0o700)
    os.chown(folder, OTHER, OTHER)
    with pytest.raises(ConfigError, match=f"of user {OTHER}"):
        await serve_shared(RecordingEngine().import_kv, folder / "s")  # type: ignore[arg-type]
    assert os.listdir(folder) == []


# ---------------------------------------------------------------------- other users


@needs_root
async def test_a_process_of_another_user_cannot_reach_the_socket() -> None:
    with open_folder() as folder, logged() as lines:
        path = folder / "links" / "s"
        async with served_at(path, engine := RecordingEngine()):
            async with other_user("plant", path) as process:
                assert await said(process) == "not connected"
            async with await connect_shared(path) as channel:
                await move(channel)
    assert (len(engine.requests), lines) == (1, [])


@needs_root
async def test_a_process_of_another_user_is_refused_where_the_path_was_opened() -> None:
    with open_folder() as folder, logged() as lines:
        path = folder / "links" / "s"
        async with served_at(path, engine := RecordingEngine()):
            path.parent.chmod(0o755)
            path.chmod(0o666)
            async with other_user("plant", path) as process:
                assert await said(process) == "disconnected"
            async with await connect_shared(path) as channel:
                await move(channel)
    assert len(engine.requests) == 1, "the planted request was taken"
    assert f"in its handshake: the process at the other end ({process.pid}) is of user {OTHER}" in lines[0]


@needs_root
async def test_a_server_of_another_user_is_offered_no_memory() -> None:
    with open_folder() as folder:
        path = folder / "links" / "s"
        path.parent.mkdir(mode=0o700)
        os.chown(path.parent, OTHER, OTHER)
        async with other_user("listen", path) as process:
            assert await said(process) == "ready"
            with pytest.raises(MigrationAborted, match=f"is of user {OTHER}, not of 0") as refused:
                await connect_shared(path)
            assert await said(process) == "0 bytes and 0 files"
    assert refused.value.stage == "link"
