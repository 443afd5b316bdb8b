"""A segment: a file with one rank's flat buffer that several processes map; a header, then the bytes.

    <directory>/<model>.<rank>-of-<world>.<digest>              whole and verified
    <directory>/.<model>.<rank>-of-<world>.<digest>.incoming    being filled, or left incomplete

    header   one line of JSON, `Label.dump`, padded with zeros to 1024 bytes; it has the machine's boot id,
             because pages are never synced: a file on a disk may have other content after a reboot
             one byte: all pages are allocated
             one byte for each shard, in buffer order: it is written, and verified if the store that it was
             read from verifies (`NvmeStore(verify="never")` does not)
             zeros to the next multiple of 4096
    bytes    the buffer

`<digest>` is the manifest's, so that weights of another conversion never pass for these. Two bytes of the
file are locked (see `locks`): byte 0 shared by each process that has the segment mapped, exclusively for its
removal; byte 1 by the one process that writes to it. The kernel releases locks with their process: after a
crash the next process finds the file unlocked, and its finished shards marked. Everything here blocks, but
only for as long as access to memory takes.
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

from hotswap.backends.fields import Fields, parse_object
from hotswap.backends.memory import allocate
from hotswap.backends.stores import locks
from hotswap.backends.stores.layout import align, model_in, model_name
from hotswap.errors import ShardCorrupt
from hotswap.model import Manifest
from hotswap.model_id import directory_name
from hotswap.request import ModelId

__all__ = [
    "Label",
    "Segment",
    "boot_id",
    "digest_of",
    "is_nameable",
    "lock_for_removal",
    "parse_name",
    "publish_if_whole",
    "whole_path",
]

FORMAT: Final = "hotswap-segment"
VERSION: Final = 1

_USED, _FILLING = 0, 1  # the bytes that are locked
_TEXT_BYTES = 1024
_RESERVE_BYTES = 256 << 20
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a FIFO must not block
_NO_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO})  # a link, a directory, a socket
_NAME = re.compile(
    r"(?P<dot>\.?)(?P<model>.+)\.(?P<rank>\d+)-of-(?P<world>\d+)"
    r"\.(?P<digest>[0-9a-f]{16})(?P<incoming>(\.incoming)?)"
)
_REMEDY = "Remove it with `hotswap store clear`."


def boot_id() -> str:
    """The id of this boot of the machine; empty where the system has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return ""


