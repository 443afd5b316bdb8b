"""A killed rank loses its instance and nothing else; no rank outlives its engine's process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from hotswap import InstanceState
from hotswap.backends.stores import NvmeStore
from hotswap.backends.torch.parallel import local_ranks
from hotswap.backends.torch.parallel.local_ranks import LocalRanks
from hotswap.backends.torch.parallel.messages import Setup
from hotswap.backends.torch.parallel.processes import Ranks, RemoteTraceback
from hotswap.errors import InstanceLost
from tests.backends.torch.parallel.support import Clients, add, loader_of, make_engine, make_prompts
from tests.backends.torch.zoo import generate, make_model

NUM_TOKENS = 60


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie, which its parent has not reaped yet, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_streams_of_a_killed_rank_continue_elsewhere_and_the_instance_restarts(tmp_path: Path) -> None:
    model = make_model("llama")
    add(tmp_path / "store", "m", model)
    prompts = make_prompts(6, 3, 17, 40, 90, 25, 60)
    expected = [generate(model, prompt, NUM_TOKENS) for prompt in prompts]
    killed: list[int] = []
    ranked, single = make_engine("ranked", pp=2), make_engine("single")
    clients = Clients([ranked, single], NvmeStore(tmp_path / "store"), prompts)

    def kill_once() -> None:
        if not killed and ranked.status().num_running and clients.num_received > 30:
            killed.append(loader_of(ranked).pids[1])
            os.kill(killed[0], signal.SIGKILL)

    async with clients.fleet as fleet:
        await fleet.ready()
        first_pids = loader_of(ranked).pids
        async with anyio.create_task_group() as tasks:
            for at in range(len(prompts)):
                tasks.start_soon(clients.read, at, NUM_TOKENS, kill_once)
        assert clients.received == expected
        assert max(clients.hops) == 2, "some were on the instance that was lost"
        while ranked.status().state is not InstanceState.SERVING:  # noqa: ASYNC110 - another process starts
            await anyio.sleep(0.05)
        last_pids = loader_of(ranked).pids
        assert not set(first_pids) & set(last_pids)
    assert not any(map(is_alive, (*first_pids, *last_pids)))


@pytest.mark.parametrize("is_told", [True, False], ids=["after its first command", "before it"])
async def test_a_rank_that_cannot_start_reports_the_reason(
    is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = "import sys; open(int(sys.argv[1]), 'rb').read(1);" if is_told else ""
    monkeypatch.setattr(local_ranks, "_PROGRAM", f"{waits} raise RuntimeError('no such device')")
    if not is_told:
        monkeypatch.setattr(Ranks, "_setup", _after_the_end(Ranks._setup))
    with pytest.raises(InstanceLost, match=r"Engine 'e0' cannot start: .*ended \(exit code 1\)") as caught:
        async with make_engine(tp=2):
            pytest.fail("it started")
    assert caught.value.__cause__ is not None
    cause = caught.value.__cause__.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert "no such device" in str(cause)


def _after_the_end(setup: Callable[..., Setup]) -> Callable[..., Setup]:
    """Return a `_setup` that waits until the rank processes have ended."""

    def make(ranks: Ranks, *arguments: Any) -> Setup:
        for stage in ranks._stages:
            assert isinstance(stage, LocalRanks)
            for process in stage.processes:
                process.popen.wait()
        return setup(ranks, *arguments)

    return make


async def test_a_rank_that_does_not_reply_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ranks, "_PROGRAM", "import signal; signal.pause()")
    with pytest.raises(InstanceLost, match="did not reply for"):
        async with make_engine(tp=2, rank_timeout_s=0.2):
            pytest.fail("it started")


_PARENT = """
import anyio
from tests.backends.torch.parallel.support import loader_of, make_engine

async def main():
    async with make_engine(pp=2) as engine:
        print(*loader_of(engine).pids, flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
async def test_no_rank_outlives_a_process_that_was_killed() -> None:
    path = os.pathsep.join(path for path in sys.path if path)
    async with await anyio.open_process(
        [sys.executable, "-c", _PARENT], env=os.environ | {"PYTHONPATH": path}, stderr=None
    ) as parent:
        assert parent.stdout is not None
        # A read of a pipe may return a part of a line.
        line = await BufferedByteReceiveStream(parent.stdout).receive_until(b"\n", 1024)
        pids = [int(pid) for pid in line.split()]
        assert len(pids) == 2
        assert all(map(is_alive, pids))
        parent.kill()
        while any(map(is_alive, pids)):  # noqa: ASYNC110 - there is no event for the end of another's child process
            await anyio.sleep(0.02)
