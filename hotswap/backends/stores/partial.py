"""The hidden directory that a conversion writes a model in, and its atomic rename to the model's name.

A model is written into `.<id>.<key>.partial` beside its final name, synced, and renamed. The writer holds a
lock (`flock`) on that directory, which the kernel releases when the process ends: an unlocked partial
directory is a leftover. `sweep` removes it, unless its journal lets a conversion resume from it.
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

from hotswap.backends.stores.durable import sync_directory
from hotswap.backends.stores.journal import Journal, has_progress
from hotswap.errors import ConfigError

__all__ = ["AlreadyThere", "already_there", "partial_directory", "publish", "sweep"]

_SUFFIX = ".partial"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class AlreadyThere(ConfigError):
    """The store has a model of that id, and it was not to be replaced."""


def already_there(final: Path) -> AlreadyThere:
    """Return the error for a model that exists."""
    return AlreadyThere(f"{str(final)!r} is there already. Remove it first, or convert with `--replace`.")


def sweep(root: Path) -> list[Path]:
    """Remove what dead writers have left under `root`, and return the paths.

    Directories of living writers stay, and so do those that a conversion can resume from: the next
    conversion of the model uses or removes them.
    """
    swept: list[Path] = []
    for directory in sorted(root.glob(f".*{_SUFFIX}")):
        with suppress(OSError), _locked(directory):
            if not has_progress(directory):
                shutil.rmtree(directory)
                swept.append(directory)
    return swept


@contextmanager
def partial_directory(root: Path, model: str, key: str | None) -> Generator[tuple[Path, Journal | None]]:
    """Make and lock a directory beside the one called `model`, deleted when the block ends unless renamed.

    With a `key`, a directory that a dead writer of the same key has left is reused, and the directory is
    kept when the process is interrupted.
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
    """Lock the directory of a key; `None` without a key, or while another writer holds it."""
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
            if not directory.exists():  # swept before it was locked
                continue
            try:
                yield directory
            finally:
                shutil.rmtree(directory, ignore_errors=True)
            return


def _sweep_others(root: Path, model: str, key: str | None) -> None:
    """Remove leftovers of conversions of this model with other options or from another source."""
    name = re.compile(rf"\.{re.escape(model)}\.[0-9a-f]+(\.old)?{re.escape(_SUFFIX)}")
    for directory in root.iterdir():
        if name.fullmatch(directory.name) and directory.name != f".{model}.{key}{_SUFFIX}":
            with suppress(OSError), _locked(directory):
                shutil.rmtree(directory)


@contextmanager
def _locked(directory: Path) -> Generator[None]:
    """Hold the lock on a directory; `OSError` if another writer, of this process or another, holds it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def publish(directory: Path, final: Path, *, replace_existing: bool) -> None:
    """Rename a finished directory to its final name; an existing one takes its name, and is deleted later."""
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
    """Exchange the names of two directories; atomic on Linux, so that a crash leaves one of them whole."""
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None, use_errno=True)
        if not libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
            return
    aside = one.with_name(f"{one.name.removesuffix(_SUFFIX)}.old{_SUFFIX}")
    other.rename(aside)
    one.rename(other)
    aside.rename(one)