def digest_of(manifest: Manifest) -> str:
    """A digest that differs between manifests, also between conversions of one model."""
    return hashlib.sha256(repr(manifest).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Describes a segment. `weight_bytes` is the whole model's, `num_shards` the rank's."""

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
        """The name of the whole file."""
        return f"{model_name(self.model, 'a segment')}.{self.rank}-of-{self.world_size}.{self.digest}"

    @property
    def incoming_name(self) -> str:
        """The name of the file while it is filled."""
        return f".{self.name}.incoming"

    @property
    def header_bytes(self) -> int:
        """The offset of the buffer in the file."""
        return align(_TEXT_BYTES + 1 + self.num_shards)

    @property
    def size_bytes(self) -> int:
        """The size of the file, which is what counts against a budget."""
        return self.header_bytes + align(self.buffer_bytes)

    def dump(self) -> bytes:
        """The text at the beginning of the file."""
        fields = {"format": FORMAT, "version": VERSION, "boot": boot_id(), **asdict(self)}
        text = json.dumps(fields).encode()
        return text.ljust(_TEXT_BYTES, b"\0")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the label of a whole segment, and check that the file is one.

        Raises:
            ShardCorrupt: it is no segment of this version, not whole, or contradicts its name.
            FileNotFoundError: there is no file.
        """
        fd = os.open(path, os.O_RDONLY | _FLAGS)
        try:
            text = parse_object(os.pread(fd, _TEXT_BYTES, 0).rstrip(b"\0"), path, remedy=_REMEDY)
            label = cls._parse(text)
            named = parse_name(path.name)
            if named is None or named[0] != label.model or path.name not in (label.name, label.incoming_name):
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
    """Whether the model id can be part of a file name, as the id of every `Model` can."""
    try:
        return bool(directory_name(model))
    except ValueError:
        return False


def parse_name(name: str) -> tuple[ModelId, str, bool] | None:
    """Return model, digest and whether it is whole from a segment's file name; `None` for another file."""
    match = _NAME.fullmatch(name)
    model = None if match is None else model_in(match["model"])
    if match is None or model is None or bool(match["dot"]) != bool(match["incoming"]):
        return None
    return model, match["digest"], not match["incoming"]


def publish_if_whole(incoming: Path) -> bool:
    """Rename a whole segment that a dead process has left under its incoming name; false if not whole.

    The directory is locked meanwhile.
    """
    final = whole_path(incoming)
    with suppress(OSError, ShardCorrupt):
        Label.read(incoming)
        if not os.path.lexists(final):
            incoming.rename(final)
            return True
    return False


def whole_path(incoming: Path) -> Path:
    """The path of a segment once it is whole."""
    return incoming.with_name(incoming.name.removeprefix(".").removesuffix(".incoming"))


class Segment:
    """A mapped segment, which no process removes while it is mapped. `created` if it is new."""

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
        self.memory = whole[label.header_bytes : label.header_bytes + label.buffer_bytes]
        whole.release()

    @property
    def path(self) -> Path:
        """The file, by its present name."""
        return self._path

    @classmethod
    def create(cls, directory: Path, label: Label) -> Self:
        """Create an incoming segment, still sparse. The directory is locked meanwhile."""
        path = directory / label.incoming_name
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
        """Map the segment at `path`, and count it as used now; `None` if it is absent or being removed.

        Raises:
            ShardCorrupt: the file does not match the label; nothing was changed.
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
            _touch(fd)
            fd = -1
            return segment
        finally:
            if fd >= 0:
                os.close(fd)

    @property
    def whole(self) -> bool:
        """Whether all shards are committed."""
        return all(self._flags[1:])

    @property
    def num_reservations(self) -> int:
        """How many calls of `reserve` allocate all pages; 0 if they are allocated."""
        return 0 if self._flags[0] else -(-self.label.size_bytes // _RESERVE_BYTES)

    def reserve(self, number: int) -> None:
        """Allocate the pages of one part of the file, so that writing to the memory cannot fail.

        Without it, a write on a full file system would end the process (SIGBUS).
        """
        start = number * _RESERVE_BYTES
        size = min(_RESERVE_BYTES, self.label.size_bytes - start)
        allocate(self._fd, start, size)
        if start + size == self.label.size_bytes:
            self._flags[0] = 1

    def has(self, shard: int) -> bool:
        """Whether the rank's shard of that number is committed, by any process."""
        return bool(self._flags[1 + shard])

    def commit(self, shard: int) -> None:
        """Mark a shard as written and verified."""
        self._flags[1 + shard] = 1

    def try_filling(self) -> bool:
        """Become the process that writes; false while another process is."""
        return locks.lock(self._fd, _FILLING, shared=False)

    def end_filling(self) -> None:
        """Let another process write; a whole segment is published."""
        try:
            self.publish()
        finally:
            locks.unlock(self._fd, _FILLING)

    def publish(self) -> None:
        """Rename a whole segment to its final name, if it has not got it: it appears with all its bytes."""
        final = self._path.with_name(self.label.name)
        if self.whole and self._path != final:
            if os.fstat(self._fd).st_nlink:  # else it was removed, and the name may be a new file's
                with suppress(FileNotFoundError):  # another process has renamed it
                    self._path.rename(final)
            self._path = final

    def close(self, *, discard: bool = False) -> bool:
        """Unmap and unlock; with `discard` remove the file unless another process has it mapped.

        If a reader kept a view of the memory, it stays mapped until the view is freed. Return whether the
        file was removed.
        """
        with suppress(OSError):
            self.publish()
            _touch(self._fd)  # the last use is its end
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


def _touch(fd: int) -> None:
    """Set a segment's time of last use to now; a file system's own clock may lag some milliseconds."""
    now_ns = time.time_ns()
    os.utime(fd, ns=(now_ns, now_ns))


def lock_for_removal(path: Path) -> int | None:
    """Lock the file at `path` against use, and return the descriptor to `release`; `None` if it is in use.

    Raises:
        FileNotFoundError: there is no file, or it was removed meanwhile.
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
    """Return why a file is not the segment of a label, `None` if it is."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return "it is no regular file"
    if status.st_size != label.size_bytes:
        return f"it is {status.st_size} bytes long, not {label.size_bytes}"
    header = os.pread(fd, _TEXT_BYTES + 1 + label.num_shards, 0)
    if header[:_TEXT_BYTES] != label.dump():
        return "its label is another one, or of another version"
    if whole and not all(header[_TEXT_BYTES:]):
        return "it has a whole segment's name and is not whole"
    return None
