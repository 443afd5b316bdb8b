"""What a checkpoint's files were when they were converted, to notice that they have changed since.

Comparing takes milliseconds: small files are read whole, of weight files the header. Only a weight file that
has another modification time is read to its end, which proves whether it is a copy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Self

from hotswap.backends.stores.checkpoint import weight_files
from hotswap.backends.stores.fields import parse_object
from hotswap.backends.stores.files import map_read_errors
from hotswap.backends.stores.layout import CHECKPOINT_FILES, MORE_TEMPLATES, SIDE_FILES, Checksum
from hotswap.backends.stores.sources.tensor_files import MOST_HEADER_BYTES
from hotswap.backends.stores.text_files import read_more_templates
from hotswap.model import Layout

__all__ = ["ConversionOptions", "Fingerprint"]

FORMAT: Final = "hotswap-source"
VERSION: Final = 2

# What a conversion reads beside the weights. A file that a later release adds is not held against older ones.
_SMALL_FILES = tuple(sorted({"config.json", "model.safetensors.index.json", *SIDE_FILES, *CHECKPOINT_FILES}))
_PIECE_BYTES = 4 << 20
_GGUF_HEAD_BYTES = 1 << 20  # its header has no length; a vocabulary takes megabytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionOptions:
    """What a model was converted with, so that it can be converted again alike; see `convert`."""

    dtype: str | None = None
    world_size: int = 1
    quantize: str | None = None
    layout: Layout = "modules"


@dataclass(frozen=True, slots=True, kw_only=True)
class _WeightFile:
    """A file of weights: `header` is a digest of its header, `checksum` one of the whole file."""

    size_bytes: int
    mtime_ns: int
    header: str
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The files of a checkpoint as they were.

    `small` has digests of small files by name, `None` of one that was missing.
    """

    options: ConversionOptions
    small: Mapping[str, str | None]
    weights: Mapping[str, _WeightFile]

    @classmethod
    def of(
        cls,
        source: Path,
        options: ConversionOptions = ConversionOptions(),
        *,
        progress: Callable[[], None] | None = None,
    ) -> Self:
        """Read a checkpoint to its end. Blocking.

        `progress` is called every 4 MiB, and its errors end the reading. Raises as `read_checkpoint` does,
        and `StoreError` if a file cannot be read.
        """
        with map_read_errors(source):
            return cls(
                options=options,
                small={name: _small(source, name) for name in _SMALL_FILES},
                weights={path.name: _weight_file(path, progress) for path in weight_files(source)},
            )

    def difference(self, source: Path) -> str | None:
        """Return what is different at `source` now, as the end of a sentence; `None` if nothing is. Blocking.

        Small files are compared by content, weight files by name, length, header and modification time. A
        weight file with another time is read, and is equal if its CRC-32 is. What goes unnoticed is an edit
        in place that changes weights, and neither a length nor the time.
        """
        with map_read_errors(source):
            for name, digest in self.small.items():
                if (now := _small(source, name)) != digest:
                    return f"{name!r} {_change(digest, now)}"
            paths = {path.name: path for path in weight_files(source)}
            for name in sorted(paths.keys() ^ self.weights.keys()):
                return f"{name!r} is new" if name in paths else f"{name!r} is gone"
            changes = (_weight_change(path, self.weights[name]) for name, path in paths.items())
            return next(filter(None, changes), None)

    def with_times_of(self, source: Path) -> Self:
        """Return the same with the modification times of files that `difference` found to be equal."""
        with map_read_errors(source):
            times = {path.name: path.stat().st_mtime_ns for path in weight_files(source)}
        return replace(
            self, weights={name: replace(file, mtime_ns=times[name]) for name, file in self.weights.items()}
        )

    def dump(self) -> bytes:
        """The text of it, for a file beside the weights."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, sort_keys=True).encode()

    @classmethod
    def parse(cls, text: bytes, path: Path) -> Self:
        """Return what `dump` has written.

        Raises:
            ShardCorrupt: the text is something else.
        """
        fields = parse_object(text, path)
        if fields.text("format") != FORMAT or fields.size("version") != VERSION:
            raise fields.wrong(f"it is no fingerprint of version {VERSION}")
        try:
            return cls._made(fields.raw)
        except (AttributeError, KeyError, TypeError) as exc:
            raise fields.wrong("a field is missing or of another type") from exc

    @classmethod
    def _made(cls, raw: dict[str, Any]) -> Self:
        weights = {name: _WeightFile(**file) for name, file in raw["weights"].items()}
        return cls(options=ConversionOptions(**raw["options"]), small=dict(raw["small"]), weights=weights)


def _weight_file(path: Path, progress: Callable[[], None] | None) -> _WeightFile:
    status = path.stat()
    return _WeightFile(
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        header=_digest(_header(path)),
        checksum=_checksum(path, progress),
    )


def _change(before: str | None, now: str | None) -> str:
    if before is None:
        return "is new"
    return "is gone" if now is None else "has other content"


def _weight_change(path: Path, before: _WeightFile) -> str | None:
    status = path.stat()
    if status.st_size != before.size_bytes:
        return f"{path.name!r} has {status.st_size:,} bytes, and had {before.size_bytes:,}"
    if _digest(_header(path)) != before.header:
        return f"{path.name!r} has other tensors"
    if status.st_mtime_ns != before.mtime_ns and _checksum(path) != before.checksum:
        return f"{path.name!r} has other weights"
    return None


def _small(source: Path, name: str) -> str | None:
    source = source if source.is_dir() else source.parent  # of a GGUF file
    if name == MORE_TEMPLATES:
        text = read_more_templates(source)
    else:
        text = (source / name).read_bytes() if (source / name).is_file() else None
    return None if text is None else _digest(text)


def _header(path: Path) -> bytes:
    """The header of a safetensors file, whose length comes first, or the first bytes of a GGUF file."""
    with path.open("rb") as file:
        if path.suffix == ".gguf":
            return file.read(_GGUF_HEAD_BYTES)
        return file.read(int.from_bytes(file.read(8), "little") % (MOST_HEADER_BYTES + 1))


def _checksum(path: Path, progress: Callable[[], None] | None = None) -> str:
    checksum, piece = Checksum(), memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(piece):
            checksum.update(piece[:num_bytes])
            if progress is not None:
                progress()
    return str(checksum)


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()
