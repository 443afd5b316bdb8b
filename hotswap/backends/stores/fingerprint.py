"""What a checkpoint's files were when they were imported, to notice that they have changed since.

Comparing takes milliseconds: small files are read whole, of weight files the header. Only a weight file that
has another modification time is read to its end, which proves whether it is a copy.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Self

from hotswap.backends.fields import parse_object
from hotswap.backends.hub import find
from hotswap.backends.stores.checkpoint import (
    MOST_HEADER_BYTES,
    has_checkpoint,
    read_checkpoint,
    reading_source,
    weight_files,
)
from hotswap.backends.stores.files import read_small, write_file
from hotswap.backends.stores.layout import CHECKPOINT_FILES, MORE_TEMPLATES, SIDE_FILES, SOURCE_NAME, Checksum
from hotswap.backends.stores.text_files import read_more_templates
from hotswap.errors import ShardCorrupt, ShardMissing, SourceChanged
from hotswap.model import Layout, Manifest, Model

__all__ = ["ConversionOptions", "Fingerprint", "ImportedModel"]

_log = logging.getLogger("hotswap.stores")
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
        with reading_source(source):
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
        with reading_source(source):
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
        with reading_source(source):
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


def _is_there(source: Path) -> bool:
    with reading_source(source):
        return has_checkpoint(source)


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
        if path.suffix.lower() == ".gguf":
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


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """A model in a store on disk: its directory and its manifest."""

    directory: Path
    manifest: Manifest

    def options_to_convert_again(self, model: Model) -> ConversionOptions | None:
        """Return how to convert the model anew; `None` if the weights are to be served as they are. Blocking.

        A source that is gone, or has no `config.json` any more, has not changed: a checkpoint may be deleted
        once it is imported.

        Raises:
            SourceChanged: the checkpoint has changed, and `model.on_change` is `"refuse"`.
            StoreError: it cannot be read.
        """
        assert model.source is not None, "a model without a source has nothing to compare"
        source = find(model.source)
        if source is None or not _is_there(source):
            return None
        fingerprint = self._fingerprint()
        change: str | None
        if model.layout not in (None, self.manifest.layout):
            change = f"it is there in the layout {self.manifest.layout!r}, and {model.layout!r} is asked for"
        elif fingerprint is None:
            change = self._change_of_config(model.id, source)
        else:
            change = fingerprint.difference(source)
        if change is None:
            if fingerprint is not None:
                self._note_times(fingerprint, fingerprint.with_times_of(source))
            return None
        what = f"The checkpoint of model {model.id!r} in {str(source)!r} is not the one it was imported from"
        if model.on_change == "refuse":
            raise SourceChanged(
                f"{what}: {change}. Convert it anew by `Model(..., on_change='convert')` or `hotswap store "
                "add --replace`, or serve the weights that were imported by `on_change='serve'`."
            )
        if model.on_change == "serve":
            _log.warning("%s: %s. The weights that were imported are served.", what, change)
            return None
        _log.warning("%s: %s. It is converted anew.", what, change)
        options = fingerprint.options if fingerprint is not None else self._options()
        return self._in_layout(options, model.layout)

    def _in_layout(self, options: ConversionOptions, layout: Layout | None) -> ConversionOptions:
        """The options of before, or those of another layout that is asked for."""
        return options if layout in (None, options.layout) else ConversionOptions(layout=layout)

    def _fingerprint(self) -> Fingerprint | None:
        path = self.directory / SOURCE_NAME
        try:
            return Fingerprint.parse(read_small(path), path)
        except ShardMissing:
            return None
        except ShardCorrupt as exc:
            _log.warning("%s", exc)
            return None

    def _note_times(self, before: Fingerprint, now: Fingerprint) -> None:
        """Keep the times of a copy, so that its files are not read again."""
        if now == before:
            return
        path = self.directory / f".{SOURCE_NAME}.{secrets.token_hex(4)}"
        try:
            write_file(path, now.dump())
            path.replace(self.directory / SOURCE_NAME)
        except OSError as exc:  # a root that may only be read, for instance
            _log.info("The times of the checkpoint were not kept in %r: %s", str(self.directory), exc)

    def _change_of_config(self, model: str, source: Path) -> str | None:
        """Compare the config, all that is known of a model imported before its files were recorded."""
        if json.loads(read_checkpoint(source).config) != json.loads(self.manifest.config):
            return "'config.json' has other content"
        _log.warning(
            "Model %r was imported before the files of checkpoints were recorded: its config alone was "
            "compared with %r. Import it again by `hotswap store add --replace` to have all compared.",
            model,
            str(source),
        )
        return None

    def _options(self) -> ConversionOptions:
        """What the manifest tells of the options."""
        return ConversionOptions(
            world_size=self.manifest.world_size,
            quantize=self.manifest.quantization or None,
            layout=self.manifest.layout,
        )
