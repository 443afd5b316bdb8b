"""The books of shared memory where processes meet: each test holds one of their races open."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hotswap import StoreError, TierFull
from hotswap.backends.stores import locks, shared_buffer
from hotswap.backends.stores.segment import Label, Segment
from hotswap.backends.stores.segment_shelf import Busy, SegmentShelf
from hotswap.request import ModelId

BYTES = 4096


def label_of(model: str = "m", *, digest: str = "0" * 16, num_shards: int = 1) -> Label:
    return Label(
        model=ModelId(model),
        rank=0,
        world_size=1,
        digest=digest,
        buffer_bytes=BYTES,
        weight_bytes=BYTES,
        num_shards=num_shards,
    )


SIZE = label_of().size_bytes


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@contextmanager
def shelf_at(place: Path, budget: int = 4 * SIZE) -> Iterator[SegmentShelf]:
    shelf = SegmentShelf(place, budget)
    shelf.open()
    try:
        yield shelf
    finally:
        shelf.close()


def fill(shelf: SegmentShelf, label: Label) -> None:
    """Leave a whole segment there."""
    segment = shelf.take(label, writable=True)
    segment.commit(0)
    segment.close()


def used(place: Path) -> int:
    return sum(file.stat().st_size for file in place.iterdir() if file.name != ".books")


class _Scan:
    """A directory's listing that runs `meanwhile` when it has reached a file, and may leave that one out."""

    def __init__(self, scan: Any, name: str, meanwhile: Callable[[], None], *, listed: bool) -> None:
        self._scan, self._name, self._meanwhile, self._listed = scan, name, meanwhile, listed

    def __enter__(self) -> Iterator[os.DirEntry[str]]:
        return self._entries()

    def __exit__(self, *_: object) -> None:
        self._scan.close()

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        for entry in self._scan:
            if entry.name == self._name:
                self._meanwhile()
                if not self._listed:
                    continue
            yield entry


@pytest.mark.parametrize("listed", [True, False])
def test_a_segment_that_gets_its_name_while_the_directory_is_listed_counts(
    place: Path, monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    scandir = os.scandir
    coming = label_of("coming")
    with shelf_at(place, 2 * SIZE) as shelf, shelf_at(place, 2 * SIZE) as other:
        fill(shelf, label_of("idle"))
        segment = other.take(coming, writable=True)
        segment.commit(0)
        monkeypatch.setattr(
            os,
            "scandir",
            lambda path: _Scan(scandir(path), coming.coming_name, segment.publish, listed=listed),
        )
        shelf.take(label_of("new"), writable=True).close()
        assert used(place) == 2 * SIZE
        segment.close()


def test_too_many_open_files_do_not_make_a_good_segment_a_bad_one(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    label = label_of()
    opened = os.open

    def refuse(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if os.fspath(path) == os.fspath(place / label.name):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(path, flags, mode, **more)

    with shelf_at(place) as shelf:
        fill(shelf, label)
        monkeypatch.setattr(os, "open", refuse)
        for ask in (shelf.take, shelf.attach):
            with pytest.raises(StoreError, match="Too many open files"):
                ask(label, writable=False)
        assert (place / label.name).exists()


@pytest.mark.parametrize("whole", [True, False])
def test_who_wants_a_segment_that_is_just_removed_asks_again(place: Path, whole: bool) -> None:
    label = label_of()
    with shelf_at(place) as shelf:
        segment = shelf.take(label, writable=True)
        if whole:
            segment.commit(0)
        segment.close()
        (path,) = (file for file in place.iterdir() if file.name != ".books")
        removing = os.open(path, os.O_RDWR)
        assert locks.lock(removing, 0, shared=False)
        with pytest.raises(Busy):
            shelf.take(label, writable=True)
        path.unlink()
        locks.release(removing)
        shelf.take(label, writable=True).close(discard=True)


@pytest.mark.parametrize("ask", ["take", "clear"])
def test_what_its_user_removes_while_room_is_made_is_no_obstacle(
    place: Path, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    with shelf_at(place, SIZE) as shelf:
        shelf.take(label_of("going"), writable=True).close()
        pinned = locks.is_locked

        def meanwhile(fd: int, byte: int) -> bool:
            (place / label_of("going").coming_name).unlink(missing_ok=True)
            return pinned(fd, byte)

        monkeypatch.setattr(locks, "is_locked", meanwhile)
        if ask == "take":
            shelf.take(label_of("new"), writable=True).close(discard=True)
        else:
            shelf.clear()
        assert used(place) == 0


def test_what_got_its_name_while_room_is_made_is_not_taken_for_gone(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shelf_at(place, SIZE) as shelf, shelf_at(place, SIZE) as other:
        segment = other.take(label_of("theirs"), writable=True)
        segment.commit(0)
        pinned = locks.is_locked

        def meanwhile(fd: int, byte: int) -> bool:
            segment.publish()
            return pinned(fd, byte)

        monkeypatch.setattr(locks, "is_locked", meanwhile)
        with pytest.raises(TierFull):
            shelf.take(label_of("new"), writable=True)
        assert used(place) == SIZE
        segment.close()


def test_a_label_with_a_bad_name_is_not_shown(place: Path) -> None:
    label = label_of("xxx")
    with shelf_at(place) as shelf:
        fill(shelf, label)
        path = place / label.name
        path.write_bytes(path.read_bytes().replace(b'"xxx"', b'"../"', 1))
        assert shelf.snapshot() == (SIZE, ())


def test_a_fork_while_the_books_are_locked_stops_nobody(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    close = os.close

    def close_here(fd: int) -> None:
        kept.append(os.dup(fd))  # as a process that was forked meanwhile has it
        close(fd)

    with shelf_at(place) as shelf:
        with monkeypatch.context() as patch:
            patch.setattr(os, "close", close_here)
            shelf.pin(ModelId("m"))
            fill(shelf, label_of())
            shelf.take(label_of("half"), writable=True).close()
            shelf.remove(ModelId("half"))
            Segment.create(place, label_of("more")).close()
            shelf.close()
        assert kept
        with shelf_at(place, SIZE) as other:  # another budget: nobody else has the books open
            fill(other, label_of("new"))  # nor pins or uses a model
            assert used(place) == SIZE
    for fd in kept:
        close(fd)


async def test_who_waits_long_for_the_books_says_so_once(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_buffer, "_LONG_S", 0.002)
    answers = [False] * 4 + [True]

    def ask() -> bool:
        if not answers.pop(0):
            raise Busy
        return True

    assert await shared_buffer.patiently(ask)
    assert [record.message[:15] for record in caplog.records] == ["Another process"]
