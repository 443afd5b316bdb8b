"""Memory is pinned in the process that copies it to a GPU, the core, and not in the one with the store."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hotswap.backends import memory
from hotswap.backends.stores import PinnedStore, SharedStore, TieredStore
from hotswap.backends.stores.host_tier import HostTier
from tests.backends.vllm.support import make_engine, make_store


class Runtime:
    """CUDA's runtime as forked processes see it too: it notes which of them asked, and for how much."""

    def __init__(self, notes: Path) -> None:
        self._notes = notes

    def cudaHostRegister(self, _: int, size_bytes: int, flags: int) -> int:
        self._note("pin", size_bytes)
        return 0

    def cudaHostUnregister(self, _: int) -> int:
        self._note("unpin", 0)
        return 0

    def read(self) -> list[tuple[str, int, int]]:
        lines = self._notes.read_text().splitlines() if self._notes.exists() else []
        return [(what, int(process), int(size)) for what, process, size in map(str.split, lines)]

    def _note(self, what: str, size_bytes: int) -> None:
        with self._notes.open("a") as file:
            file.write(f"{what} {os.getpid()} {size_bytes}\n")


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Have the store's memory see a GPU that every other process than this one uses."""
    made, parent = Runtime(tmp_path / "notes"), os.getpid()
    of_torch = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: os.getpid() != parent, cudart=lambda: made
    )
    modules = {"torch": SimpleNamespace(cuda=of_torch)}
    monkeypatch.setattr(memory, "sys", SimpleNamespace(modules=modules, platform=sys.platform))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return made


@pytest.mark.parametrize("tier", ["shared", "pinned"])
async def test_the_core_pins_what_it_reads_while_it_copies_and_the_store_nothing(
    tmp_path: Path, runtime: Runtime, tier: str
) -> None:
    below = make_store()
    shared = SharedStore(tmp_path / "shared", "64 MiB")
    host: HostTier = shared if tier == "shared" else PinnedStore("64 MiB")
    async with TieredStore(host, below) as store, make_engine(start="fork") as engine:
        for name, path in (("a", "new core"), ("b", "in place")):
            before = len(runtime.read())
            await engine.load(below.card(name), store)
            assert engine.status().load_path == path
            assert engine._core is not None
            (core,) = engine._core.processes
            pinned, unpinned = runtime.read()[before:]
            assert pinned[:2] == ("pin", core.pid)
            assert pinned[2] >= (await store.manifest(below.card(name).id)).buffer_bytes
            assert unpinned == ("unpin", core.pid, 0)
            await engine.unload()
