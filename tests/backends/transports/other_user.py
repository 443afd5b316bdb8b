"""A process of another user at one end of a shared link: `python -m ... USER WORK PATH`, started by root."""

from __future__ import annotations

import os
import socket
import sys

import anyio

from hotswap.backends.transports.shared import _offer
from hotswap.errors import MigrationAborted
from tests.backends.transports.child import say
from tests.backends.transports.strangers import move


async def plant(path: str) -> None:
    """Move blocks to the server at a path, without a look at its user; say what became of it."""
    with socket.socket(socket.AF_UNIX) as connected:
        try:
            connected.connect(path)
            connected.setblocking(False)
            async with _offer(connected, 1 << 16, stall_s=30) as channel:
                await move(channel)
        except PermissionError:
            say("not connected")
        except (MigrationAborted, BrokenPipeError):
            say("disconnected")
        else:
            say("moved")


async def listen(path: str) -> None:
    """Listen at a path; say when, and then what the first client offers."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        say("ready")
        with listener.accept()[0] as connected:
            hello, files, _, _ = socket.recv_fds(connected, 100, 3)
            say(f"{len(hello)} bytes and {len(files)} files")


async def main(user: int, work: str, path: str) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)  # after the imports: what is imported may be readable for root alone
    await {"plant": plant, "listen": listen}[work](path)


if __name__ == "__main__":
    anyio.run(main, int(sys.argv[1]), sys.argv[2], sys.argv[3])
