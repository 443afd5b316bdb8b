"""The hidden directory that a model is written in, and its atomic rename to the model's name.

A model is written into `.<id>.<key>.partial` beside its final name, synced, and renamed. The writer holds the
lock of that directory (`locks`): an unlocked one is a leftover. `sweep` removes it, unless its journal lets a
conversion resume from it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from hotswap.backends.stores.durable import sync_directory
from hotswap.backends.stores.journal import Journal, has_progress
from hotswap.backends.stores.locks import LockWait, holder_of, locked
from hotswap.errors import ConfigError, StoreBusy

__all__ = [
    "AlreadyThere",
    "check_name",
    "partial_directory",
    "publish",
    "sweep",
    "temporary_directory",
    "unused",
]

_SUFFIX = ".partial"
_LEFTOVERS = (_SUFFIX, ".removed")
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class AlreadyThere(ConfigError):
    """The store has a model of that id, and it was not to be replaced."""


def check_name(final: Path, *, replace_existing: bool, wait: LockWait | None = None) -> None:
    """Raise unless a model may be published as `final` now; see `publish`."""
    if not final.exists():
        return
    if not replace_existing:
        raise AlreadyThere(f"{str(final)!r} is there already. Remove it first, or convert with `--replace`.")
    with suppress(FileNotFoundError), unused(final, wait):
        return


@contextmanager
def unused(directory: Path, wait: LockWait | None = None) -> Generator[None]:
    """Keep a model from being read and pinned while the block runs.

    Raises:
        StoreBusy: a process reads or pins it, until the end of `wait`.
        FileNotFoundError: it does not exist, or was removed meanwhile.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(directory, wait))
        except (BlockingIOError, StoreBusy) as exc:
            raise StoreBusy(
                f"Model {directory.name!r} in {str(directory.parent)!r} is in use by {holder_of(directory)}; "
                "nothing was changed. Try again when its reads and pins have ended."
            ) from exc
        yield


def sweep(root: Path) -> list[Path]:
    """Remove what dead writers and removals have left under `root`, and return the paths.

    Directories of living processes stay, and so do those that a conversion can resume from: the next
    conversion of the model uses or removes them.
    """
    swept: list[Path] = []
    for directory in sorted(root.glob(".*")):
        if directory.suffix in _LEFTOVERS:
            with suppress(OSError), locked(directory):
                if not has_progress(directory):
                    shutil.rmtree(directory)
                    swept.append(directory)
    return swept


@contextmanager
def partial_directory(root: Path, model: str, key: str | None) -> Generator[tuple[Path, Journal | None]]:
    """Make and lock a directory beside the one called `model`, deleted when the block ends unless renamed.

    With a `key`, a directory that a dead writer of the same key has left is reused, and the directory is
    kept when the process is interrupted, or the model that it would replace is in use.
    """
    _sweep_others(root, model, key)
    with _resumable(root, model, key) as directory:
        if directory is not None and key is not None:
            keep = False
            try:
                yield directory, Journal(directory, key)
            except (KeyboardInterrupt, SystemExit, StoreBusy):
                keep = has_progress(directory)
                raise
            finally:
                if not keep:
                    shutil.rmtree(directory, ignore_errors=True)
            return
    with temporary_directory(root, model) as directory:
        yield directory, None


@contextmanager
def _resumable(root: Path, model: str, key: str | None) -> Generator[Path | None]:
    """Lock the directory of a key; `None` without a key, or while another writer holds it."""
    directory = root / f".{model}.{key}{_SUFFIX}"
    with ExitStack() as lock:
        found = False
        if key is not None:
            with suppress(OSError):
                directory.mkdir(mode=0o700, exist_ok=True)
                lock.enter_context(locked(directory))
                found = True
        yield directory if found else None


@contextmanager
def temporary_directory(root: Path, model: str) -> Generator[Path]:
    """Make and lock a new directory for a model, deleted when the block ends unless renamed."""
    with ExitStack() as stack:
        directory: Path | None = None
        while directory is None:
            made = root / f".{model}.{secrets.token_hex(4)}{_SUFFIX}"
            made.mkdir(mode=0o700)
            with suppress(FileNotFoundError, BlockingIOError):  # it was swept before it was locked
                stack.enter_context(locked(made))
                directory = made
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        yield directory


def _sweep_others(root: Path, model: str, key: str | None) -> None:
    """Remove leftovers of conversions of this model with other options or from another source."""
    name = re.compile(rf"\.{re.escape(model)}\.[0-9a-f]+(\.old)?{re.escape(_SUFFIX)}")
    for directory in root.iterdir():
        if name.fullmatch(directory.name) and directory.name != f".{model}.{key}{_SUFFIX}":
            with suppress(OSError), locked(directory):
                shutil.rmtree(directory)


def publish(directory: Path, final: Path, *, replace_existing: bool, wait: LockWait | None = None) -> None:
    """Rename a finished directory to its final name, in exchange with a model that has it.

    Raises:
        AlreadyThere: there is a model of that name, which was not to be replaced.
        StoreBusy: a process reads or pins it, until the end of `wait`.
    """
    sync_directory(directory)
    while not _renamed(directory, final):
        check_name(final, replace_existing=replace_existing, wait=wait)
        with suppress(FileNotFoundError), unused(final, wait):
            _exchange(directory, final)
            break
    sync_directory(final.parent)


def _renamed(directory: Path, final: Path) -> bool:
    """Rename a directory; false if there is another one of that name, which is not empty."""
    try:
        directory.rename(final)
    except OSError as exc:
        if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


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
