"""The files of adapters, which must stay what they were when their version was added."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from anyio import CapacityLimiter

from hotswap.errors import SourceChanged
from hotswap.model import Adapter
from hotswap.request import AdapterId, ModelId
from hotswap.runtime.state import FleetState
from hotswap.worker_threads import run_in_thread

__all__ = ["AdapterFiles"]

_CONFIG = "adapter_config.json"
# What engines and texts are made of in a PEFT directory.
_NAMES = (
    _CONFIG,
    "adapter_model.safetensors",
    "added_tokens.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
_PIECE_BYTES = 1 << 20

_Stamp: TypeAlias = tuple[tuple[str, int, int], ...]


@dataclass(slots=True)
class _Version:
    """The files of one version: a stamp and a digest of the config, and after its first load one of all."""

    adapter: Adapter
    directory: Path
    stamp: _Stamp
    config: str
    content: str = ""


class AdapterFiles:
    """What the files of each version are. Belongs to the event loop.

    Noted when a version is added are the names, sizes and modification times of its files, and the content of
    its config; at its first load the content of all. A later load compares the former, and where a time is
    another, the content.
    """

    def __init__(self, state: FleetState) -> None:
        self._state = state
        self._versions: dict[tuple[ModelId, AdapterId], _Version] = {}
        self._limiter = CapacityLimiter(2)

    def note(self, adapter: Adapter) -> None:
        """Note the files of a new version, and forget earlier ones that no request can have any more.

        They may be missing as yet. Reads the config, a small file.
        """
        earlier = [version.adapter for version in self._versions.values()]
        for old in earlier:
            if (old.model, old.id) == (adapter.model, adapter.id) and self._is_outdated(old):
                del self._versions[_key(old)]
        if adapter.source is not None and (directory := Path(adapter.source)).is_dir():
            version = _Version(adapter, directory, _stamp(directory), _digest(directory, [_CONFIG]))
            self._versions[_key(adapter)] = version

    def __len__(self) -> int:
        return len(self._versions)

    @asynccontextmanager
    async def unchanged(self, adapter: Adapter) -> AsyncGenerator[None]:
        """Bracket a load by an engine.

        Raises:
            SourceChanged: the files are not those of this version, at the beginning or at the end.
        """
        version = self._versions.get(_key(adapter))
        if version is None:
            self.note(adapter)  # its directory was not there when it was added
            version = self._versions.get(_key(adapter))
        if version is None or not version.stamp:
            yield  # an engine tells what is missing
            return
        check = partial(_check, version, adapter)
        await run_in_thread(check, limiter=self._limiter)
        yield
        await run_in_thread(check, limiter=self._limiter)

    def _is_outdated(self, adapter: Adapter) -> bool:
        needed = self._state.is_needed(ModelId(adapter.model), adapter.version)
        return not needed and not self._state.is_latest(adapter)


def _check(version: _Version, adapter: Adapter) -> None:
    """Compare a version with its files, and note their content once. Blocking."""
    stamp = _stamp(version.directory)
    if stamp == version.stamp and version.content:
        return
    content = _digest(version.directory, _NAMES)
    is_same = stamp == version.stamp and _digest(version.directory, [_CONFIG]) == version.config
    if content != version.content and not (is_same and not version.content):
        raise SourceChanged(
            f"The files of adapter {adapter.version!r} in {str(version.directory)!r} have changed since it "
            "was added, so its requests would get other weights elsewhere. Put new weights into a directory "
            "of their own, and name that in `fleet.adapters.update`."
        )
    version.stamp, version.content = stamp, content


def _stamp(directory: Path) -> _Stamp:
    found: list[tuple[str, int, int]] = []
    for name in _NAMES:
        try:
            status = (directory / name).stat()
        except OSError:
            continue
        found.append((name, status.st_size, status.st_mtime_ns))
    return tuple(found)


def _digest(directory: Path, names: list[str] | tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name in names:
        try:
            with (directory / name).open("rb") as file:
                digest.update(f"{name}:".encode())
                while piece := file.read(_PIECE_BYTES):
                    digest.update(piece)
        except OSError:
            continue
    return digest.hexdigest()


def _key(adapter: Adapter) -> tuple[ModelId, AdapterId]:
    return ModelId(adapter.model), adapter.version
