"""The engine's thread: runs steps while there are requests, and commands between them."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Mapping
from time import perf_counter
from typing import Protocol, TypeAlias

import torch

from hotswap.backends.torch import throttle
from hotswap.backends.torch.runner import Report, Runner
from hotswap.backends.torch.sequence import Sequence

__all__ = ["Job", "Pieces", "Worker"]

# The time for jobs after each step, relative to the step's time.
_JOBS_SHARE = 0.04

Pieces: TypeAlias = Generator[None, None, None]


class Job(Protocol):
    """Work on a runner and its requests, in small pieces between steps. Called on the worker's thread."""

    def begin(self, runner: Runner, sequences: Mapping[int, Sequence]) -> Pieces:
        """Return a generator that does the work; each `yield` ends a piece.

        Args:
            runner: The attached runner.
            sequences: Its requests, by ticket.
        """
        ...

    def end(self, error: Exception | None) -> None:
        """Called once when the work is done, or has failed with `error`."""
        ...

    def drop(self) -> None:
        """Called instead of `end` if the runner was detached before the work was done."""
        ...


class Worker:
    """The thread of an engine, and the runner it runs. Methods queue commands, which run between two steps.

    Args:
        name: The name of the thread.
        threads: The number of threads that torch uses in steps. PyTorch's setting is per calling thread, so
            engines of one process have separate settings.
        publish: Called on the thread with the report of each step, and with the counters after commands.
        ended: Called last on the thread: with `None` after `stop`, else with the error of a step or a
            command.

    Attributes:
        publish: As given, for jobs that change counters and must tell them before their end.
    """

    def __init__(
        self,
        name: str,
        *,
        threads: int,
        publish: Callable[[Report], object],
        ended: Callable[[Exception | None], object],
    ) -> None:
        self.publish, self._ended, self._threads = publish, ended, threads
        self._commands: deque[Callable[[], None]] = deque()
        self._queued_jobs: list[Job] = []  # not begun yet
        self._jobs: deque[tuple[Job, Pieces]] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._runner: Runner | None = None
        self._sequences: dict[int, Sequence] = {}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def others_step(self) -> bool:
        """Whether other engines of the process have requests."""
        return throttle.others_are_stepping(self._thread.ident)

    def attach(self, runner: Runner) -> None:
        """Run the requests of `runner` from now on."""

        def command() -> None:
            self._runner = runner

        self._send(command)

    def detach(self, done: Callable[[], None]) -> None:
        """Drop the runner with all its requests, then call `done` on the thread."""

        def command() -> None:
            self._drop_runner()
            self._drop_jobs()
            done()

        self._send(command)

    def add(self, sequence: Sequence) -> None:
        """Add a request; its tokens are published in reports."""

        def command() -> None:
            if self._runner is not None:
                self._sequences[sequence.ticket] = sequence
                self._runner.batcher.add(sequence)

        self._send(command)

    def remove(self, ticket: int) -> None:
        """Abort a request if it still runs; its blocks are released before the next step."""

        def command() -> None:
            sequence = self._sequences.pop(ticket, None)
            if self._runner is not None and sequence is not None:
                self._runner.batcher.remove(sequence)

        self._send(command)

    def retry_background_work(self) -> None:
        """Resume background work, for which memory may have become free."""

        def command() -> None:
            if self._runner is not None:
                self._runner.background_done = False

        self._send(command)

    def settle(self) -> None:
        """Give back blocks that others want, and try again what waits for memory; from any thread."""
        self._send(lambda: None)

    def submit(self, job: Job) -> None:
        """Run a job: its first piece before the next step, the others after that and later steps."""

        def command() -> None:
            self._queued_jobs.remove(job)
            if self._runner is None:
                job.drop()
                return
            pieces = job.begin(self._runner, self._sequences)
            if self._advance(job, pieces):
                self._jobs.append((job, pieces))

        with self._changed:
            self._queued_jobs.append(job)
        self._send(command)

    def stop(self) -> None:
        """Make the thread end after the current step; returns at once."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def join(self) -> None:
        """Block until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        error: Exception | None = None
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode(), throttle.engine_thread(self._wait_for_command):
                while self._run_commands():
                    self._iterate()
        except Exception as exc:
            # The frames would keep the model alive for as long as a client has the error.
            traceback.clear_frames(exc.__traceback__)
            error = exc
        self._drop_runner()
        self._drop_jobs()
        self._drop_queued_jobs()
        self._ended(error)

    def _send(self, command: Callable[[], None]) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def _run_commands(self) -> bool:
        """Wait for commands or other work, and run the commands; false once stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._commands or self._has_work())
            if self._stopping:
                return False
            commands, self._commands = self._commands, deque()
        had_commands = bool(commands)
        while commands:
            # No reference to a command is kept: when `detach` calls `done`, none may refer to the runner.
            commands.popleft()()
        if had_commands:
            if self._runner is not None:
                self._runner.is_blocked = False
                if self._runner.idle:  # otherwise the next step settles, once requests had their chance
                    self._runner.batcher.settle()
            throttle.set_stepping(self._runner is not None and not self._runner.idle)
            if self._runner is not None:
                self.publish(self._runner.report())
        return True

    def _wait_for_command(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._stopping or bool(self._commands), seconds)

    def _has_work(self) -> bool:
        return self._runner is not None and not (
            self._runner.idle and self._runner.background_done and not self._jobs
        )

    def _iterate(self) -> None:
        """Run a step if there are requests, then background work for about as long as the step took.

        If steps have a target latency, background work waits until there are no requests.
        """
        runner, began = self._runner, perf_counter()
        if runner is None:
            return
        if not runner.idle:
            self._step(runner)
            throttle.set_stepping(not runner.idle)
        self._run_jobs(perf_counter() - began if not runner.idle else None)
        if runner.is_timed and not runner.idle:
            return
        until = 2 * perf_counter() - began
        while not runner.background_done and not self._commands:
            runner.do_background_work()
            if perf_counter() >= until:
                return

    def _run_jobs(self, step_s: float | None) -> None:
        """Run pieces of jobs in turn, for a share of the step's time or until a command arrives."""
        until = float("inf") if step_s is None else perf_counter() + _JOBS_SHARE * step_s
        while self._jobs and not self._commands:
            job, pieces = self._jobs.popleft()
            if self._advance(job, pieces):
                self._jobs.append((job, pieces))
            if perf_counter() >= until:
                return

    def _advance(self, job: Job, pieces: Pieces) -> bool:
        """Run one piece of a job; false if it was the last."""
        try:
            next(pieces)
        except StopIteration:
            job.end(None)
        except Exception as exc:  # a failed job does not end the thread
            job.end(exc)
        else:
            return True
        return False

    def _drop_runner(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self._runner = None
        self._sequences.clear()

    def _drop_jobs(self) -> None:
        for job, pieces in self._jobs:
            pieces.close()
            job.drop()
        self._jobs.clear()

    def _drop_queued_jobs(self) -> None:
        with self._changed:
            jobs, self._queued_jobs = self._queued_jobs, []
            self._commands.clear()
        for job in jobs:
            job.drop()

    def _step(self, runner: Runner) -> None:
        report = runner.step()
        for sampled in report.sampled:
            if sampled.is_last:
                self._sequences.pop(sampled.ticket, None)
        self.publish(report)
