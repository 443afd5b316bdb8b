"""Loading the indexes of the models in a directory, parsed again only when their bytes have changed."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import threading
from collections import OrderedDict
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from hotswap.backends.stores.fields import Fields
from hotswap.backends.stores.files import BlockFile, check_no_link, read_head, read_small
from hotswap.backends.stores.index import parse_index
from hotswap.backends.stores.layout import INDEX_NAME, check_file_name, model_directory, model_in
from hotswap.errors import ShardMissing, StoreError
from hotswap.model import Manifest
from hotswap.request import ModelId

__all__ = ["Indexes", "load_index", "models_in"]

_log = logging.getLogger("hotswap.stores")

_HEAD_BYTES = 32 << 10
_SHARDS = re.compile(rb'"shards":(\[[^]]*\])')


def models_in(root: Path) -> dict[ModelId, int]:
    """Return the usable models under `root`, and the bytes of their data files; others are logged. Blocking.

    It costs a tenth of a millisecond for each model: only the place of its shards is read, at the head of its
    index, and the lengths of its files. The tensors are checked when the model is asked for.
    """
    found: dict[ModelId, int] = {}
    for name in sorted(_names(root)):
        model = model_in(name)
        if model is None or name.startswith(".") or not os.path.lexists(root / name / INDEX_NAME):
            continue
        size_bytes = _glance(root / name)
        try:
            found[model] = load_index(root, model).weight_bytes if size_bytes is None else size_bytes
        except StoreError as exc:
            _log.warning("Model %r is not used: %s", model, exc)
    return found


def _names(root: Path) -> list[str]:
    try:
        return os.listdir(root)
    except FileNotFoundError:
        return []


def _glance(directory: Path) -> int | None:
    """The bytes of a model whose index looks like ours, and whose files are there; `None` to look closely."""
    with suppress(OSError, StoreError, ValueError):
        check_no_link(directory)
        head, end = read_head(directory / INDEX_NAME, _HEAD_BYTES)
        shards = _SHARDS.search(head)
        if shards is None or end != b"}}":
            return None
        total_bytes = 0
        for shard in Fields({"shards": json.loads(shards[1])}, directory).records("shards"):
            size_bytes, file = shard.size("size_bytes"), shard.text("file")
            check_file_name(file, directory)
            status, end_bytes = os.lstat(directory / file), shard.size("file_offset_bytes") + size_bytes
            if not stat.S_ISREG(status.st_mode) or status.st_size < end_bytes:
                return None
            total_bytes += size_bytes
        return total_bytes
    return None


def load_index(root: Path, model: ModelId) -> Manifest:
    """Read a model's index, and check that its files exist and are long enough. Blocking.

    Raises:
        ShardMissing: there is no such model, or a file of it is missing.
        ShardCorrupt: the index cannot be used, or a file is truncated.
        UnsafeFile: a name leads out of the directory, or a file is a link.
    """
    return Indexes(root).load(model)


class Indexes:
    """A cache of the parsed indexes under a root, keyed by their bytes.

    Parsing ten thousand tensors takes a tenth of a second. The bytes are read each time, and the files
    checked. May be used from any thread.

    Args:
        root: The directory of the models.
        most_tensors: The most tensors that the cached manifests may have together.
    """

    def __init__(self, root: Path, *, most_tensors: int = 50_000) -> None:
        self._root = root
        self._most_tensors = most_tensors
        self._known: OrderedDict[ModelId, tuple[bytes, Manifest]] = OrderedDict()
        self._lock = threading.Lock()

    def load(self, model: ModelId) -> Manifest:
        """Return the manifest of a model; see `load_index`."""
        directory = model_directory(self._root, model)
        check_no_link(directory)
        if not directory.is_dir():
            raise ShardMissing(
                f"The store at {str(self._root)!r} holds no model {model!r}. "
                "Add it with `hotswap store add`, or register it with its source."
            )
        manifest = self._parse(directory / INDEX_NAME, model)
        for shard in manifest.shards:
            file = BlockFile(directory / shard.file, direct=False)
            try:
                file.open()
                file.check_size(shard.file_offset_bytes + shard.size_bytes)
            finally:
                file.close()
        return manifest

    def _parse(self, path: Path, model: ModelId) -> Manifest:
        text = read_small(path)
        digest = blake2b(text).digest()
        with self._lock:
            known = self._known.get(model)
        if known is not None and known[0] == digest:
            return known[1]
        manifest = parse_index(text, path=path, model=model)
        with self._lock:
            self._known[model] = digest, manifest
            self._known.move_to_end(model)
            self._shrink()
        return manifest

    def _shrink(self) -> None:
        """Evict the models that were parsed longest ago, down to `most_tensors`."""
        num_tensors = sum(len(manifest.tensors) for _, manifest in self._known.values())
        while num_tensors > self._most_tensors:
            _, (_, manifest) = self._known.popitem(last=False)
            num_tensors -= len(manifest.tensors)
