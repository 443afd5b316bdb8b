"""Engines for child processes: what the tests here make there must be importable."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from zlib import crc32

import anyio

from hotswap.abc import Engine, Manifest, Shard
from hotswap.backends.process import ProcessEngine
from hotswap.backends.sim import DeviceProfile, SimEngine, SimStore, sim_bytes, sim_manifest
from tests.patience import PATIENCE_S

__all__ = [
    "QUICK",
    "checked",
    "checked_manifest",
    "checked_store",
    "kill",
    "sim_engine",
    "sim_process",
    "until",
    "wait_for_end",
]

QUICK = DeviceProfile(memory_bytes=1 << 20, floor_s=0.0005, base_s=0.0001, unload_s=0.0, adapter_s=0.001)
SIZES = {"a": 25 * 4096, "b": 15 * 4096}


def sim_engine(id: str = "e0", *, step_s: float = QUICK.floor_s) -> SimEngine:
    """An engine that takes little time."""
    profile = replace(QUICK, floor_s=step_s)
    return SimEngine(
        id, profile, kv_blocks=160, kv_block_tokens=4, max_requests=16, token_budget=24, vocabulary=500
    )


def sim_process(id: str = "e0", *, step_s: float = QUICK.floor_s, **options: object) -> ProcessEngine:
    """The same in a process of its own."""
    return ProcessEngine(id, partial(sim_engine, id, step_s=step_s), **options)  # type: ignore[arg-type]  # any of them


def checked_store() -> SimStore:
    """A store whose weights have checksums, as those of real models have."""
    return SimStore(list(map(checked_manifest, SIZES)), chunk_bytes=30_000)


def checked_manifest(name: str) -> Manifest:
    """The manifest of a model of that store."""
    return checked(sim_manifest(name, SIZES[name]))


def checked(manifest: Manifest) -> Manifest:
    """The manifest of a simulated model, with checksums of its bytes."""
    return replace(manifest, shards=tuple(map(_with_checksum, manifest.shards)))


def kill(engine: Engine) -> None:
    """Kill the process of an engine."""
    assert isinstance(engine, ProcessEngine)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)


async def until(is_so: Callable[[], object]) -> None:
    """Return when something is so; raise if it does not come to be."""
    with anyio.fail_after(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110  # of other processes, which tell no event
            await anyio.sleep(0.01)


async def wait_for_end(pid: int) -> None:
    """Return when there is no process of an id any more; raise if it does not end."""
    await until(lambda: not _lives(pid))


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _with_checksum(shard: Shard) -> Shard:
    data = sim_bytes(shard.model, shard.buffer_offset_bytes, shard.size_bytes)
    return replace(shard, checksum=f"crc32:{crc32(data):08x}")
