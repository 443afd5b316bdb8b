"""One thread that steps while there is work and sleeps while there is none."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Mapping
from time import perf_counter
from typing import Protocol, TypeAlias

import torch

from hotswap.backends.torch import throttle
from hotswap.backends.torch.batcher import Sequence
from hotswap.backends.torch.runner import Report, Runner

__all__ = ["Job", "Pieces", "Worker"]

# How much of a step's time jobs take after it, while there are steps.
_JOBS_SHARE = 0.04

Pieces: TypeAlias = Generator[None, None, None]


class Job(Protocol):
    """Something to be done with a runner and its requests, in small pieces between its steps."""

    def begin(self, runner: Runner, sequences: Mapping[int, Sequence]) -> Pieces:
        """Do it; each `yield` ends a piece. Called on the worker's thread, as is everything here."""
        ...

    def end(self, error: Exception | None) -> None:
        """Learn that it is done, or why it is not."""
        ...

    def drop(self) -> None:
        """Learn that there is no runner, or no longer: what was not done never will be."""
        ...


class Worker:
    """Owns a runner and the thread it runs on; everyone else sends commands, carried out between two steps.

    Args:
        name: The thread's.
        threads: For how many threads torch may use in the steps. PyTorch counts them per thread that
            computes, so engines of one process do not disturb each other's.
        publish: Takes the report of each step, and of the books after commands. Called on the thread.
        ended: Called last on the thread: with `None` after `stop`, else with what a step or a command raised.
    """

    def __init__(
        self,
        name: str,
        *,
        threads: int,
        publish: Callable[[Report], object],
        ended: Callable[[Exception | None], object],
    ) -> None:
        self._publish, self._ended, self._threads = publish, ended, threads
        self._commands: deque[Callable[[], None]] = deque()
        self._asked: list[Job] = []  # not begun yet
        self._jobs: deque[tuple[Job, Pieces]] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._runner: Runner | None = None
        self._sequences: dict[int, Sequence] = {}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def others_step(self) -> bool:
        """Whether other engines of the process have requests to step for."""
        return throttle.others_are_stepping(self._thread.ident)

    def attach(self, runner: Runner) -> None:
        """Serve with `runner` from now on."""

        def command() -> None:
            self._runner = runner

        self._send(command)

    def detach(self, done: Callable[[], None]) -> None:
        """Drop the runner with all its requests, then call `done` on the thread."""

        def command() -> None:
            self._runner = None
            self._sequences.clear()
            self._drop_jobs()
            done()

        self._send(command)

    def add(self, sequence: Sequence) -> None:
        """Queue a request; its tokens come in reports."""

        def command() -> None:
            if self._runner is not None:
                self._sequences[sequence.ticket] = sequence
                self._runner.batcher.add(sequence)

        self._send(command)

    def remove(self, ticket: int) -> None:
        """Abort a request, if it still runs; its blocks are free before the next step begins."""

        def command() -> None:
            sequence = self._sequences.pop(ticket, None)
            if self._runner is not None and sequence is not None:
                self._runner.batcher.remove(sequence)

        self._send(command)

    def look_for_chores(self) -> None:
        """Do chores again, if there are any: what they need may have become free."""

        def command() -> None:
            if self._runner is not None:
                self._runner.tidy = False

        self._send(command)

    def work(self, job: Job) -> None:
        """Do a job: its first piece before the next step, the others after that and further steps."""

        def command() -> None:
            self._asked.remove(job)
            if self._runner is None:
                job.drop()
                return
            pieces = job.begin(self._runner, self._sequences)
            if self._advance(job, pieces):
                self._jobs.append((job, pieces))

        with self._changed:
            self._asked.append(job)
        self._send(command)

    def stop(self) -> None:
        """Make the thread end after the present step; returns at once."""
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
            with torch.inference_mode(), throttle.engine_thread(self._wanted_within):
                while self._obey():
                    self._turn()
        except Exception as exc:
            # Its frames would keep the model alive for as long as a client keeps the error.
            traceback.clear_frames(exc.__traceback__)
            error = exc
        self._runner = None
        self._sequences.clear()
        self._drop_jobs()
        self._drop_asked()
        self._ended(error)

    def _send(self, command: Callable[[], None]) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def _obey(self) -> bool:
        """Carry out what was sent, having waited for something to do; false once stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._commands or self._has_work())
            if self._stopping:
                return False
            commands, self._commands = self._commands, deque()
        had_commands = bool(commands)
        while commands:
            # None is kept: who is told of a `detach` may count on it that earlier ones hold no runner.
            commands.popleft()()
        if had_commands:
            throttle.set_stepping(self._runner is not None and not self._runner.idle)
            if self._runner is not None:
                self._publish(self._runner.report())
        return True

    def _wanted_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._stopping or bool(self._commands), seconds)

    def _has_work(self) -> bool:
        return self._runner is not None and not (self._runner.idle and self._runner.tidy and not self._jobs)

    def _turn(self) -> None:
        """Step if there are requests, then do chores for about as long as that took: they halve the throttle.

        Where steps are to keep to a latency, chores wait until there are no requests.
        """
        runner, began = self._runner, perf_counter()
        if runner is None:
            return
        if not runner.idle:
            self._step(runner)
            throttle.set_stepping(not runner.idle)
        self._work(perf_counter() - began if not runner.idle else None)
        if runner.is_timed and not runner.idle:
            return
        until = 2 * perf_counter() - began
        while not runner.tidy and not self._commands:
            runner.tidy_up()
            if perf_counter() >= until:
                return

    def _work(self, step_s: float | None) -> None:
        """Do pieces of jobs, one of each in turn, for a share of the step's time or until a command comes."""
        until = float("inf") if step_s is None else perf_counter() + _JOBS_SHARE * step_s
        while self._jobs and not self._commands:
            job, pieces = self._jobs.popleft()
            if self._advance(job, pieces):
                self._jobs.append((job, pieces))
            if perf_counter() >= until:
                return

    def _advance(self, job: Job, pieces: Pieces) -> bool:
        """Do one piece; false if it was the last."""
        try:
            next(pieces)
        except StopIteration:
            job.end(None)
        except Exception as exc:  # a job's fault is no step's
            job.end(exc)
        else:
            return True
        return False

    def _drop_jobs(self) -> None:
        for job, pieces in self._jobs:
            pieces.close()
            job.drop()
        self._jobs.clear()

    def _drop_asked(self) -> None:
        with self._changed:
            asked, self._asked = self._asked, []
            self._commands.clear()
        for job in asked:
            job.drop()

    def _step(self, runner: Runner) -> None:
        report = runner.step()
        for sampled in report.sampled:
            if sampled.finish_reason is not None:
                self._sequences.pop(sampled.ticket, None)
        self._publish(report)
