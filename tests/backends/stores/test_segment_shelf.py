"""The books of shared memory where processes meet: each test holds one of their races open."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hotswap import ConfigError, StoreError, TierFull
from hotswap.backends.stores import locks, segment, shared_buffer
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
    one = shelf.take(label, writable=True)
    one.reserve(0)
    one.commit(0)
    one.close()


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
        one = other.take(coming, writable=True)
        one.commit(0)
        monkeypatch.setattr(
            os,
            "scandir",
            lambda path: _Scan(scandir(path), coming.coming_name, one.publish, listed=listed),
        )
        shelf.take(label_of("new"), writable=True).close()
        assert used(place) == 2 * SIZE
        one.close()


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
        one = shelf.take(label, writable=True)
        if whole:
            one.commit(0)
        one.close()
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
        one = other.take(label_of("theirs"), writable=True)
        one.commit(0)
        pinned = locks.is_locked

        def meanwhile(fd: int, byte: int) -> bool:
            one.publish()
            return pinned(fd, byte)

        monkeypatch.setattr(locks, "is_locked", meanwhile)
        with pytest.raises(TierFull):
            shelf.take(label_of("new"), writable=True)
        assert used(place) == SIZE
        one.close()


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


# ------------------------------------------------------------------------------ restarts, and their directory


def test_a_segment_from_before_the_machine_was_started_is_remade(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    label = label_of()
    with shelf_at(place) as shelf:
        fill(shelf, label)
        assert shelf.snapshot() == (SIZE, (label,))
    monkeypatch.setattr(segment, "boot_id", lambda: "another")
    with shelf_at(place) as shelf:
        assert shelf.snapshot() == (SIZE, ())
        assert shelf.attach(label, writable=False) is None
        remade = shelf.take(label, writable=True)
        assert remade.created
        remade.close(discard=True)


def test_the_boot_is_known_on_linux() -> None:
    assert len(segment.boot_id()) == 36


def test_opening_leaves_alone_what_others_have_half_filled(place: Path) -> None:
    half = label_of("half")
    with shelf_at(place) as shelf:
        shelf.take(half, writable=True).close()  # to be gone on with
        with shelf_at(place):
            pass
        assert (place / half.coming_name).exists()
    with shelf_at(place):
        assert used(place) == 0


def test_what_was_whole_when_its_process_died_gets_its_name(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    label = label_of()
    with shelf_at(place) as shelf, monkeypatch.context() as patch:
        patch.setattr(Segment, "publish", lambda _: None)  # where it was killed
        left = shelf.take(label, writable=True)
        left.reserve(0)
        left.commit(0)
        left.close()
    with shelf_at(place) as shelf:
        assert shelf.snapshot() == (SIZE, (label,))


def test_a_smaller_budget_removes_what_it_can_beside_what_is_still_lent(place: Path) -> None:
    with shelf_at(place, 4 * SIZE) as shelf:
        for model in "abc":
            fill(shelf, label_of(model))
        loan = shelf.attach(label_of("b"), writable=False)
        assert loan is not None
    small = SegmentShelf(place, SIZE - 1)
    small.open()
    assert [label.model for label in small.snapshot()[1]] == ["b"]
    small.close()
    loan.close()


def test_a_use_counts_from_its_end(place: Path) -> None:
    with shelf_at(place, 2 * SIZE) as shelf:
        for model in "ab":
            fill(shelf, label_of(model))
        long = shelf.attach(label_of("a"), writable=False)
        assert long is not None
        for number, model in enumerate("ab"):
            os.utime(place / label_of(model).name, (number, number))
        long.close()
        shelf.take(label_of("c"), writable=True).close()
        assert (place / label_of("a").name).exists()
        assert not (place / label_of("b").name).exists()


@pytest.mark.parametrize("link", [False, True])
def test_a_directory_removed_under_living_processes_is_made_and_shared_anew(place: Path, link: bool) -> None:
    named = place.with_name("link") if link else place
    if link:
        place.mkdir(mode=0o700)
        named.symlink_to(place)
    with shelf_at(named, SIZE) as one, shelf_at(named, SIZE) as other:
        one.pin(ModelId("m"))
        fill(one, label_of())
        shutil.rmtree(place)
        if link:
            place.mkdir(mode=0o700)
        fill(one, label_of())
        with pytest.raises(TierFull):
            other.take(label_of("new"), writable=True)
        assert other.snapshot() == (SIZE, (label_of(),))
        with pytest.raises(ConfigError, match="budget"):
            SegmentShelf(named, 2 * SIZE).open()


def test_a_directory_that_others_took_over_meanwhile_is_not_used(place: Path) -> None:
    with shelf_at(place, SIZE) as shelf:
        shutil.rmtree(place)
        with shelf_at(place, 2 * SIZE), pytest.raises(StoreError, match="made anew by somebody else"):
            shelf.take(label_of(), writable=True)
        shelf.take(label_of(), writable=True).close(discard=True)


def test_what_was_removed_takes_no_name_from_what_came_after_it(place: Path) -> None:
    label = label_of()
    with shelf_at(place) as one, shelf_at(place) as other:
        removed = one.take(label, writable=True)
        shutil.rmtree(place)
        made = other.take(label, writable=True)
        removed.commit(0)
        removed.close(discard=True)
        assert (place / label.coming_name).exists()
        made.close(discard=True)


def test_only_its_owner_clears_a_directory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with shelf_at(place) as shelf:
        fill(shelf, label_of())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="another user's"):
        SegmentShelf(place, 0).clear()
    monkeypatch.undo()
    monkeypatch.setattr(locks, "supported", lambda: False)
    with pytest.raises(ConfigError, match="needs Linux"):
        SegmentShelf(place, 0).clear()
    assert used(place) == SIZE


def test_memory_that_is_full_does_not_say_that_nothing_has_changed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with shelf_at(place, SIZE) as shelf:
        fill(shelf, label_of("idle"))
        monkeypatch.setattr(os, "ftruncate", full)
        with pytest.raises(TierFull, match="idle ones may have gone"):
            shelf.take(label_of("new"), writable=True)
        assert used(place) == 0
