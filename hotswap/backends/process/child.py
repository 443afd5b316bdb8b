"""A child process that serves an engine: its start, its links, and its end."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio.abc import ByteReceiveStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream

from hotswap.backends.process.serving import ServeEngine
from hotswap.backends.transports import connect_shared
from hotswap.errors import InstanceLost
from hotswap.transport import Channel

__all__ = ["Child"]

log = logging.getLogger("hotswap")

_PROGRAM = str(Path(__file__).with_name("program.py"))
_LONGEST_LINE = 1 << 16
_LAST_LINE_S = 0.5  # for a line that the process has written before its end


@dataclass(slots=True, eq=False, kw_only=True)
class Child:
    """A process that serves one engine until it is stopped; it ends with this one, even if that is killed.

    Attributes:
        task: What it does.
        process: The process.
    """

    task: ServeEngine
    process: Process

    @classmethod
    async def start(
        cls, task: ServeEngine, pickled: bytes, *, env: Mapping[str, str], cpus: Sequence[int]
    ) -> Child:
        """Start a process, and return once its engine is served. A cancellation kills it.

        Raises:
            InstanceLost: it ended before, with the reason.
        """
        process = await anyio.open_process(
            [sys.executable, "-P", _PROGRAM],
            stderr=None,
            env={**os.environ, **env},
            start_new_session=True,  # Ctrl-C interrupts this process only
        )
        child = cls(task=task, process=process)
        try:
            await child._begin(pickled, cpus)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await child.stop(end_s=0.0)
            raise
        return child

    async def connect(self) -> Channel:
        """Open a link to the engine.

        Raises:
            MigrationAborted: it cannot be reached.
        """
        return await connect_shared(self.task.path)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self.process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process is known to have ended."""
        return self.process.returncode is not None

    async def ending(self) -> str:
        """Wait until the process has ended, and say how."""
        code = await self.process.wait()
        if code >= 0:
            return f"its process ended with exit code {code}"
        names = {int(known): known.name for known in signal.Signals}
        return f"its process was ended by {names.get(-code, f'signal {-code}')}"

    async def stop(self, *, end_s: float) -> None:
        """Have the process end, and kill it if it has not after `end_s`; also what it has started and left.

        Call it where it cannot be cancelled.
        """
        process = self.process
        if end_s and process.returncode is None and process.stdin is not None:
            with anyio.move_on_after(end_s):
                await process.stdin.aclose()
                await process.wait()
        if process.returncode is None:
            if end_s:
                log.warning(
                    "The process of engine %r did not end in %g s and is killed.", self.task.name, end_s
                )
            with suppress(ProcessLookupError):
                process.kill()
        await process.wait()
        self._kill_group()
        await process.aclose()

    def _kill_group(self) -> None:
        """Kill what is left of the group of the process, which has ended; no other has the group's number."""
        if sys.platform == "linux" and not Path(f"/proc/{self.pid}").exists():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _begin(self, pickled: bytes, cpus: Sequence[int]) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        given = {
            "parent": os.getpid(),
            "cpus": tuple(cpus),
            "path": [path or os.getcwd() for path in sys.path],
        }
        try:
            await self.process.stdin.send(pickle.dumps({**given, "task": pickled}))
        except (anyio.BrokenResourceError, OSError):
            line = b""
        else:
            line = await self._first_line(self.process.stdout)
        answer = json.loads(line) if line else {"error": await self.ending()}
        if "error" in answer:
            raise InstanceLost(
                f"The process of engine {self.task.name!r} did not start: "
                f"{str(answer['error']).rstrip('.')}; its output says more."
            )

    async def _first_line(self, output: ByteReceiveStream) -> bytes:
        """Return the first line that the process writes; none if it ends before, its output open or not."""
        line = b""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._cancel_at_end, tasks.cancel_scope)
            with suppress(anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError):
                line = await BufferedByteReceiveStream(output).receive_until(b"\n", _LONGEST_LINE)
            tasks.cancel_scope.cancel()
        return line

    async def _cancel_at_end(self, scope: anyio.CancelScope) -> None:
        await self.process.wait()
        await anyio.sleep(_LAST_LINE_S)
        scope.cancel()
