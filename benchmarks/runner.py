"""Runs the contestants that are available here, and keeps the reasons why others are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from benchmarks.measure import rounds
from benchmarks.peers import Contestant
from benchmarks.process import Failed, Process
from benchmarks.timed_run import Cache, Source

__all__ = ["Runner", "Series"]

Series = dict[str, list[float]]


class Runner:
    """Contestants with their processes; one that fails is left out of its case, and the benchmark goes on.

    Attributes:
        unavailable: Why a contestant cannot run on this machine, by key.
        versions: What the contestants measure, by distribution.
    """

    def __init__(
        self,
        contestants: Sequence[Contestant],
        *,
        python: Path,
        peers_python: Path | None,
        warm_up: Source,
        timeout_s: float,
    ) -> None:
        self.unavailable: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self.defaults: dict[str, Mapping[str, Any]] = {}
        self.warm_up = warm_up
        self._contestants = contestants
        self._python, self._peers_python = python, peers_python
        self._timeout_s = timeout_s
        self._processes: dict[str, Process] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Start the processes side by side, and find which of them can run."""
        failed: dict[str, str] = {}
        for module, apart in {
            contestant.module: contestant.apart for contestant in self._contestants
        }.items():
            python = self._peers_python if apart else self._python
            if python is None:
                failed[module] = "there is no environment for the peers: make bench-env"
            else:
                self._start(module, python)
        for module, process in list(self._processes.items()):
            try:
                self.versions |= process.versions()
            except Failed as exc:
                failed[module] = str(exc)
        self.unavailable = {c.key: failed[c.module] for c in self._contestants if c.module in failed}
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def ready(self) -> list[Contestant]:
        """Those that run here."""
        return [contestant for contestant in self._contestants if contestant.key not in self.unavailable]

    def run(
        self, contestant: Contestant, source: Source, cache: Cache, *, check: bool = False
    ) -> dict[str, Any]:
        """Let one contestant load once.

        Raises:
            Failed: it did not, or what it delivered is not what was written.
        """
        options = {**self.defaults.get(contestant.key, {}), **contestant.options}
        if check:
            options |= contestant.check_options
        try:
            result = self._processes[contestant.module].ask(
                {
                    "source": _plain(source),
                    "warm_up": _plain(self.warm_up),
                    "cache": cache,
                    "options": options,
                    "check": check,
                }
            )
        except Failed:
            if self._processes[contestant.module].ended:
                self._start(contestant.module, self._python_of(contestant))
                self._processes[contestant.module].versions()
            raise
        if result["bytes"] < source.payload_bytes or (check and result["digest"] != source.digest):
            raise Failed("it delivered other bytes than were written")
        return result

    def check(self, contestants: Sequence[Contestant], source: Source) -> dict[str, str]:
        """Let each load once and compare every byte; return why some are out, by key."""
        out: dict[str, str] = {}
        for contestant in contestants:
            try:
                self.run(contestant, source, "warm", check=True)
            except Failed as exc:
                out[contestant.key] = str(exc)
        return out

    def run_rounds(
        self, contestants: Sequence[Contestant], source: Source, cache: Cache, repeats: int
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
        """Let them take turns; return the results of every run, and why some did not finish."""
        results: dict[str, list[dict[str, Any]]] = {contestant.key: [] for contestant in contestants}
        out: dict[str, str] = {}
        for contestant in rounds(contestants, repeats):
            if contestant.key not in out:
                try:
                    results[contestant.key].append(self.run(contestant, source, cache))
                except Failed as exc:
                    out[contestant.key] = str(exc)
        return {key: runs for key, runs in results.items() if key not in out}, out

    def _python_of(self, contestant: Contestant) -> Path:
        python = self._peers_python if contestant.apart else self._python
        assert python is not None, f"{contestant.key} runs without an interpreter"
        return python

    def _start(self, module: str, python: Path) -> None:
        process = Process(
            [str(python), "-m", "benchmarks.child", f"benchmarks.peers.{module}"],
            environment={"OPENBLAS_NUM_THREADS": "1"},
            timeout_s=self._timeout_s,
        )
        self._processes[module] = self._stack.enter_context(process)


def _plain(source: Source) -> dict[str, Any]:
    return {**asdict(source), "directory": str(source.directory)}
