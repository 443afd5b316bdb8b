"""One timed run: the state of the page cache before it, the clock, its memory, and the bytes it delivered.

Every contestant's process imports it: it needs the standard library and torch only.
"""

from __future__ import annotations

import gc
import json
import mmap
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor

from benchmarks import pagecache

__all__ = [
    "SAFETENSORS",
    "Cache",
    "Peer",
    "Place",
    "Source",
    "TimedRun",
    "WarmUp",
    "digest_of",
    "flat_buffer",
    "raw_bytes",
]

Cache = Literal["cold", "warm"]
Delivery: TypeAlias = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]

SAFETENSORS = "model.safetensors"
_HUGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in the flat buffer."""

    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int

    def view(self, flat: Tensor) -> Tensor:
        """The tensor, as a view of the flat uint8 buffer."""
        part = flat[self.offset_bytes : self.offset_bytes + self.size_bytes]
        dtype = getattr(torch, self.dtype)
        return part.view(dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that was written in every format; the same tensors lie in each.

    Attributes:
        directory: Where all of it lies; its `places.json` says where each tensor lies in the flat buffer.
        payload_bytes: The tensors alone.
        buffer_bytes: The flat buffer, padding included.
        digest: `digest_of` the tensors, taken when they were made.
    """

    directory: Path
    payload_bytes: int
    buffer_bytes: int
    digest: str

    @property
    def model(self) -> str:
        """Its id in the hotswap store."""
        return self.directory.name

    @property
    def store(self) -> Path:
        """The root of the hotswap store, which the sources of one run share."""
        return self.directory.parent / "store"

    @property
    def flat_files(self) -> list[Path]:
        """The data files of the hotswap store, in the order of the flat buffer."""
        return sorted((self.store / self.model).glob("*.bin"))

    @property
    def safetensors(self) -> Path:
        return self.directory / SAFETENSORS

    @property
    def pickle(self) -> Path:
        return self.directory / "model.pt"

    @property
    def tensorizer(self) -> Path:
        return self.directory / "model.tensors"

    def places(self) -> dict[str, Place]:
        """The tensors by name."""
        entries = json.loads((self.directory / "places.json").read_text())
        return {name: Place(dtype, tuple(shape), *rest) for name, dtype, shape, *rest in entries}


class TimedRun:
    """The clock of a run: a contestant calls `start`, opens its files, and gives its tensors to `finish`.

    With `into` the tensors must end in existing memory, laid out as that source's flat buffer. For a
    contestant that cannot read there they are copied, each when it is delivered, while the clock runs.
    """

    def __init__(self, files: list[Path], cache: Cache, *, check: bool, into: Source | None = None) -> None:
        self._files = files
        self._cache = cache
        self._into = into
        self._targets: dict[str, Tensor] | None = None
        self.checks = check
        self._began_s = self._began_cpu_s = 0.0
        self._began_bytes = 0
        self.result: dict[str, Any] = {}

    def start(self) -> None:
        """Make the existing memory, bring the page cache into its state, and start the clock."""
        self._make_targets()
        files = self._files
        share = pagecache.empty(files) if self._cache == "cold" else pagecache.fill(files)
        self.note(cached_share=share)
        gc.collect()
        self._began_bytes = _reset_peak()
        self._began_cpu_s = time.process_time()
        self._began_s = time.perf_counter()

    def finish(self, tensors: Delivery, *, mapped: bool = False, size_bytes: int | None = None) -> None:
        """Stop, once all tensors are in host memory.

        Args:
            tensors: They, or one after the other.
            mapped: They are mapped files, of which a byte of every page is read before they count.
            size_bytes: How much it was, where none were kept.
        """
        settled = self._settle(tensors, mapped=mapped)
        seconds = time.perf_counter() - self._began_s
        cpu_s = time.process_time() - self._began_cpu_s
        peak = _peak_bytes()
        size = sum(map(_size, settled.values())) if size_bytes is None else size_bytes
        extra = max(peak - self._began_bytes, 0)
        self.note(seconds=seconds, cpu_s=cpu_s, bytes=size, peak_extra_bytes=extra)
        if self.checks:
            self.note(digest=digest_of(settled))

    def note(self, **facts: Any) -> None:
        """Add facts to the result."""
        self.result.update(facts)

    def _make_targets(self) -> None:
        if self._into is not None:
            flat = flat_buffer(self._into.buffer_bytes).fill_(0)
            self._targets = {name: place.view(flat) for name, place in self._into.places().items()}

    def _settle(self, tensors: Delivery, *, mapped: bool) -> Mapping[str, Tensor]:
        items = tensors.items() if isinstance(tensors, Mapping) else tensors
        if self._targets is not None:
            for name, tensor in items:
                self._targets[name].copy_(tensor)
            return self._targets
        kept = dict(items)
        if mapped:
            _touch(kept)
        return kept


class WarmUp(TimedRun):
    """A run that is not timed: it makes what a process makes once (threads, rings, lazy imports)."""

    def __init__(self, into: Source | None = None) -> None:
        super().__init__([], "warm", check=False, into=into)

    def start(self) -> None:
        self._make_targets()

    def finish(self, tensors: Delivery, *, mapped: bool = False, size_bytes: int | None = None) -> None:
        self._settle(tensors, mapped=mapped)


class Peer(ABC):
    """A contestant, made in a fresh process for each run. Its module imports what it needs at its top."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options

    def run(self, warm_up: Source, source: Source, run: TimedRun) -> None:
        """Load a small checkpoint without a clock, then the one that counts."""
        self.load(warm_up, WarmUp(self.into(warm_up)))
        self.load(source, run)

    def into(self, source: Source) -> Source | None:
        """The source whose flat buffer the run makes; `None` if the contestant reads there itself."""
        return source if self.options.get("memory") == "existing" else None

    @abstractmethod
    def files(self, source: Source) -> list[Path]:
        """The files it reads: those that must be cold, or warm, before it starts."""

    @abstractmethod
    def load(self, source: Source, run: TimedRun) -> None:
        """Load the tensors between `run.start()` and `run.finish(tensors)`."""


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """A digest of names and bytes that does not depend on how, or in what order, they lie."""
    digest = blake2b(digest_size=16)
    for name in sorted(tensors):
        raw = raw_bytes(tensors[name])
        digest.update(f"{name}:{raw.nbytes}:{zlib.crc32(raw):08x}\n".encode())
    return digest.hexdigest()


def flat_buffer(size_bytes: int) -> Tensor:
    """Memory for a flat buffer as an engine makes it: in huge pages where there are any, none there yet."""
    memory = mmap.mmap(-1, size_bytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_BYTES
    return whole[start : start + size_bytes]


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, as they lie."""
    array: Any = tensor.detach().contiguous().view(torch.uint8).flatten().numpy()
    return cast("memoryview", array.data)


def _touch(tensors: Mapping[str, Tensor]) -> None:
    """Read a byte of every page, so that mapped tensors are in memory."""
    for tensor in tensors.values():
        raw = tensor.view(torch.uint8).flatten().numpy()
        raw[::4096].max()
        raw[-1:].max()  # a tensor need not begin on a page


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _reset_peak() -> int:
    """Reset the high-water mark of this process, and return its resident bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak_bytes() -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
