"""One rank's flat buffer in a file that processes map: a head that says what it is, then the bytes.

    <directory>/<model>.<rank>-of-<world>.<digest>            whole, and verified by who filled it
    <directory>/.<model>.<rank>-of-<world>.<digest>.coming    being filled, or left half-filled

    head     one line of JSON, `Label.dump`, padded with zeros to 1024 bytes. It names the run of the
             machine: pages are never synced, so where they are on a disk a new run may find others
             one byte: all pages are reserved
             one byte for each shard, in buffer order: it is there, verified as the store that it was read
             from does (`NvmeStore(verify="never")` does not)
             zeros to the next multiple of 4096
    bytes    the buffer

`<digest>` stands for the manifest, so that weights that were converted anew never pass for the old ones. Two
bytes of the file are locked (see `locks`): byte 0 shared by every process that has the segment mapped and
exclusively by who removes it, byte 1 by the one process that writes to it. Locks go with their process, so
whatever it was doing when it was killed, the next one finds the file free and the shards marked that are
good. Everything here blocks, though for no longer than memory takes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import re
import stat
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

from hotswap.backends.stores import locks
from hotswap.backends.stores.fields import Fields, parse_object
from hotswap.backends.stores.layout import align, check_file_name
from hotswap.errors import ShardCorrupt
from hotswap.model import Manifest
from hotswap.request import ModelId

__all__ = [
    "Label",
    "Segment",
    "boot_id",
    "digest_of",
    "give_name",
    "is_nameable",
    "parse_name",
    "removable",
    "whole_path",
]

FORMAT: Final = "hotswap-segment"
VERSION: Final = 1

_USED, _FILLING = 0, 1  # the bytes that are locked
_TEXT_BYTES = 1024
_RESERVE_BYTES = 256 << 20
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # whatever lies there, opening it waits for nobody
_NO_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO})  # a link, a directory, a socket
_MODEL = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}"
_NAME = re.compile(
    rf"(?P<dot>\.?)(?P<model>{_MODEL})\.(?P<rank>\d+)-of-(?P<world>\d+)"
    r"\.(?P<digest>[0-9a-f]{16})(?P<coming>(\.coming)?)"
)
_REMEDY = "Remove it with `hotswap store clear`."


def boot_id() -> str:
    """What tells this run of the machine from every other; empty where the system does not say it."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return ""


