"""Starts an engine's rank processes, sends them commands, detects their failures, and ends them."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from pathlib import Path
from time import monotonic
from typing import IO

from hotswap.backends.torch.parallel.grid import Grid, RankPosition
from hotswap.backends.torch.parallel.messages import (
    Command,
    Done,
    Failed,
    NumberedCommand,
    Reply,
    Setup,
    Step,
)
from hotswap.errors import InstanceError, InstanceLost, OutOfMemory, ShardCorrupt, UnsupportedModel

__all__ = ["Ranks", "RemoteTraceback"]

_PROGRAM = "import sys; from hotswap.backends.torch.parallel.rank import main; main(*map(int, sys.argv[1:]))"

# Environment variables of process launchers such as torchrun, which ranks must not inherit.
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Errors of a rank that are raised as the same class in the engine's process.
_MAPPED_ERRORS = {kind.__name__: kind for kind in (OutOfMemory, ShardCorrupt, UnsupportedModel)}

# The time to wait for the other ranks' errors when one has failed, to find the first failure.
_FAILURE_GRACE_S = 2.0
# The time that a process which has closed its connection may take to exit, also on a busy machine.
_EXIT_S = 30.0


class RemoteTraceback(Exception):
    """The traceback of an error in another process, as text; the `__cause__` of the error raised here."""


@dataclass(slots=True, eq=False)
class _Process:
    """The engine's side of one rank process.

    Attributes:
        position: The position of the rank.
        popen: The process.
        connection: The connection for commands and replies.
        liveness: A socket that closes when the process ends; its other end closes with this process.
        errors: The file of its standard error.
        inbox: Replies that were not collected yet, by the number of the command.
        final_error: The error with which it ended, if it could report one.
        ended: Whether it has ended.
    """

    position: RankPosition
    popen: subprocess.Popen[bytes]
    connection: Connection[object, Reply]
    liveness: socket.socket
    errors: IO[bytes]
    inbox: dict[int, Reply] = field(default_factory=dict[int, Reply])
    final_error: Failed | None = None
    ended: bool = False

    def receive(self) -> None:
        """Receive one reply, or record the end of the process."""
        try:
            reply = self.connection.recv()
        except (EOFError, OSError):
            self.ended = True
            return
        if isinstance(reply, Failed) and reply.ends:
            self.final_error, self.ended = reply, True
        else:
            self.inbox[reply.number] = reply

    def loss(self, engine: str) -> InstanceLost:
        """Return the error for a rank that ended without a report; its standard error is the cause."""
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(_EXIT_S)
        error = InstanceLost(
            f"The {self.position} of engine {engine!r} ended (exit code {self.popen.returncode}); "
            "unload the engine to restart its ranks."
        )
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - 8192))
        if output := self.errors.read().decode(errors="replace").strip():
            error.__cause__ = RemoteTraceback(f"\n{output}")
        return error


@dataclass(slots=True, eq=False)
class Ranks:
    """The rank processes of one engine. They end with this process, even if it is killed.

    Methods that send commands block, and must be called by one thread at a time.

    Args:
        engine: The engine's name.
        grid: The grid of ranks.
        devices: The device of each rank.
        threads: The CPU threads of each rank.
        invariant: Whether steps are batch-invariant.
        timeout_s: The time after which a rank that does not reply is considered failed, in seconds.
    """

    engine: str
    grid: Grid
    devices: Sequence[str]
    threads: int
    invariant: bool
    timeout_s: float
    _processes: list[_Process] = field(default_factory=list[_Process])
    _number: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Start all ranks, and return when they are connected to each other.

        Raises:
            InstanceLost: a rank ended or did not reply in time; all were ended.
        """
        with tempfile.TemporaryDirectory(prefix="hotswap-ranks-") as folder:
            try:
                for position in self.grid.positions:
                    self._processes.append(self._launch(position))
                setups = [self._setup(position, folder) for position in self.grid.positions]
                self.call(setups)
            except BaseException:
                self.kill()
                self.join()
                raise

    @property
    def pids(self) -> tuple[int, ...]:
        """The process id of every rank."""
        return tuple(process.popen.pid for process in self._processes)

    def watch(self, loop: asyncio.AbstractEventLoop, died: Callable[[RankPosition], None]) -> None:
        """Call `died` on the event loop when a rank ends by itself."""

        def notice(process: _Process) -> None:
            loop.remove_reader(process.liveness)
            died(process.position)

        for process in self._processes:
            loop.add_reader(process.liveness, notice, process)

    def unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Undo `watch`."""
        for process in self._processes:
            loop.remove_reader(process.liveness)

    def call(self, commands: Sequence[Command], files: Sequence[Sequence[int]] = ()) -> list[Done]:
        """Send each rank its command and open files, and return the replies of all.

        Args:
            commands: One command per rank.
            files: The file descriptors to send with each command; none if empty.

        Raises:
            OutOfMemory, ShardCorrupt, UnsupportedModel: a rank raised it while it ran the command.
            InstanceError: a rank raised another error.
            InstanceLost: a rank ended or did not reply in time.
        """
        self._number += 1
        for index, (process, command) in enumerate(zip(self._processes, commands, strict=True)):
            self._send(
                process, pickle.dumps(NumberedCommand(self._number, command)), files[index] if files else ()
            )
        return self._collect(self._processes, self._number)

    def submit(self, step: Step) -> int:
        """Send a step to all ranks, and return its number.

        Raises:
            InstanceLost: a rank has ended.
        """
        self._number += 1
        message = pickle.dumps(NumberedCommand(self._number, step))
        for process in self._processes:
            self._send(process, message)
        return self._number

    def finish(self, number: int, *, is_preflight: bool = False) -> list[Done]:
        """Wait for the replies of the last stage to a step, or of all ranks in a preflight, and return them.

        Raises:
            OutOfMemory, ShardCorrupt, UnsupportedModel: a rank raised it; the ranks must be restarted.
            InstanceLost: a rank raised another error, ended, or did not reply in time.
        """
        recipients = self._processes if is_preflight else [p for p in self._processes if p.position.is_last]
        return self._collect(recipients, number)

    def kill(self) -> None:
        """Kill all ranks; calls that wait for them fail with `InstanceLost`. Thread-safe."""
        with self._lock:
            for process in self._processes:
                if process.popen.poll() is None:
                    process.popen.kill()

    def join(self) -> None:
        """Wait until killed processes have ended, and close their resources. Blocks for milliseconds."""
        with self._lock:
            for process in self._processes:
                process.popen.wait()
                process.connection.close()
                process.liveness.close()
                process.errors.close()
            self._processes.clear()

    # ------------------------------------------------------------------ private

    def _launch(self, position: RankPosition) -> _Process:
        mine, commands = socket.socketpair()
        liveness, its_liveness = socket.socketpair()
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by join
        with commands, its_liveness:
            popen = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(commands.fileno()), str(its_liveness.fileno())],
                pass_fds=(commands.fileno(), its_liveness.fileno()),
                env=_environment(self.threads),
                stdin=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # Ctrl-C interrupts the engine's process only
            )
        return _Process(position, popen, Connection(mine.detach()), liveness, errors)

    def _setup(self, position: RankPosition, folder: str) -> Setup:
        return Setup(
            rank=position.rank,
            tp=self.grid.tp,
            pp=self.grid.pp,
            rendezvous=str(Path(folder) / "rendezvous"),
            device=self.devices[position.rank],
            threads=self.threads,
            invariant=self.invariant,
            depth=self.grid.pp,
            timeout_s=self.timeout_s,
        )

    def _send(self, process: _Process, message: bytes, files: Sequence[int] = ()) -> None:
        try:
            process.connection.send_bytes(message)
            for file in files:
                send_handle(process.connection, file, process.popen.pid)
        except OSError:
            process.ended = True
        if process.ended:  # outside the handler, whose error would become the context of this one
            raise self._loss()

    def _collect(self, recipients: Sequence[_Process], number: int) -> list[Done]:
        """Return the replies of ranks to one command, in order; drop replies to earlier commands."""
        deadline_s = monotonic() + self.timeout_s
        while missing := [process for process in recipients if number not in process.inbox]:
            in_time = self._receive(deadline_s)
            if any(process.ended for process in self._processes):
                raise self._loss()
            if not in_time:
                raise InstanceLost(
                    f"The {missing[0].position} of engine {self.engine!r} did not reply for "
                    f"{self.timeout_s:g} s; unload the engine to restart its ranks."
                )
        answers = [process.inbox[number] for process in recipients]
        for process in self._processes:
            process.inbox = {key: reply for key, reply in process.inbox.items() if key > number}
        for process, answer in zip(recipients, answers, strict=True):
            if isinstance(answer, Failed):
                raise _error(process.position, answer, self.engine, InstanceError)
        return [answer for answer in answers if isinstance(answer, Done)]

    def _receive(self, deadline_s: float) -> bool:
        """Wait for replies and receive them; false if there were none by the deadline."""
        alive = [process for process in self._processes if not process.ended]
        ready = wait([process.connection for process in alive], max(0.0, deadline_s - monotonic()))
        for process in alive:
            if process.connection in ready:
                process.receive()
        return bool(ready)

    def _loss(self) -> Exception:
        """Return the error of the rank that failed first; its failure makes the other ranks end too."""
        deadline_s = monotonic() + _FAILURE_GRACE_S
        while not all(process.ended for process in self._processes) and self._receive(deadline_s):
            pass
        ended = [process for process in self._processes if process.ended]
        reports = [(process, process.final_error) for process in ended if process.final_error is not None]
        silent = [process for process in ended if process.final_error is None]
        for process, report in reports:
            if report.kind in _MAPPED_ERRORS:
                return _error(process.position, report, self.engine, InstanceLost)
        if silent:
            return silent[0].loss(self.engine)
        process, report = reports[0]
        return _error(process.position, report, self.engine, InstanceLost)


def _error(position: RankPosition, failed: Failed, engine: str, otherwise: type[InstanceError]) -> Exception:
    """Return a rank's error as an error of the engine; the rank's traceback is its cause."""
    kind = _MAPPED_ERRORS.get(failed.kind)
    message = failed.message if kind else f"{failed.kind}: {failed.message}"
    error = (kind or otherwise)(f"The {position} of engine {engine!r} failed. {message}")
    error.__cause__ = RemoteTraceback(f"\n{failed.traceback}")
    return error


def _environment(threads: int) -> dict[str, str]:
    known = {key: value for key, value in os.environ.items() if key not in _LAUNCHER_VARIABLES}
    known["OMP_NUM_THREADS"] = str(threads)
    known["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if sys.platform == "linux":
        # The ranks are on one machine, whose host name may not resolve.
        known.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return known
