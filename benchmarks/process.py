"""A contestant in a process of its own, which is sent lines of JSON and answers with lines of JSON."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

__all__ = ["Failed", "Process"]

_ROOT = Path(__file__).parent.parent


class Failed(Exception):
    """A contestant that could not be started or did not finish a run; the message is the reason."""


class Process:
    """A process and its forks, from the moment it was made to `close`.

    Args:
        command: What to run, in the project's folder; an answer is a line of JSON on standard output.
        environment: Variables that are added to those of this process.
        timeout_s: The longest that an answer may take; then the process is closed.
    """

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._buffer = b""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self._process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env={**os.environ, **environment, "PYTHONWARNINGS": "ignore"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def versions(self) -> dict[str, str]:
        """Wait for the first answer, which comes when its imports are done, and return the versions in it.

        Raises:
            Failed: they cannot be imported.
        """
        versions: dict[str, str] = self.first()["versions"]
        return versions

    def first(self) -> dict[str, Any]:
        """Wait for the first answer, which comes without a request.

        Raises:
            Failed: the process could not begin.
        """
        return self._answer()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises:
            Failed: the run failed or took too long; after the latter the process is closed.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(dict(request)).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as exc:
            raise Failed(f"its process ended: {self._last_line()}") from exc
        return self._answer()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the process has ended, and its forks with it."""
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
                raise Failed(f"its process ended: {self._last_line()}")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _last_line(self) -> str:
        """The last line that it wrote to standard error."""
        if self._log.closed:
            return "it was closed"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip()[:300] if lines else "it said nothing"
