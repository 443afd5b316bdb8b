"""The program of an engine's process; run as a file, so that it imports nothing before it has its cores.

From its standard input it reads a pickle of its parent: the cores to run on, the path for imports, and a
pickled task. It calls the task with a function that writes a line of JSON to its standard output, and with
its standard input, which is closed when the parent wants the process to end and, by the kernel, when the
parent has ended.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import sys
import threading
from typing import Any

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


class Parent:
    """What the process has of its parent.

    Attributes:
        input: At its end when the parent wants the process to end, or has ended; nothing comes before.
    """

    def __init__(self) -> None:
        # What libraries print goes to the log, and not between the lines that the parent reads.
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.input = sys.stdin.buffer

    def tell(self, **what: object) -> None:
        """Write a line of JSON."""
        self._out.write(json.dumps(what) + "\n")
        self._out.flush()

    def end_after(self, seconds: float) -> None:
        """End the process in any case so long from now on."""
        timer = threading.Timer(seconds, os._exit, (1,))
        timer.daemon = True
        timer.start()


def main() -> None:
    """Do what the parent has sent."""
    parent = Parent()
    given: dict[str, Any] = pickle.load(sys.stdin.buffer)
    if sys.platform == "linux":
        if given["cpus"]:
            os.sched_setaffinity(0, given["cpus"])
        # The parent's thread that made this process ends with its event loop at the latest.
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, int(signal.SIGKILL))
    if os.getppid() != given["parent"]:
        os._exit(0)
    sys.path[:] = given["path"]
    try:
        task = pickle.loads(given["task"])
    except Exception as exc:
        parent.tell(error=f"{type(exc).__name__}: {exc}")
        os._exit(1)
    task(parent)


if __name__ == "__main__":
    main()