def digest_of(manifest: Manifest) -> str:
    """What tells this manifest from every other, also from one of the same model converted anew."""
    return hashlib.sha256(repr(manifest).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What a segment holds. `weight_bytes` is the whole model's, `num_shards` the rank's."""

    model: ModelId
    rank: int
    world_size: int
    digest: str
    buffer_bytes: int
    weight_bytes: int
    num_shards: int

    @classmethod
    def of(cls, manifest: Manifest, rank: int, digest: str) -> Self:
        """The label of one rank of a model."""
        return cls(
            model=manifest.model,
            rank=rank,
            world_size=manifest.world_size,
            digest=digest,
            buffer_bytes=manifest.buffer_bytes,
            weight_bytes=manifest.weight_bytes,
            num_shards=len(manifest.shards_of(rank)),
        )

    @property
    def name(self) -> str:
        """The file's name once it is whole."""
        check_file_name(self.model, "a segment")
        return f"{self.model}.{self.rank}-of-{self.world_size}.{self.digest}"

    @property
    def coming_name(self) -> str:
        """The file's name until then."""
        return f".{self.name}.coming"

    @property
    def head_bytes(self) -> int:
        """Where the buffer begins in the file."""
        return align(_TEXT_BYTES + 1 + self.num_shards)

    @property
    def size_bytes(self) -> int:
        """The whole file, which is what counts against a budget."""
        return self.head_bytes + align(self.buffer_bytes)

    def dump(self) -> bytes:
        """The text at the beginning of the file."""
        head = {"format": FORMAT, "version": VERSION, "boot": boot_id()}
        text = json.dumps({**head, **asdict(self)}).encode()
        return text.ljust(_TEXT_BYTES, b"\0")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the label of a whole segment, of which nothing is known, and see that it is one.

        Raises:
            ShardCorrupt: it is no segment of this version, not whole, or not what its name says.
            FileNotFoundError: it is not there.
        """
        fd = os.open(path, os.O_RDONLY | _FLAGS)
        try:
            text = parse_object(os.pread(fd, _TEXT_BYTES, 0).rstrip(b"\0"), path, remedy=_REMEDY)
            label = cls._parse(text)
            named = parse_name(path.name)
            if named is None or named[0] != label.model or path.name not in (label.name, label.coming_name):
                raise text.wrong("it has another segment's name")
            if complaint := _complaint(fd, label, whole=True):
                raise text.wrong(complaint)
        finally:
            os.close(fd)
        return label

    @classmethod
    def _parse(cls, text: Fields) -> Self:
        if text.get("format") != FORMAT or text.get("version") != VERSION:
            raise text.wrong(f"it is no segment of version {VERSION}")
        if text.get("boot") != boot_id():
            raise text.wrong("it is from before the machine was started")
        return cls(
            model=ModelId(text.text("model")),
            rank=text.size("rank"),
            world_size=text.size("world_size", least=1),
            digest=text.text("digest"),
            buffer_bytes=text.size("buffer_bytes"),
            weight_bytes=text.size("weight_bytes"),
            num_shards=text.size("num_shards"),
        )


def is_nameable(model: ModelId) -> bool:
    """Whether a segment could have the model's name: ids of users may be anything, such as "org/model"."""
    return re.fullmatch(_MODEL, model) is not None


def parse_name(name: str) -> tuple[ModelId, str, bool] | None:
    """The model, the digest, and whether it is whole, of a segment's file name; `None` if it is none's."""
    match = _NAME.fullmatch(name)
    if match is None or bool(match["dot"]) != bool(match["coming"]):
        return None
    return ModelId(match["model"]), match["digest"], not match["coming"]


def give_name(coming: Path) -> bool:
    """Give its name to a whole segment that somebody died with before it had it; false if it is not whole.

    The directory's books are locked meanwhile.
    """
    final = whole_path(coming)
    with suppress(OSError, ShardCorrupt):
        Label.read(coming)
        if not os.path.lexists(final):
            coming.rename(final)
            return True
    return False


def whole_path(coming: Path) -> Path:
    """Where a segment lies once it has its name."""
    return coming.with_name(coming.name.removeprefix(".").removesuffix(".coming"))


class Segment:
    """A mapped segment; while it is mapped no process removes it. `created` if it was not there before."""

    def __init__(self, label: Label, fd: int, path: Path, *, writable: bool, created: bool = False) -> None:
        self.label = label
        self.created = created
        self._fd = fd
        self._path = path
        self._map = mmap.mmap(
            fd, label.size_bytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        )
        whole = memoryview(self._map)
        self._flags = whole[_TEXT_BYTES : _TEXT_BYTES + 1 + label.num_shards]
        self.memory = whole[label.head_bytes : label.head_bytes + label.buffer_bytes]
        whole.release()

    @property
    def path(self) -> Path:
        """The file, by the name that it has now."""
        return self._path

    @classmethod
    def create(cls, directory: Path, label: Label) -> Self:
        """Make a segment that is coming, sparse still; the directory's books are locked meanwhile."""
        path = directory / label.coming_name
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
        try:
            locks.lock(fd, _USED, shared=True)
            os.ftruncate(fd, label.size_bytes)
            os.pwrite(fd, label.dump(), 0)
            return cls(label, fd, path, writable=True, created=True)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise

    @classmethod
    def attach(cls, path: Path, label: Label, *, writable: bool) -> Self | None:
        """Map the segment at `path`, and count it as used now; `None` if there is none, or it is just going.

        Raises:
            ShardCorrupt: what lies there is not what the label says; nothing was changed.
        """
        try:
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | _FLAGS)
        except FileNotFoundError:
            return None
        except OSError as exc:
            if exc.errno not in _NO_FILE:
                raise
            raise ShardCorrupt(f"{str(path)!r} is no segment: {exc.strerror}. {_REMEDY}") from exc
        try:
            regular = stat.S_ISREG(os.fstat(fd).st_mode)
            if regular and not (locks.lock(fd, _USED, shared=True) and os.fstat(fd).st_nlink):
                return None
            if complaint := _complaint(fd, label, whole=path.name == label.name):
                raise ShardCorrupt(f"{str(path)!r} cannot be used: {complaint}. {_REMEDY}")
            segment = cls(label, fd, path, writable=writable)
            _stamp(fd)
            fd = -1
            return segment
        finally:
            if fd >= 0:
                os.close(fd)

    @property
    def whole(self) -> bool:
        """Whether all shards are there."""
        return all(self._flags[1:])

    @property
    def num_reservations(self) -> int:
        """How many calls of `reserve` it takes until all pages are there; 0 if they are."""
        return 0 if self._flags[0] else -(-self.label.size_bytes // _RESERVE_BYTES)

    def reserve(self, number: int) -> None:
        """Make the pages of one part of the file, so that writing to the memory cannot fail.

        A write to a page that a full file system does not have would end the process (SIGBUS).
        """
        start = number * _RESERVE_BYTES
        size = min(_RESERVE_BYTES, self.label.size_bytes - start)
        os.posix_fallocate(self._fd, start, size)
        if start + size == self.label.size_bytes:
            self._flags[0] = 1

    def has(self, shard: int) -> bool:
        """Whether the rank's shard of that number is there, whoever wrote it."""
        return bool(self._flags[1 + shard])

    def commit(self, shard: int) -> None:
        """Say that a shard is there and verified."""
        self._flags[1 + shard] = 1

    def try_filling(self) -> bool:
        """Become the process that writes; false while another one does."""
        return locks.lock(self._fd, _FILLING, shared=False)

    def end_filling(self) -> None:
        """Let another process write; a segment that is whole by now gets its name."""
        try:
            self.publish()
        finally:
            locks.unlock(self._fd, _FILLING)

    def publish(self) -> None:
        """Give a segment its name if it is whole and has not got it: it appears with all its bytes."""
        final = self._path.with_name(self.label.name)
        if self.whole and self._path != final:
            if os.fstat(self._fd).st_nlink:  # else it was removed, and its name may be another's by now
                with suppress(FileNotFoundError):  # another process that had it mapped was first
                    self._path.rename(final)
            self._path = final

    def close(self, *, discard: bool = False) -> bool:
        """Unmap, and let others remove it; with `discard` remove it if nobody else has it mapped.

        If a reader kept a view of the memory, it goes when the view does. Return whether it was removed.
        """
        with suppress(OSError):
            self.publish()
            _stamp(self._fd)  # a use counts from its end
        self._flags.release()
        with suppress(BufferError):
            self.memory.release()
        with suppress(BufferError):
            self._map.close()
        try:
            removed = discard and locks.lock(self._fd, _USED, shared=False)
            if removed and os.fstat(self._fd).st_nlink:
                self._path.unlink(missing_ok=True)
            locks.unlock(self._fd, _USED)
            locks.unlock(self._fd, _FILLING)
        finally:
            os.close(self._fd)
        return removed


def _stamp(fd: int) -> None:
    """Count a segment as used now; the file system's own clock may stand still for some milliseconds."""
    now_ns = time.time_ns()
    os.utime(fd, ns=(now_ns, now_ns))


def removable(path: Path) -> int | None:
    """Lock what lies at `path` against use, and return the descriptor to `release`; `None` if it is in use.

    Raises:
        FileNotFoundError: it is not there, or not any more.
    """
    try:
        fd = os.open(path, os.O_RDWR | _FLAGS)
    except FileNotFoundError:
        raise
    except OSError:
        return None
    try:
        if locks.lock(fd, _USED, shared=False) and os.path.samestat(os.fstat(fd), path.lstat()):
            kept, fd = fd, -1
            return kept
        return None
    finally:
        if fd >= 0:
            locks.release(fd)


def _complaint(fd: int, label: Label, *, whole: bool) -> str | None:
    """What is wrong with a file that should be the segment of a label."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return "it is no regular file"
    if status.st_size != label.size_bytes:
        return f"it is {status.st_size} bytes long, not {label.size_bytes}"
    head = os.pread(fd, _TEXT_BYTES + 1 + label.num_shards, 0)
    if head[:_TEXT_BYTES] != label.dump():
        return "its label is another one, or of another version"
    if whole and not all(head[_TEXT_BYTES:]):
        return "it has a whole segment's name and is not whole"
    return None
