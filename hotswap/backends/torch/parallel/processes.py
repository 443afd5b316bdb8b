"""The processes of an engine's ranks: they are started, told what to do, watched and ended from here."""

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

from hotswap.backends.torch.parallel.messages import Command, Done, Failed, Reply, Setup, Step, Told
from hotswap.backends.torch.parallel.places import Grid, Place
from hotswap.errors import InstanceError, InstanceLost, OutOfMemory, ShardCorrupt, UnsupportedModel

__all__ = ["Ranks", "RemoteTraceback"]

_PROGRAM = "import sys; from hotswap.backends.torch.parallel.rank import main; main(*map(int, sys.argv[1:]))"

# Of another launcher's processes, which a rank must not take itself for one of.
_FOREIGN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Errors of a rank that mean the same here.
_SAME = {kind.__name__: kind for kind in (OutOfMemory, ShardCorrupt, UnsupportedModel)}

# How long the others are waited for when one has failed, to learn which of them was the first.
_AFTERMATH_S = 2.0
# How long a process that has closed its connection may take to exit, on a busy machine too.
_EXIT_S = 30.0


class RemoteTraceback(Exception):
    """The traceback of an error in another process, as text; the cause of the error raised here."""


@dataclass(slots=True, eq=False)
class _Process:
    """One rank, as the engine's process has it.

    Attributes:
        place: Which one.
        popen: The process.
        connection: Where it is told what to do, and answers.
        life: Closes when the process ends, as the other end does with this process.
        errors: A file that holds its standard error.
        inbox: Its answers that nobody has asked for yet, by the number of the command.
        last_words: Why it ended, if it could still say so.
        ended: Whether it has.
    """

    place: Place
    popen: subprocess.Popen[bytes]
    connection: Connection[object, Reply]
    life: socket.socket
    errors: IO[bytes]
    inbox: dict[int, Reply] = field(default_factory=dict[int, Reply])
    last_words: Failed | None = None
    ended: bool = False

    def hear(self) -> None:
        """Take one answer, or note the end."""
        try:
            reply = self.connection.recv()
        except (EOFError, OSError):
            self.ended = True
            return
        if isinstance(reply, Failed) and reply.ends:
            self.last_words, self.ended = reply, True
        else:
            self.inbox[reply.number] = reply

    def loss(self, engine: str) -> InstanceLost:
        """Return the error of an engine whose rank ended without a word; its standard error is the cause."""
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(_EXIT_S)
        error = InstanceLost(
            f"The {self.place} of engine {engine!r} ended (exit code {self.popen.returncode}); "
            "unload the engine to start its ranks anew."
        )
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - 8192))
        if said := self.errors.read().decode(errors="replace").strip():
            error.__cause__ = RemoteTraceback(f"\n{said}")
        return error


