"""The bytes that each of four tensor-parallel ranks reads of a model, counted at the system call."""

from __future__ import annotations

import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import torch

from benchmarks.table import show
from hotswap import ModelId
from hotswap.abc import Manifest
from hotswap.backends.memory import aligned_buffer
from hotswap.backends.stores import NvmeStore
from hotswap.backends.stores.convert import convert
from hotswap.backends.stores.files import FileCalls

__all__ = ["measure", "show_report"]

_WORLD_SIZE = 4


class Counting(FileCalls):
    """Counts the bytes read, by file."""

    def __init__(self) -> None:
        self.read_bytes = Counter[str]()
        self._names: dict[int, str] = {}

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        self._names[fd] = path.name
        return fd

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        count = super().read(fd, buffer, offset)
        self.read_bytes[self._names[fd]] += count
        return count


def measure(directory: Path, *, layers: int = 4, width: int = 1024) -> dict[str, Any]:
    """Cut a Llama of random values for four ranks, let each load, and return what each has read.

    `ratio` is the bytes that all ranks read over those of the checkpoint and of what every rank has whole by
    design, the norms; `foreign_bytes` is what a rank read from the files of others.
    """
    shutil.rmtree(directory, ignore_errors=True)
    try:
        _write(directory / "checkpoint", layers, width)
        whole = convert(directory / "checkpoint", directory / "store", model_id="whole")
        cut = convert(directory / "checkpoint", directory / "store", model_id="cut", world_size=_WORLD_SIZE)
        read = [anyio.run(partial(_load, directory / "store", rank)) for rank in range(_WORLD_SIZE)]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    checkpoint_bytes = sum(_sizes(whole, 0).values())
    replicated_bytes = _replicated(whole, cut)
    own = [{shard.file for shard in cut.shards_of(rank)} for rank in range(_WORLD_SIZE)]
    foreign = [
        sum(n for file, n in by_file.items() if file not in files)
        for by_file, files in zip(read, own, strict=True)
    ]
    read_bytes = [by_file.total() for by_file in read]
    return {
        "checkpoint_bytes": checkpoint_bytes,
        "replicated_bytes": replicated_bytes,
        "read_bytes": read_bytes,
        "foreign_bytes": foreign,
        "ratio": sum(read_bytes) / (checkpoint_bytes + (_WORLD_SIZE - 1) * replicated_bytes),
    }


def show_report(report: dict[str, Any]) -> None:
    """Print the table of `measure`."""
    rows = [
        [f"rank {rank}", f"{read:,}", f"{foreign:,}"]
        for rank, (read, foreign) in enumerate(
            zip(report["read_bytes"], report["foreign_bytes"], strict=True)
        )
    ]
    rows.append(["all", f"{sum(report['read_bytes']):,}", f"{sum(report['foreign_bytes']):,}"])
    title = (
        f"four tensor-parallel ranks of {report['checkpoint_bytes']:,} bytes, {report['replicated_bytes']:,} "
        f"of them on every rank by design: {report['ratio']:.4f} of that is read"
    )
    show(title, ("", "bytes read", "of other ranks"), rows)


def _write(checkpoint: Path, layers: int, width: int) -> None:
    import transformers

    config: Any = transformers.LlamaConfig(
        vocab_size=32_000,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        dtype="bfloat16",
    )
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(checkpoint)


async def _load(root: Path, rank: int) -> Counter[str]:
    """Read what a rank has into memory of its own, and return the bytes read of each file."""
    calls = Counting()
    async with NvmeStore(root, calls=calls) as store:
        manifest = await store.manifest(ModelId("cut"))
        buffer = aligned_buffer(manifest.buffer_bytes)
        for shard in manifest.shards_of(rank):
            start = shard.buffer_offset_bytes
            await store.read_into(shard, buffer[start : start + shard.size_bytes])
    return calls.read_bytes


def _replicated(whole: Manifest, cut: Manifest) -> int:
    """The bytes that a rank has whole."""
    sizes, parts = _sizes(whole, 0), _sizes(cut, 0)
    return sum(size for place, size in sizes.items() if parts.get(place) == size)


def _sizes(manifest: Manifest, rank: int) -> dict[str, int]:
    """The bytes of a rank's tensors by name, tied ones once."""
    places = {tensor.offset_bytes: tensor for tensor in manifest.tensors_of(rank)}
    return {tensor.name: tensor.size_bytes for tensor in places.values()}
