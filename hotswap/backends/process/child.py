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
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from hotswap.backends.process.serving import ServeEngine
from hotswap.backends.transports import connect_shared
from hotswap.errors import InstanceLost
from hotswap.transport import Channel

__all__ = ["Child"]

log = logging.getLogger("hotswap")

_PROGRAM = str(Path(__file__).with_name("program.py"))
_LONGEST_LINE = 1 << 16


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
        """Have the process end, and kill it if it has not after `end_s`.

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
        await process.aclose()

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
            output = BufferedByteReceiveStream(self.process.stdout)
            answer = json.loads(await output.receive_until(b"\n", _LONGEST_LINE))
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError, OSError):
            answer = {"error": await self.ending()}
        if "error" in answer:
            raise InstanceLost(
                f"The process of engine {self.task.name!r} did not start: "
                f"{str(answer['error']).rstrip('.')}; its output says more."
            )
