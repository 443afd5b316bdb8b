"""The readers of a store, given indexes and data files that are mutated at random.

    python -m benchmarks.fuzz                      100,000 cases
    python -m benchmarks.fuzz --full               a million
    python -m benchmarks.fuzz --seed 7 --only 123  one case again, with its traceback

Every case takes one well-formed model, changes its index, its data files or both, and loads it as an engine
would. It must load bytes that match the sums of the index, or raise a `StoreError`; and nothing may be opened
outside the model's directory, read outside a file, or kept open. A case depends on the seed and its number
alone. A case that takes too long ends the process with the stacks of all threads.
"""

from __future__ import annotations

import faulthandler
import json
import os
import tempfile
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import anyio

from benchmarks.command import parser_of, save
from benchmarks.table import show
from hotswap import ModelId
from hotswap.abc import Manifest, Shard, TensorSpec
from hotswap.backends.memory import aligned_buffer
from hotswap.backends.stores import NvmeStore
from hotswap.backends.stores.files import FileCalls
from hotswap.backends.stores.writer import write_model
from hotswap.errors import StoreError

__all__ = ["Report", "fuzz", "main"]

_UNIT = 4096
_MODEL = ModelId("m")
_LOADED = "loaded"
_LIMIT_S = 60.0
_VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 511, 512, 4095, 4096, 8192, 12288, 2**31, 2**32, 2**53, 2**63 - 1, 2**64, 10**30),
    *(0.5, 1e308, float("nan"), True, None, "", "0", "crc32:00000000", "crc32:zzzzzzzz", "float8_e4m3fn"),
    *("../m/x", "/etc/passwd", ".", "..", "a\0b", "index.json", "x" * 5000, "\ud800"),
    *([], [[]], [0], [-1], [2**62, 2**62], {}, {"": {}}),
)


@dataclass(slots=True)
class Report:
    """Counts of outcomes, and the cases that failed."""

    seed: int
    num_cases: int = 0
    outcomes: Counter[str] = field(default_factory=lambda: Counter[str]())
    failures: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz, print the outcomes, and return 1 if any case failed."""
    parser = parser_of("fuzz", __doc__, full="a million cases")
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the number of one case")
    options = parser.parse_args(arguments)
    num_cases = 1_000_000 if options.full else options.cases
    cases = range(num_cases) if options.only is None else [options.only]
    print(f"seed {options.seed}, {len(cases):,} cases", flush=True)
    report = fuzz(options.seed, cases)
    rows = [[outcome, f"{count:,}"] for outcome, count in report.outcomes.most_common()]
    show(f"readers fuzzed, seed {report.seed}, {report.num_cases:,} cases", ("", "cases"), rows)
    for failure in report.failures[:10]:
        print(failure)
    print(f"{len(report.failures)} failures")
    facts = {"seed": report.seed, "cases": report.num_cases, "outcomes": dict(report.outcomes)}
    save({**facts, "failures": report.failures}, options.json)
    return 1 if report.failures else 0


def fuzz(seed: int, cases: Sequence[int], *, directory: Path | None = None) -> Report:
    """Run the cases of a seed in a new directory below `directory`."""
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=directory) as root:
        model = _Model(Path(root))
        report = Report(seed)
        anyio.run(_run, model, report, cases)
    return report


async def _run(model: _Model, report: Report, cases: Sequence[int]) -> None:
    calls = _RecordedCalls(model.directory)
    async with NvmeStore(model.root, chunk_bytes=_UNIT, threads=2, depth=3, calls=calls) as store:
        for case in cases:
            rng = Random(f"{report.seed}-{case}")
            faulthandler.dump_traceback_later(_LIMIT_S, exit=True)
            with model.mutated(rng):
                outcome = await _load(store, rng)
            faulthandler.cancel_dump_traceback_later()
            complaints = calls.settle()
            if store.num_lent:
                complaints.append(f"{store.num_lent} buffers were kept")
            if isinstance(outcome, Exception):
                complaints.append("".join(traceback.format_exception(outcome)))
            name = outcome if isinstance(outcome, str) else type(outcome).__name__
            report.num_cases += 1
            report.outcomes[name] += 1
            report.failures += [f"case {case} ({name}): {complaint}" for complaint in complaints]


async def _load(store: NvmeStore, rng: Random) -> str | Exception:
    """Load all shards; return the name of the outcome, or an exception that is a failure."""
    try:
        manifest = await store.manifest(_MODEL)
        into = rng.random() < 0.5
        for shard in manifest.shards:
            read = _read_into if into else _read
            data = await read(store, shard)
            if f"crc32:{zlib.crc32(data):08x}" != shard.checksum or len(data) != shard.size_bytes:
                return AssertionError(f"other bytes than the index says were taken for {shard}")
    except StoreError as exc:
        return type(exc).__name__
    except Exception as exc:
        return exc
    return _LOADED


async def _read(store: NvmeStore, shard: Shard) -> bytes:
    data = bytearray()
    async with store.open(shard) as chunks:
        async for chunk in chunks:
            data += chunk.data
    return bytes(data)


async def _read_into(store: NvmeStore, shard: Shard) -> bytes:
    target = aligned_buffer(shard.size_bytes)
    await store.read_into(shard, target)
    return bytes(target)


class _RecordedCalls(FileCalls):
    """Records the files that are open, and reads and opens that must not happen."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sizes: dict[int, int] = {}
        self._complaints: list[str] = []

    def open(self, path: Path, flags: int) -> int:
        if path.parent != self._directory or path.name in (".", ".."):
            self._complaints.append(f"{str(path)!r} was opened")
        fd = super().open(path, flags)
        self._sizes[fd] = os.fstat(fd).st_size
        return fd

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        if offset < 0 or offset + len(buffer) > self._sizes[fd]:
            self._complaints.append(f"{len(buffer)} bytes were read at {offset} of {self._sizes[fd]}")
        return super().read(fd, buffer, offset)

    def close(self, fd: int) -> None:
        del self._sizes[fd]
        super().close(fd)

    def settle(self) -> list[str]:
        """Return the complaints about the case that ended, and reset."""
        complaints, self._complaints = self._complaints, []
        if self._sizes:
            complaints.append(f"{len(self._sizes)} files were left open")
        return complaints


