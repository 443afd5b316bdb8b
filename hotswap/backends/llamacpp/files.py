"""The GGUF files of a model as paths: lent by the store, or copied from it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from hotswap.backends.layouts import require_gguf
from hotswap.errors import OutOfMemory
from hotswap.model import Manifest, Shard
from hotswap.store import SupportsLendFiles, WeightStore
from hotswap.worker_threads import run_in_thread

__all__ = ["check_gguf", "lent_files"]


def check_gguf(engine: str, manifest: Manifest, total_bytes: int) -> None:
    """Refuse a model that is no GGUF file, or does not fit.

    Raises:
        UnsupportedModel: the store has it in another layout, or as other files.
        OutOfMemory: its weights take more than `total_bytes`.
    """
    require_gguf(engine, manifest.model, manifest)
    if manifest.weight_bytes > total_bytes:
        raise OutOfMemory(
            f"The weights of {manifest.model!r} take {manifest.weight_bytes:,} bytes, and engine {engine!r} "
            f"has {total_bytes:,}; give it more memory_bytes, or a smaller quantization."
        )


@asynccontextmanager
async def lent_files(store: WeightStore, manifest: Manifest) -> AsyncGenerator[Sequence[Path]]:
    """Lend the files of a model; another task than the one that enters may leave.

    A store that lends none by path has them copied to the system's directory of temporary files.
    """
    if isinstance(store, SupportsLendFiles):
        async with store.lend_files(manifest) as files:
            yield files
        return
    directory = Path(await run_in_thread(tempfile.mkdtemp, "", "hotswap-gguf-"))
    try:
        yield [
            await _copy(store, shard, directory / f"{number}.gguf")
            for number, shard in enumerate(manifest.shards_of(0))
        ]
    finally:
        with anyio.CancelScope(shield=True):
            await run_in_thread(shutil.rmtree, directory, True)


async def _copy(store: WeightStore, shard: Shard, path: Path) -> Path:
    with path.open("wb", buffering=0) as file:
        async with store.open(shard) as chunks:
            async for chunk in chunks:
                await run_in_thread(file.write, chunk.data)
    return path
