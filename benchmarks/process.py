"""The other end of `benchmarks.child`: starts a contestant's process and asks it for runs."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from benchmarks.timed_run import Cache, Source

__all__ = ["Failed", "Process"]

_ROOT = Path(__file__).parent.parent


class Failed(Exception):
    """A contestant that could not be started or did not finish a run; the message is the reason."""


class Process:
    """A contestant's process and its forks, from the moment it was made to `close`."""

    def __init__(self, python: Path, module: str, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._buffer = b""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self._process = subprocess.Popen(
            [str(python), "-m", "benchmarks.child", module],
            cwd=_ROOT,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ready(self) -> dict[str, str]:
        """Wait until its imports are done, and return the versions it measures.

        Raises:
            Failed: they cannot be imported.
        """
        versions: dict[str, str] = self._answer()["versions"]
        return versions

    def run(
        self, source: Source, warm_up: Source, *, cache: Cache, options: Mapping[str, Any], check: bool
    ) -> dict[str, Any]:
        """Load `source` once in a fresh process and return what `TimedRun` noted.

        Raises:
            Failed: the run failed or took too long; after the latter the process is gone.
        """
        request = {
            "source": _plain(source),
            "warm_up": _plain(warm_up),
            "cache": cache,
            "options": dict(options),
            "check": check,
        }
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as exc:
            raise Failed("its process is gone") from exc
        return self._answer()

    @property
    def ended(self) -> bool:
        """Whether the process is gone, and its forks with it."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process and what it forked."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def _answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._line())
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([fd], [], [], self._timeout_s)[0]:
                self.close()
                raise Failed(f"no answer within {self._timeout_s:g} s")
            piece = os.read(fd, 1 << 16)
            if not piece:
                raise Failed(f"its process ended: {self._last_words()}")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it said nothing"


def _plain(source: Source) -> dict[str, Any]:
    return {**asdict(source), "directory": str(source.directory)}