@dataclass(slots=True, eq=False)
class Ranks:
    """The rank processes of one engine. They end when this process does, whatever way that is.

    Methods that talk to ranks block, and are called by one thread at a time.

    Args:
        engine: Whose they are.
        grid: How many, and how they are arranged.
        devices: Where each computes.
        threads: CPU threads of each.
        invariant: Whether bits may not depend on the batch.
        timeout_s: How long a rank may be silent while it is waited for.
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
        """Start all, and return when they have found each other.

        Raises:
            InstanceLost: one of them ended, or did not answer in time; none is left.
        """
        with tempfile.TemporaryDirectory(prefix="hotswap-ranks-") as folder:
            try:
                for place in self.grid.places:
                    self._processes.append(self._launch(place))
                setups = [self._setup(place, folder) for place in self.grid.places]
                self.call(setups)
            except BaseException:
                self.kill()
                self.join()
                raise

    @property
    def pids(self) -> tuple[int, ...]:
        """The process id of every rank."""
        return tuple(process.popen.pid for process in self._processes)

    def watch(self, loop: asyncio.AbstractEventLoop, died: Callable[[Place], None]) -> None:
        """Have `died` called by the event loop when a rank ends by itself."""

        def notice(process: _Process) -> None:
            loop.remove_reader(process.life)
            died(process.place)

        for process in self._processes:
            loop.add_reader(process.life, notice, process)

    def unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Undo `watch`."""
        for process in self._processes:
            loop.remove_reader(process.life)

    def call(self, commands: Sequence[Command], files: Sequence[Sequence[int]] = ()) -> list[Done]:
        """Give each rank its command, with open files to go with it, and return what all of them answered.

        Raises:
            OutOfMemory, ShardCorrupt, UnsupportedModel: a rank raised it, carrying out its command.
            InstanceError: a rank raised something else.
            InstanceLost: a rank ended, or did not answer in time.
        """
        self._number += 1
        for index, (process, command) in enumerate(zip(self._processes, commands, strict=True)):
            self._send(process, pickle.dumps(Told(self._number, command)), files[index] if files else ())
        return self._collect(self._processes, self._number)

    def submit(self, step: Step) -> int:
        """Give all ranks a step, and return its number. InstanceLost: as `call`."""
        self._number += 1
        told = pickle.dumps(Told(self._number, step))
        for process in self._processes:
            self._send(process, told)
        return self._number

    def finish(self, number: int, *, is_trial: bool = False) -> list[Done]:
        """Return what the last stage answered to a step, or to a trial all ranks, once they have.

        Raises:
            OutOfMemory, ShardCorrupt, UnsupportedModel: a rank raised it; the ranks must be started anew.
            InstanceLost: a rank failed otherwise, ended, or did not answer in time.
        """
        asked = self._processes if is_trial else [p for p in self._processes if p.place.is_last]
        return self._collect(asked, number)

    def kill(self) -> None:
        """End all at once, whatever they do; whoever waits for them notices. From any thread."""
        with self._lock:
            for process in self._processes:
                if process.popen.poll() is None:
                    process.popen.kill()

    def join(self) -> None:
        """Wait for the ends of killed processes, and forget them. Blocking, for milliseconds."""
        with self._lock:
            for process in self._processes:
                process.popen.wait()
                process.connection.close()
                process.life.close()
                process.errors.close()
            self._processes.clear()

    # ------------------------------------------------------------------ private

    def _launch(self, place: Place) -> _Process:
        mine, commands = socket.socketpair()
        life, its_life = socket.socketpair()
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by join
        with commands, its_life:
            popen = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(commands.fileno()), str(its_life.fileno())],
                pass_fds=(commands.fileno(), its_life.fileno()),
                env=_environment(self.threads),
                stdin=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # an interrupt from the keyboard is for the engine's process
            )
        return _Process(place, popen, Connection(mine.detach()), life, errors)

    def _setup(self, place: Place, folder: str) -> Setup:
        return Setup(
            rank=place.rank,
            tp=self.grid.tp,
            pp=self.grid.pp,
            rendezvous=str(Path(folder) / "rendezvous"),
            device=self.devices[place.rank],
            threads=self.threads,
            invariant=self.invariant,
            depth=self.grid.pp,
            timeout_s=self.timeout_s,
        )

    def _send(self, process: _Process, told: bytes, files: Sequence[int] = ()) -> None:
        try:
            process.connection.send_bytes(told)
            for file in files:
                send_handle(process.connection, file, process.popen.pid)
        except OSError:
            process.ended = True
        if process.ended:  # outside of the handler, whose error would take the place of the loss's own cause
            raise self._loss()

    def _collect(self, asked: Sequence[_Process], number: int) -> list[Done]:
        """Return the answers of ranks to one command, in their order; forget those to earlier ones."""
        deadline_s = monotonic() + self.timeout_s
        while missing := [process for process in asked if number not in process.inbox]:
            in_time = self._hear(deadline_s)
            if any(process.ended for process in self._processes):
                raise self._loss()
            if not in_time:
                raise InstanceLost(
                    f"The {missing[0].place} of engine {self.engine!r} said nothing for {self.timeout_s:g} s."
                )
        answers = [process.inbox[number] for process in asked]
        for process in self._processes:
            process.inbox = {key: reply for key, reply in process.inbox.items() if key > number}
        for process, answer in zip(asked, answers, strict=True):
            if isinstance(answer, Failed):
                raise _error(process.place, answer, self.engine, InstanceError)
        return [answer for answer in answers if isinstance(answer, Done)]

    def _hear(self, deadline_s: float) -> bool:
        """File what ranks say, having waited for something; false if nothing was said in time."""
        alive = [process for process in self._processes if not process.ended]
        ready = wait([process.connection for process in alive], max(0.0, deadline_s - monotonic()))
        for process in alive:
            if process.connection in ready:
                process.hear()
        return bool(ready)

    def _loss(self) -> Exception:
        """Return why ranks ended. They end each other: what the first of them said has to be found."""
        deadline_s = monotonic() + _AFTERMATH_S
        while not all(process.ended for process in self._processes) and self._hear(deadline_s):
            pass
        ended = [process for process in self._processes if process.ended]
        said = [(process, process.last_words) for process in ended if process.last_words is not None]
        silent = [process for process in ended if process.last_words is None]
        for process, words in said:
            if words.kind in _SAME:
                return _error(process.place, words, self.engine, InstanceLost)
        if silent:
            return silent[0].loss(self.engine)
        process, words = said[0]
        return _error(process.place, words, self.engine, InstanceLost)


def _error(place: Place, failed: Failed, engine: str, otherwise: type[InstanceError]) -> Exception:
    """Return what a rank raised as an error of the engine; the rank's own traceback is its cause."""
    kind = _SAME.get(failed.kind)
    said = failed.message if kind else f"{failed.kind}: {failed.message}"
    error = (kind or otherwise)(f"The {place} of engine {engine!r} failed. {said}")
    error.__cause__ = RemoteTraceback(f"\n{failed.traceback}")
    return error


def _environment(threads: int) -> dict[str, str]:
    known = {key: value for key, value in os.environ.items() if key not in _FOREIGN}
    known["OMP_NUM_THREADS"] = str(threads)
    known["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if sys.platform == "linux":
        # Ranks of one machine: the name that it has outside may lead nowhere.
        known.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return known
