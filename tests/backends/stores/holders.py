"""Processes that hold the lock of a file or a directory, for tests of waits for locks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HOLD = """
import fcntl, os, sys
path, user = sys.argv[1:]
os.setuid(int(user))
fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)
print(flush=True)
input()
"""


@contextmanager
def held(path: Path, *, user: int | None = None) -> Iterator[int]:
    """Have another process lock `path` exclusively, and stop it; yield its number. `user` is its user's."""
    command = [sys.executable, "-c", _HOLD, str(path), str(os.getuid() if user is None else user)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n", "the lock was not taken"
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            yield process.pid
        finally:
            process.kill()
