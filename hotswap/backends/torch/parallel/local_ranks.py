"""`LocalRanks`: rank processes on this machine, which end with the process that started them."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import IO

from hotswap.backends.torch.parallel.addresses import interface_of
from hotswap.backends.torch.parallel.grid import RankPosition
from hotswap.backends.torch.parallel.messages import NumberedCommand, Reply
from hotswap.backends.torch.parallel.stage_ranks import RankState, Source, StageRanks, lost
from hotswap.errors import InstanceLost

__all__ = ["LocalRanks", "RankProcess"]

_PROGRAM = "import sys; from hotswap.backends.torch.parallel.rank import main; main(*map(int, sys.argv[1:]))"

# Environment variables of process launchers such as torchrun, which ranks must not inherit.
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# The time that a process which has closed its connection may take to exit, also on a busy machine.
_EXIT_S = 30.0
_MAX_OUTPUT_BYTES = 8192


@dataclass(slots=True, eq=False, kw_only=True)
class RankProcess(RankState):
    """One rank process.

    Attributes:
        popen: The process.
        connection: The connection for commands and replies.
        liveness: A socket that closes when the process ends; its other end closes with this process.
        errors: The file of its standard error.
    """

    popen: subprocess.Popen[bytes]
    connection: Connection[object, Reply]
    liveness: socket.socket
    errors: IO[bytes]

    def receive(self) -> None:
        """Receive one reply, or note the end of the process."""
        try:
            self.take(self.connection.recv())
        except (EOFError, OSError):
            self.ended = True

    def ending(self) -> tuple[int | None, str]:
        """Return the exit code of a process that has ended, and the end of its standard error. Blocking."""
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(_EXIT_S)
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - _MAX_OUTPUT_BYTES))
        return self.popen.returncode, self.errors.read().decode(errors="replace").strip()

    def send(self, message: NumberedCommand, files: Sequence[int]) -> None:
        """Send a command and open files; note the end of the process if it cannot be reached. Blocking."""
        try:
            self.connection.send_bytes(pickle.dumps(message))
            for file in files:
                send_handle(self.connection, file, self.popen.pid)
        except OSError:
            self.ended = True

    def close(self) -> None:
        """Wait until the killed process has ended, and close its resources."""
        self.popen.wait()
        self.connection.close()
        self.liveness.close()
        self.errors.close()


@dataclass(slots=True, eq=False)
class LocalRanks(StageRanks):
    """The ranks of one stage on this machine. They end with this process, even if it is killed.

    Args:
        positions: Their positions.
        threads: The CPU threads of each.

    Attributes:
        processes: The ranks that were launched.
    """

    positions: Sequence[RankPosition]
    threads: int
    processes: list[RankProcess] = field(default_factory=list[RankProcess])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def ranks(self) -> Sequence[RankProcess]:
        return self.processes

    def launch(self, address: str) -> None:
        environment = _environment(self.threads, address)
        for position in self.positions:
            self.processes.append(_launched(position, environment))

    @property
    def pids(self) -> tuple[int, ...]:
        """The process id of every rank."""
        return tuple(rank.popen.pid for rank in self.processes)

    def send(self, messages: Sequence[NumberedCommand], files: Sequence[Sequence[int]]) -> None:
        for rank, message, own in zip(self.processes, messages, files, strict=True):
            rank.send(message, own)

    def sources(self) -> Sequence[Source]:
        return [rank.connection for rank in self.processes if not rank.ended]

    def receive(self, ready: Collection[object]) -> None:
        for rank in self.processes:
            if not rank.ended and rank.connection in ready:
                rank.receive()

    def loss(self, rank: RankState, engine: str) -> InstanceLost:
        assert isinstance(rank, RankProcess), "it is one of these ranks"
        code, output = rank.ending()
        return lost(rank.position, engine, code, "", output)

    def alarms(self) -> Sequence[socket.socket]:
        return [rank.liveness for rank in self.processes]

    def cause(self, alarm: socket.socket) -> str:
        (position,) = (rank.position for rank in self.processes if rank.liveness is alarm)
        return f"the process of its {position} ended"

    def kill(self) -> None:
        with self._lock:
            for rank in self.processes:
                if rank.popen.poll() is None:
                    rank.popen.kill()

    def join(self) -> None:
        with self._lock:
            for rank in self.processes:
                rank.close()
            self.processes.clear()


def _launched(position: RankPosition, environment: dict[str, str]) -> RankProcess:
    mine, commands = socket.socketpair()
    liveness, its_liveness = socket.socketpair()
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
    with commands, its_liveness:
        popen = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(commands.fileno()), str(its_liveness.fileno())],
            pass_fds=(commands.fileno(), its_liveness.fileno()),
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,  # Ctrl-C interrupts the engine's process only
        )
    return RankProcess(
        position, popen=popen, connection=Connection(mine.detach()), liveness=liveness, errors=errors
    )


def _environment(threads: int, address: str) -> dict[str, str]:
    known = {key: value for key, value in os.environ.items() if key not in _LAUNCHER_VARIABLES}
    known["OMP_NUM_THREADS"] = str(threads)
    known["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    # Where all ranks are on one machine: its host name may not resolve.
    interface = interface_of(address or "127.0.0.1")
    if interface is not None:
        known.setdefault("GLOO_SOCKET_IFNAME", interface)
        if address:
            known.setdefault("NCCL_SOCKET_IFNAME", interface)
    return known
