"""The directory that a model is written in, until it gets its name: there whole, or not there.

A model is written into `.<id>.<key>.partial` beside its final name, synced, and renamed. The writer holds a
lock (`flock`) on that directory, which the kernel drops when the process dies: a leftover is a partial
directory that nobody has locked. `sweep` removes it, unless its journal says that a writer can go on there.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from hotswap.backends.stores.journal import Journal, has_progress
from hotswap.errors import ConfigError

__all__ = ["AlreadyThere", "already_there", "partial", "publish", "sweep", "sync_directory"]

_SUFFIX = ".partial"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class AlreadyThere(ConfigError):
    """The store has a model of that id, which was not to be replaced."""


def already_there(final: Path) -> AlreadyThere:
    """Return the error that says so."""
    return AlreadyThere(f"{str(final)!r} is there already. Remove it first, or convert with `--replace`.")


def sweep(root: Path) -> list[Path]:
    """Remove what writers that died have left under `root`, and return it; living writers are left alone.

    So is what a conversion can go on from: it goes when that conversion, or another of the model, is begun.
    """
    swept: list[Path] = []
    for directory in sorted(root.glob(f".*{_SUFFIX}")):
        with suppress(OSError), _locked(directory):
            if not has_progress(directory):
                shutil.rmtree(directory)
                swept.append(directory)
    return swept


@contextmanager
def partial(root: Path, model: str, key: str | None) -> Generator[tuple[Path, Journal | None]]:
    """A locked directory beside the model's own, gone when the block ends unless it was renamed.

    With a `key` it is the one where a writer with this key died, if there is one, and stays when the process
    is interrupted.
    """
    _sweep_others(root, model, key)
    with _resumable(root, model, key) as directory:
        if directory is not None and key is not None:
            keep = False
            try:
                yield directory, Journal(directory, key)
            except (KeyboardInterrupt, SystemExit):
                keep = has_progress(directory)
                raise
            finally:
                if not keep:
                    shutil.rmtree(directory, ignore_errors=True)
            return
    with _temporary(root, model) as directory:
        yield directory, None


@contextmanager
def _resumable(root: Path, model: str, key: str | None) -> Generator[Path | None]:
    """The directory of a key, `None` without one, or while another writer has it."""
    directory = root / f".{model}.{key}{_SUFFIX}"
    with ExitStack() as lock:
        found = False
        if key is not None:
            with suppress(OSError):
                directory.mkdir(exist_ok=True)
                lock.enter_context(_locked(directory))
                found = directory.exists()
        yield directory if found else None


@contextmanager
def _temporary(root: Path, model: str) -> Generator[Path]:
    while True:
        directory = root / f".{model}.{secrets.token_hex(4)}{_SUFFIX}"
        directory.mkdir()
        with _locked(directory):
            if not directory.exists():  # swept between its making and its locking
                continue
            try:
                yield directory
            finally:
                shutil.rmtree(directory, ignore_errors=True)
            return


def _sweep_others(root: Path, model: str, key: str | None) -> None:
    """Remove what conversions of this model with other options or of another source had left."""
    name = re.compile(rf"\.{re.escape(model)}\.[0-9a-f]+(\.old)?{re.escape(_SUFFIX)}")
    for directory in root.iterdir():
        if name.fullmatch(directory.name) and directory.name != f".{model}.{key}{_SUFFIX}":
            with suppress(OSError), _locked(directory):
                shutil.rmtree(directory)


@contextmanager
def _locked(directory: Path) -> Generator[None]:
    """Hold the lock on a directory; `OSError` if another process, or another writer of this one, has it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def publish(directory: Path, final: Path, *, replace_existing: bool) -> None:
    """Give a finished directory its name; the one that had it, if any, gets the other's, and goes with it."""
    sync_directory(directory)
    try:
        directory.rename(final)
    except OSError as exc:
        if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not replace_existing:
            raise already_there(final) from exc
        _exchange(directory, final)
    sync_directory(final.parent)


def _exchange(one: Path, other: Path) -> None:
    """Swap the names of two directories: at once on Linux, so that a crash finds one of them whole."""
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None, use_errno=True)
        if not libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
            return
    aside = one.with_name(f"{one.name.removesuffix(_SUFFIX)}.old{_SUFFIX}")
    other.rename(aside)
    one.rename(other)
    aside.rename(one)


def sync_directory(directory: Path) -> None:
    """Put the names in a directory on the disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