# --------------------------------------------------------------------------------------------- the mutations


class _Model:
    """A small model on disk, of two ranks with two files each, that is whole between the cases."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / _MODEL
        self._index = self.directory / "index.json"
        size = 3 * _UNIT
        ranks = [Random(rank).randbytes(size) for rank in range(2)]
        write_model(root, _manifest(size), [[memoryview(rank)] for rank in ranks], max_file_bytes=2 * _UNIT)
        self._text = self._index.read_bytes()
        self._data = {path: path.read_bytes() for path in sorted(self.directory.glob("*.bin"))}

    @contextmanager
    def mutated(self, rng: Random) -> Iterator[None]:
        """Change the index, a data file, or both, while the block runs."""
        what = rng.random()
        if what < 0.75:
            change = rng.choice((_change_text, _change_value, _change_value, _change_value))
            _put(self._index, change(rng, self._text))
        touched = rng.choice(list(self._data)) if what > 0.65 else None
        if touched is not None:
            rng.choice(_DATA_CHANGES)(rng, touched)
        try:
            yield
        finally:
            _put(self._index, self._text)
            if touched is not None:
                _put(touched, self._data[touched])


def _manifest(size: int) -> Manifest:
    tensors = [
        TensorSpec(name=name, dtype="float32", shape=(8, 8), offset_bytes=0, size_bytes=256, rank=rank)
        for rank in range(2)
        for name in ("norm", "tied")
    ]
    rest = size - 256
    tensors += [
        TensorSpec(name="head", dtype="uint8", shape=(rest,), offset_bytes=256, size_bytes=rest, rank=rank)
        for rank in range(2)
    ]
    return Manifest(
        model=_MODEL, shards=(), buffer_bytes=size, tensors=tuple(tensors), world_size=2, config="{}"
    )


def _put(path: Path, data: bytes) -> None:
    """Write a new file: some file systems flush one that is overwritten, which takes longer than a case."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def _change_text(rng: Random, text: bytes) -> bytes:
    """Flip, cut, double or insert bytes, as a disk or an editor may."""
    data = bytearray(text)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 2, 64, 4096)))
        match rng.randrange(5):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at:end]
            case 2:
                data[at:at] = data[at:end]
            case 3:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            case _:
                data[at:at] = b"[" * rng.choice((1, 100_000))
    return bytes(data)


def _change_value(rng: Random, text: bytes) -> bytes:
    """Change values, and sign the index again, so that readers go on to the changed values."""
    index = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _change_one(rng, index["manifest"] if isinstance(index.get("manifest"), dict) else index)
    if rng.random() < 0.95:
        body = json.dumps(index.get("manifest"), sort_keys=True, separators=(",", ":")).encode()
        index["checksum"] = f"crc32:{zlib.crc32(body):08x}"
    return json.dumps(index).encode()


def _change_one(rng: Random, tree: Any) -> None:
    places = list(_places(tree))
    if not places:
        return
    parent, key = rng.choice(places)
    match rng.randrange(8):
        case 0:
            del parent[key]
        case 1:
            other, other_key = rng.choice(places)
            if not isinstance(other[other_key], (dict, list)):
                parent[key] = other[other_key]
        case 2 if isinstance(parent, list):
            parent.append(parent[key])
        case 3 | 4 if type(parent[key]) is int:
            parent[key] += rng.choice((-8192, -4096, -512, -1, 1, 512, 4096, 8192))
        case _:
            parent[key] = rng.choice(_VALUES)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a tree of JSON that holds a value, as its container and its key."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree))
    for key in keys:
        yield tree, key
        if isinstance(tree[key], (dict, list)):
            yield from _places(tree[key])


def _flip(rng: Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _cut(rng: Random, path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, rng.choice((0, 1, size - _UNIT, size - 1, rng.randrange(size))))


def _extend(rng: Random, path: Path) -> None:
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.choice((1, 512, _UNIT))))


def _replace(rng: Random, path: Path) -> None:
    path.write_bytes(rng.randbytes(path.stat().st_size))


def _remove(rng: Random, path: Path) -> None:
    path.unlink()


def _link(rng: Random, path: Path) -> None:
    path.unlink()
    path.symlink_to(rng.choice(("/dev/zero", "/etc/passwd", path.name, "index.json")))


def _pipe(rng: Random, path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


_DATA_CHANGES: tuple[Callable[[Random, Path], None], ...] = (
    *(_flip, _flip, _flip, _cut, _cut, _extend, _replace, _remove, _link, _pipe),
)


if __name__ == "__main__":
    raise SystemExit(main())
