"""Shares of a GPU by MPS, without a GPU: a stand-in for the daemon, and the environment of a child."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest

from hotswap.backends.process import Mps, ProcessEngine, Share, partition
from hotswap.backends.sim import SimEngine
from hotswap.errors import ConfigError, InstanceLost
from tests.backends.process.support import sim_engine

# As NVIDIA's: -d starts a daemon, which refuses to be started twice; without it commands go to the daemon.
_STAND_IN = """#!/bin/sh
echo "$* $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY" >> "{calls}"
[ -e "{broken}" ] && exit 3
if [ "$1" = "-d" ]; then
    [ -e "$CUDA_MPS_PIPE_DIRECTORY/running" ] && exit 1
    touch "$CUDA_MPS_PIPE_DIRECTORY/running"
else
    read command
    [ "$command" = get_server_list ] || exit 2
    [ -e "$CUDA_MPS_PIPE_DIRECTORY/running" ] || exit 1
fi
"""


class StandIn:
    """A program in the place of the daemon's.

    Attributes:
        mps: A share through it.
    """

    def __init__(self, root: Path) -> None:
        self._calls, self._broken = root / "calls", root / "broken"
        program = root / "nvidia-cuda-mps-control"
        program.write_text(_STAND_IN.format(calls=self._calls, broken=self._broken))
        program.chmod(0o700)
        self.mps = Mps(threads_percent=25, pipe_directory=root / "pipe", log_directory=root / "log")

    def calls(self) -> list[str]:
        """The arguments of each call so far."""
        return [line.split(" ", 1)[0] for line in self._calls.read_text().splitlines()]

    def break_down(self) -> None:
        """Fail from now on."""
        self._broken.touch()


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return StandIn(tmp_path)


async def test_a_daemon_is_started_once_and_found_from_then_on(stand_in: StandIn) -> None:
    await stand_in.mps.start()
    assert stand_in.calls() == ["", "-d"]
    await stand_in.mps.start()
    assert stand_in.calls() == ["", "-d", ""]
    assert stand_in.mps.pipe_directory.stat().st_mode & 0o777 == 0o700


async def test_a_daemon_that_cannot_be_started_is_an_error_with_what_to_do(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.break_down()
    with pytest.raises(InstanceLost, match=r"exit code 3.*start it, or leave `mps` out"):
        await stand_in.mps.start()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(InstanceLost, match="no program 'nvidia-cuda-mps-control'"):
        await stand_in.mps.start()


async def test_a_child_has_the_share_of_its_engine_and_not_this_process(
    stand_in: StandIn, tmp_path: Path
) -> None:
    mps = Mps(
        threads_percent=12.5,
        memory_bytes="2 GiB",
        pipe_directory=stand_in.mps.pipe_directory,
        log_directory=stand_in.mps.log_directory,
    )
    told = tmp_path / "told.json"
    async with ProcessEngine("e0", partial(_engine_that_tells, str(told)), mps=mps):
        env = json.loads(told.read_text())
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "12.5"
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=2048M"
    assert env["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path / "pipe")
    assert env["CUDA_MPS_LOG_DIRECTORY"] == str(tmp_path / "log")
    assert "-d" in stand_in.calls()
    assert not [name for name in os.environ if name.startswith("CUDA_MPS")]


def _engine_that_tells(path: str) -> SimEngine:
    Path(path).write_text(json.dumps({k: v for k, v in os.environ.items() if k.startswith("CUDA_MPS")}))
    return sim_engine()


@pytest.mark.parametrize("percent", [0, -1, 101, float("nan")])
def test_a_share_of_threads_is_more_than_none_and_at_most_all(percent: float) -> None:
    with pytest.raises(ConfigError, match="threads_percent"):
        Mps(threads_percent=percent)


# ------------------------------------------------------------------ partitions

GIB = 1 << 30


async def test_a_partition_makes_an_engine_of_each_share(stand_in: StandIn, tmp_path: Path) -> None:
    shares = [
        Share(id="large", memory_bytes="40 GiB", threads_percent=70),
        Share(id="small", memory_bytes=20 * GIB, threads_percent=30),
    ]
    make = partial(_engine_of_a_share, str(tmp_path))
    engines = partition("cuda:1", shares, make, memory_bytes="80 GiB", mps=stand_in.mps)
    assert [engine.id for engine in engines] == ["large", "small"]
    async with engines[0], engines[1]:
        pass
    told = {name: json.loads((tmp_path / name).read_text()) for name in ("large", "small")}
    assert told == {"large": ["cuda:1", 40 * GIB, "70"], "small": ["cuda:1", 20 * GIB, "30"]}


def _engine_of_a_share(root: str, id: str, /, *, device: str, memory_bytes: int) -> SimEngine:
    percent = os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]
    (Path(root) / id).write_text(json.dumps([device, memory_bytes, percent]))
    return sim_engine(id)


def test_a_partition_that_does_not_fit_is_refused_with_the_sizes() -> None:
    shares = [Share(id=name, memory_bytes="40 GiB") for name in ("e0", "e1")]
    make = partial(_engine_of_a_share, "")
    with pytest.raises(ConfigError, match=r"e0 42,949,672,960, e1 42,949,672,960 bytes.*has 85,899,345,920"):
        partition("cuda:0", shares, make, memory_bytes="80 GiB")
    assert len(partition("cuda:0", shares, make, memory_bytes="80 GiB", reserved_bytes=0)) == 2
    with pytest.raises(ConfigError, match="Two shares have one id"):
        partition("cuda:0", [shares[0]] * 2, make, memory_bytes="800 GiB")
