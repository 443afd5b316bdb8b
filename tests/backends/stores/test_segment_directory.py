"""The directory of shared segments under races between processes, one race in each test."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hotswap import ModelId
from hotswap.backends.stores import locks, segment, shared_buffer
from hotswap.backends.stores.segment import Label, Segment
from hotswap.backends.stores.segment_directory import Busy, SegmentDirectory
from hotswap.errors import ConfigError, StoreError, TierFull

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
def joined(place: Path, budget: int = 4 * SIZE) -> Iterator[SegmentDirectory]:
    directory = SegmentDirectory(place, budget)
    directory.open()
    try:
        yield directory
    finally:
        directory.close()


def fill(directory: SegmentDirectory, label: Label) -> None:
    """Leave a whole segment there."""
    one = directory.attach_or_create(label, writable=True)
    one.reserve(0)
    one.commit(0)
    one.close()


def used(place: Path) -> int:
    return sum(file.stat().st_size for file in place.iterdir() if file.name != ".budget")


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
def test_a_segment_that_is_renamed_while_the_directory_is_listed_counts(
    place: Path, monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    scandir = os.scandir
    coming = label_of("coming")
    with joined(place, 2 * SIZE) as directory, joined(place, 2 * SIZE) as other:
        fill(directory, label_of("idle"))
        one = other.attach_or_create(coming, writable=True)
        one.commit(0)
        monkeypatch.setattr(
            os,
            "scandir",
            lambda path: _Scan(scandir(path), coming.incoming_name, one.publish, listed=listed),
        )
        directory.attach_or_create(label_of("new"), writable=True).close()
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

    with joined(place) as directory:
        fill(directory, label)
        monkeypatch.setattr(os, "open", refuse)
        for ask in (directory.attach_or_create, directory.attach):
            with pytest.raises(StoreError, match="Too many open files"):
                ask(label, writable=False)
        assert (place / label.name).exists()


@pytest.mark.parametrize("whole", [True, False])
def test_a_segment_that_is_being_removed_is_busy(place: Path, whole: bool) -> None:
    label = label_of()
    with joined(place) as directory:
        one = directory.attach_or_create(label, writable=True)
        if whole:
            one.commit(0)
        one.close()
        (path,) = (file for file in place.iterdir() if file.name != ".budget")
        removing = os.open(path, os.O_RDWR)
        assert locks.lock(removing, 0, shared=False)
        with pytest.raises(Busy):
            directory.attach_or_create(label, writable=True)
        path.unlink()
        locks.release(removing)
        directory.attach_or_create(label, writable=True).close(discard=True)


@pytest.mark.parametrize("ask", ["take", "clear"])
def test_a_segment_that_is_removed_while_room_is_made_is_no_obstacle(
    place: Path, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    with joined(place, SIZE) as directory:
        directory.attach_or_create(label_of("going"), writable=True).close()
        pinned = locks.is_locked

        def meanwhile(fd: int, byte: int) -> bool:
            (place / label_of("going").incoming_name).unlink(missing_ok=True)
            return pinned(fd, byte)

        monkeypatch.setattr(locks, "is_locked", meanwhile)
        if ask == "take":
            directory.attach_or_create(label_of("new"), writable=True).close(discard=True)
        else:
            directory.clear()
        assert used(place) == 0


def test_a_segment_that_is_renamed_while_room_is_made_still_counts(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with joined(place, SIZE) as directory, joined(place, SIZE) as other:
        one = other.attach_or_create(label_of("theirs"), writable=True)
        one.commit(0)
        pinned = locks.is_locked

        def meanwhile(fd: int, byte: int) -> bool:
            one.publish()
            return pinned(fd, byte)

        monkeypatch.setattr(locks, "is_locked", meanwhile)
        with pytest.raises(TierFull):
            directory.attach_or_create(label_of("new"), writable=True)
        assert used(place) == SIZE
        one.close()


def test_a_label_with_a_bad_name_is_not_shown(place: Path) -> None:
    label = label_of("xxx")
    with joined(place) as directory:
        fill(directory, label)
        path = place / label.name
        path.write_bytes(path.read_bytes().replace(b'"xxx"', b'"../"', 1))
        assert directory.snapshot() == (SIZE, ())


def test_a_fork_while_the_directory_is_locked_keeps_no_lock(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    close = os.close

    def close_here(fd: int) -> None:
        kept.append(os.dup(fd))  # as in a child process forked meanwhile
        close(fd)

    with joined(place) as directory:
        with monkeypatch.context() as patch:
            patch.setattr(os, "close", close_here)
            directory.pin(ModelId("m"))
            fill(directory, label_of())
            directory.attach_or_create(label_of("half"), writable=True).close()
            directory.remove(ModelId("half"))
            Segment.create(place, label_of("more")).close()
            directory.close()
        assert kept
        with joined(place, SIZE) as other:  # another budget: no other process shares the directory
            fill(other, label_of("new"))  # nor pins or uses a model
            assert used(place) == SIZE
    for fd in kept:
        close(fd)


async def test_a_long_wait_for_the_directory_is_logged_once(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_buffer, "_LONG_S", 0.002)
    answers = [False] * 4 + [True]

    def ask() -> bool:
        if not answers.pop(0):
            raise Busy
        return True

    assert await shared_buffer.retry_while_busy(ask)
    assert [record.message[:15] for record in caplog.records] == ["Another process"]


# ------------------------------------------------------------------------------ restarts, and their directory


def test_a_segment_from_before_a_reboot_is_replaced(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    label = label_of()
    with joined(place) as directory:
        fill(directory, label)
        assert directory.snapshot() == (SIZE, (label,))
    monkeypatch.setattr(segment, "boot_id", lambda: "another")
    with joined(place) as directory:
        assert directory.snapshot() == (SIZE, ())
        assert directory.attach(label, writable=False) is None
        remade = directory.attach_or_create(label, writable=True)
        assert remade.created
        remade.close(discard=True)


def test_the_boot_is_known_on_linux() -> None:
    assert len(segment.boot_id()) == 36


def test_opening_keeps_segments_that_other_processes_are_filling(place: Path) -> None:
    half = label_of("half")
    with joined(place) as directory:
        directory.attach_or_create(half, writable=True).close()  # to be resumed
        with joined(place):
            pass
        assert (place / half.incoming_name).exists()
    with joined(place):
        assert used(place) == 0


def test_a_whole_segment_of_a_dead_process_is_published(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    label = label_of()
    with joined(place) as directory, monkeypatch.context() as patch:
        patch.setattr(Segment, "publish", lambda _: None)  # where it was killed
        left = directory.attach_or_create(label, writable=True)
        left.reserve(0)
        left.commit(0)
        left.close()
    with joined(place) as directory:
        assert directory.snapshot() == (SIZE, (label,))


def test_a_smaller_budget_removes_what_it_can_beside_what_is_still_lent(place: Path) -> None:
    with joined(place, 4 * SIZE) as directory:
        for model in "abc":
            fill(directory, label_of(model))
        loan = directory.attach(label_of("b"), writable=False)
        assert loan is not None
    small = SegmentDirectory(place, SIZE - 1)
    small.open()
    assert [label.model for label in small.snapshot()[1]] == ["b"]
    small.close()
    loan.close()


def test_the_end_of_a_use_is_the_last_use(place: Path) -> None:
    with joined(place, 2 * SIZE) as directory:
        for model in "ab":
            fill(directory, label_of(model))
        long = directory.attach(label_of("a"), writable=False)
        assert long is not None
        for number, model in enumerate("ab"):
            os.utime(place / label_of(model).name, (number, number))
        long.close()
        directory.attach_or_create(label_of("c"), writable=True).close()
        assert (place / label_of("a").name).exists()
        assert not (place / label_of("b").name).exists()


@pytest.mark.parametrize("link", [False, True])
def test_a_directory_removed_under_living_processes_is_made_and_joined_again(place: Path, link: bool) -> None:
    named = place.with_name("link") if link else place
    if link:
        place.mkdir(mode=0o700)
        named.symlink_to(place)
    with joined(named, SIZE) as one, joined(named, SIZE) as other:
        one.pin(ModelId("m"))
        fill(one, label_of())
        shutil.rmtree(place)
        if link:
            place.mkdir(mode=0o700)
        fill(one, label_of())
        with pytest.raises(TierFull):
            other.attach_or_create(label_of("new"), writable=True)
        assert other.snapshot() == (SIZE, (label_of(),))
        with pytest.raises(ConfigError, match="budget"):
            SegmentDirectory(named, 2 * SIZE).open()


def test_a_directory_that_was_made_again_with_another_budget_is_not_used(place: Path) -> None:
    with joined(place, SIZE) as directory:
        shutil.rmtree(place)
        with joined(place, 2 * SIZE), pytest.raises(StoreError, match="made again by another process"):
            directory.attach_or_create(label_of(), writable=True)
        directory.attach_or_create(label_of(), writable=True).close(discard=True)


def test_a_removed_segment_does_not_replace_its_successor(place: Path) -> None:
    label = label_of()
    with joined(place) as one, joined(place) as other:
        removed = one.attach_or_create(label, writable=True)
        shutil.rmtree(place)
        made = other.attach_or_create(label, writable=True)
        removed.commit(0)
        removed.close(discard=True)
        assert (place / label.incoming_name).exists()
        made.close(discard=True)


def test_only_its_owner_clears_a_directory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with joined(place) as directory:
        fill(directory, label_of())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="another user's"):
        SegmentDirectory(place, 0).clear()
    monkeypatch.undo()
    monkeypatch.setattr(locks, "supported", lambda: False)
    with pytest.raises(ConfigError, match="needs Linux"):
        SegmentDirectory(place, 0).clear()
    assert used(place) == SIZE


def test_memory_that_is_full_does_not_say_that_nothing_has_changed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with joined(place, SIZE) as directory:
        fill(directory, label_of("idle"))
        monkeypatch.setattr(os, "ftruncate", full)
        with pytest.raises(TierFull, match="idle ones may have been evicted"):
            directory.attach_or_create(label_of("new"), writable=True)
        assert used(place) == 0
