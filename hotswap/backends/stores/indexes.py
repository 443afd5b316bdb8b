"""Loading the indexes of the models in a directory, parsed again only when their bytes have changed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path

from hotswap.backends.stores.files import BlockFile, read_small
from hotswap.backends.stores.index import parse_index
from hotswap.backends.stores.layout import INDEX_NAME, model_directory, model_in
from hotswap.errors import ShardMissing
from hotswap.model import Manifest
from hotswap.request import ModelId

__all__ = ["Indexes", "load_index", "models_in"]


def models_in(root: Path) -> list[ModelId]:
    """Return the ids of the models under `root`, sorted; their files are not read."""
    names = (path.parent.name for path in sorted(root.glob(f"[!.]*/{INDEX_NAME}")))
    return [model for name in names if (model := model_in(name)) is not None]


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
