"""Starts an engine's ranks, sends them commands, detects their failures, and ends them."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from time import monotonic

import anyio

from hotswap.backends.torch.parallel.addresses import Rendezvous
from hotswap.backends.torch.parallel.grid import Grid, RankPosition
from hotswap.backends.torch.parallel.linked_ranks import LinkedRanks
from hotswap.backends.torch.parallel.local_ranks import LocalRanks
from hotswap.backends.torch.parallel.messages import (
    Command,
    Done,
    Failed,
    NumberedCommand,
    ReadTotal,
    ReadWeights,
    RestoreKV,
    SaveKV,
    Setup,
    Step,
)
from hotswap.backends.torch.parallel.nodes import StageNode
from hotswap.backends.torch.parallel.stage_ranks import RankState, RemoteTraceback, StageRanks
from hotswap.errors import (
    InstanceError,
    InstanceLost,
    OutOfMemory,
    ShardCorrupt,
    ShardMissing,
    StoreBusy,
    StoreError,
    TierFull,
    UnsupportedModel,
)
from hotswap.worker_threads import run_in_thread

__all__ = ["Ranks", "RemoteTraceback"]

# Errors of a rank, or of the host of a stage, that are raised as the same class in the engine's process.
_MAPPED_ERRORS: Mapping[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (OutOfMemory, ShardCorrupt, ShardMissing, StoreBusy, StoreError, TierFull, UnsupportedModel)
}

# The time to wait for the other ranks' errors when one has failed, to find the first failure.
_FAILURE_GRACE_S = 2.0


@dataclass(slots=True, eq=False)
class Ranks:
    """The ranks of one engine, on this machine but for stages with a node. They end with this process.

    Methods that send commands block, and must be called by one thread at a time.

    Args:
        engine: The engine's name.
        grid: The grid of ranks.
        devices: The device of each rank.
        threads: The CPU threads of each rank.
        invariant: Whether steps are batch-invariant.
        timeout_s: The time after which a rank that does not reply is considered failed, in seconds.
        nodes: The nodes of stages elsewhere, by the number of the stage; never of the last, whose logits the
            engine reads from memory.
    """

    engine: str
    grid: Grid
    devices: Sequence[str]
    threads: int
    invariant: bool
    timeout_s: float
    nodes: Mapping[int, StageNode] = field(default_factory=dict[int, StageNode])
    _stages: list[StageRanks] = field(default_factory=list[StageRanks])
    _rendezvous: Rendezvous | None = None
    _number: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Start all ranks, and return when they are connected to each other.

        Raises:
            InstanceLost: a node cannot be reached, or a rank ended or did not reply in time; all were ended.
        """
        try:
            with self._lock:
                self._stages += map(self._make_stage, self.grid.stages)
            addresses = [stage.open() for stage in self._stages if isinstance(stage, LinkedRanks)]
            address = addresses[0] if addresses else ""
            with self._lock:  # `kill` finds all processes or none
                for stage in self._stages:
                    stage.launch(address)
            self._rendezvous = Rendezvous(address, self.grid.size, self.timeout_s)
            self.call([self._setup(position, self._rendezvous.place) for position in self.grid.positions])
            if not (address and self.devices[0].startswith("cuda")):  # NCCL connects some ranks later
                self._rendezvous.close()
        except BaseException:
            self.kill()
            self.join()
            raise

    @property
    def is_here(self) -> tuple[bool, ...]:
        """Whether each rank is on this machine."""
        return tuple(position.stage not in self.nodes for position in self.grid.positions)

    @property
    def pids(self) -> tuple[int, ...]:
        """The process id of every rank on this machine."""
        return tuple(pid for stage in self._stages if isinstance(stage, LocalRanks) for pid in stage.pids)

    def watch(self, loop: asyncio.AbstractEventLoop, died: Callable[[str], None]) -> None:
        """Call `died` on the event loop with the reason, when a rank ends by itself or its node is lost."""

        def notice(stage: StageRanks, alarm: socket.socket) -> None:
            loop.remove_reader(alarm)
            died(stage.cause(alarm))

        for stage in self._stages:
            for alarm in stage.alarms():
                loop.add_reader(alarm, notice, stage, alarm)

    def unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Undo `watch`."""
        for stage in self._stages:
            for alarm in stage.alarms():
                loop.remove_reader(alarm)

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
        self._send(self._stages, commands, files)
        return self._collect(self._ranks, self._number)

    async def read_elsewhere(self, command: ReadWeights) -> list[ReadTotal]:
        """Have the hosts of all stages elsewhere read the weights of their ranks; return what each has read.

        A cancelled call leaves them reading; the next `Drop` ends that.

        Raises:
            OutOfMemory, StoreError, UnsupportedModel: a host raised it.
            InstanceError: a host raised another error.
            InstanceLost: a rank or its node was lost.
        """
        self._number += 1
        linked = [stage for stage in self._stages if isinstance(stage, LinkedRanks)]
        await run_in_thread(self._send, linked, [command] * (len(linked) * self.grid.tp))
        for stage in linked:
            while any(self._number not in rank.inbox and not rank.ended for rank in stage.ranks):
                await anyio.wait_readable(stage.wakeup)
                stage.receive(stage.sources())
        ranks = [rank for stage in linked for rank in stage.ranks]
        replies = await run_in_thread(self._collect, ranks, self._number)
        return [reply.read for reply in replies if reply.read is not None]

    def submit(self, step: Step) -> int:
        """Send a step to all ranks, and return its number.

        Raises:
            InstanceLost: a rank has ended.
        """
        self._number += 1
        self._send(self._stages, [step] * self.grid.size)
        return self._number

    def finish(self, number: int, *, is_preflight: bool = False) -> list[Done]:
        """Wait for the replies of the last stage to a step, or of all ranks in a preflight, and return them.

        Raises:
            OutOfMemory, ShardCorrupt, UnsupportedModel: a rank raised it; the ranks must be restarted.
            InstanceLost: a rank raised another error, ended, or did not reply in time.
        """
        recipients = self._ranks if is_preflight else [r for r in self._ranks if r.position.is_last]
        return self._collect(recipients, number)

    def copy(self, commands: Sequence[SaveKV] | Sequence[RestoreKV]) -> list[Done]:
        """Have all ranks copy KV blocks or states after the steps that were sent, and return their replies.

        Raises:
            InstanceError: a rank failed to copy.
            InstanceLost: a rank ended or did not reply in time.
        """
        self._number += 1
        self._send(self._stages, commands)
        return self._collect(self._ranks, self._number, keeps_earlier=True)

    def kill(self) -> None:
        """Kill all ranks; calls that wait for them fail with `InstanceLost`. Thread-safe."""
        with self._lock:
            for stage in self._stages:
                stage.kill()

    def join(self) -> None:
        """Wait until killed ranks have ended, and release all resources. Blocks for milliseconds.

        For ranks of a node that does not answer it blocks for seconds.
        """
        with self._lock:  # `kill`, on an event loop, must not wait for this
            stages, self._stages = self._stages, []
        for stage in stages:
            stage.join()
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None

    # ------------------------------------------------------------------ private

    @property
    def _ranks(self) -> list[RankState]:
        return [rank for stage in self._stages for rank in stage.ranks]

    def _make_stage(self, positions: Sequence[RankPosition]) -> StageRanks:
        node = self.nodes.get(positions[0].stage)
        if node is None:
            return LocalRanks(positions, self.threads)
        return LinkedRanks(node, positions, self.engine)

    def _setup(self, position: RankPosition, rendezvous: str) -> Setup:
        return Setup(
            rank=position.rank,
            tp=self.grid.tp,
            pp=self.grid.pp,
            rendezvous=rendezvous,
            device=self.devices[position.rank],
            threads=self.threads,
            invariant=self.invariant,
            depth=self.grid.pp,
            timeout_s=self.timeout_s,
        )

    def _send(
        self, stages: Sequence[StageRanks], commands: Sequence[Command], files: Sequence[Sequence[int]] = ()
    ) -> None:
        """Send the ranks of some stages a command each."""
        first, tp = 0, self.grid.tp
        for stage in stages:
            own = [NumberedCommand(self._number, command) for command in commands[first : first + tp]]
            stage.send(own, files[first : first + tp] or [()] * tp)
            first += tp
            if any(rank.ended for rank in stage.ranks):
                raise self._loss()

    def _collect(
        self, recipients: Sequence[RankState], number: int, *, keeps_earlier: bool = False
    ) -> list[Done]:
        """Return the replies of ranks to one command, in order; earlier ones are dropped, or kept."""
        deadline_s = monotonic() + self.timeout_s
        while missing := [rank for rank in recipients if number not in rank.inbox]:
            if any(rank.ended for rank in self._ranks):
                raise self._loss()
            if not self._receive(deadline_s):
                raise InstanceLost(
                    f"The {missing[0].position} of engine {self.engine!r} did not reply for "
                    f"{self.timeout_s:g} s; unload the engine to restart its ranks."
                )
        answers = [rank.inbox[number] for rank in recipients]
        for rank in self._ranks:
            rank.inbox = {
                key: reply
                for key, reply in rank.inbox.items()
                if key > number or (keeps_earlier and key < number)
            }
        for rank, answer in zip(recipients, answers, strict=True):
            if isinstance(answer, Failed):
                raise _error(rank.position, answer, self.engine, InstanceError)
        return [answer for answer in answers if isinstance(answer, Done)]

    def _receive(self, deadline_s: float) -> bool:
        """Wait for replies and receive them; false if there were none by the deadline."""
        sources = [source for stage in self._stages for source in stage.sources()]
        ready = wait(sources, max(0.0, deadline_s - monotonic()))
        for stage in self._stages:
            stage.receive(ready)
        return bool(ready)

    def _loss(self) -> Exception:
        """Return the error of the rank that failed first; its failure makes the other ranks end too."""
        deadline_s = monotonic() + _FAILURE_GRACE_S
        while not all(rank.ended for rank in self._ranks) and self._receive(deadline_s):
            pass
        ended = [(stage, rank) for stage in self._stages for rank in stage.ranks if rank.ended]
        reports = [(rank, rank.final_error) for _, rank in ended if rank.final_error is not None]
        for rank, report in reports:
            if report.kind in _MAPPED_ERRORS:
                return _error(rank.position, report, self.engine, InstanceLost)
        for stage, rank in ended:
            if rank.final_error is None:
                return stage.loss(rank, self.engine)
        rank, report = reports[0]
        return _error(rank.position, report, self.engine, InstanceLost)


def _error(position: RankPosition, failed: Failed, engine: str, otherwise: type[InstanceError]) -> Exception:
    """Return a rank's error as an error of the engine; the rank's traceback is its cause."""
    kind = _MAPPED_ERRORS.get(failed.kind)
    message = failed.message if kind else f"{failed.kind}: {failed.message}"
    error = (kind or otherwise)(f"The {position} of engine {engine!r} failed. {message}")
    error.__cause__ = RemoteTraceback(f"\n{failed.traceback}")
    return error
