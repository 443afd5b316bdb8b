"""What killed processes leave in shared memory goes: a core's at once, its parent's at the next start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import anyio
import pytest

from hotswap import InstanceState, ModelId
from hotswap.backends.vllm.directories import CoreDirectory
from hotswap.backends.vllm.staging import stage
from hotswap.testing.conformance.suite import until
from tests.backends.vllm.support import make_engine, make_store

_KILLED = """
    import os, signal
    import anyio
    from hotswap.backends.vllm.staging import stage
    from tests.backends.vllm.support import make_store

    async def main():
        store = make_store()
        staged = await stage(store, store.card("a"), await store.manifest("a"))
        print(staged.directory, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    anyio.run(main)
"""


def is_there(path: Path | str) -> bool:
    return os.path.exists(path)


async def test_what_a_killed_process_staged_goes_at_the_next_start() -> None:
    run = await anyio.run_process(
        [sys.executable, "-c", textwrap.dedent(_KILLED)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        check=False,
        stderr=subprocess.STDOUT,
    )
    assert run.returncode == -signal.SIGKILL, run.stdout.decode()
    left = run.stdout.decode().split()[-1]
    assert os.listdir(left)
    store = make_store()
    first = await stage(store, store.card("a"), await store.manifest(ModelId("a")))
    assert not is_there(left)
    other = await stage(store, store.card("b"), await store.manifest(ModelId("b")))
    assert is_there(first.index), "what is in use stays"
    for staged in (first, other):
        await staged.release()
        assert not is_there(staged.directory)


def test_shared_memory_that_a_killed_process_made_goes_with_its_directory(tmp_path: Path) -> None:
    text = "from multiprocessing import resource_tracker, shared_memory as s; import time;" + (
        "resource_tracker.register = lambda *_: None; m = s.SharedMemory(create=True, size=64);"
        "print(m.name, flush=True); time.sleep(600)"
    )
    before = os.listdir("/dev/shm")
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        directory = CoreDirectory.make(tmp_path)
        directory.note_shared_memory([process.pid], before)
        process.kill()
    assert Path("/dev/shm", name).exists()
    directory.remove()
    assert not Path("/dev/shm", name).exists()
    assert not directory.path.exists()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory")
async def test_a_killed_core_of_two_ranks_leaves_no_shared_memory() -> None:
    store = make_store()
    async with make_engine(tp=2) as engine:
        before = set(os.listdir("/dev/shm"))
        await engine.load(store.card("a"), store)
        assert engine._core is not None
        # Those of multiprocessing, as tests over Ray may run beside.
        made = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("psm_")}
        assert made, "the ranks share some"
        os.kill(int(engine._core.processes[0].pid), signal.SIGKILL)
        await until(lambda: engine.status().state is InstanceState.LOST)
        await engine.unload()
        await until(lambda: not made & set(os.listdir("/dev/shm")))
