"""Connections that say nothing: `python -m ... PORT NUMBER ADDRESSES`; ends with its standard input."""

from __future__ import annotations

import resource
import socket
import sys
from contextlib import suppress

BATCH = 500  # connections that wait to be accepted, fewer than a listener holds


def main(port: int, number: int, num_addresses: int) -> None:
    """Open connections from as many addresses of loopback, and hold each, be it closed or not."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held: list[socket.socket] = []
    for first in range(0, number, BATCH):
        for at in range(first, min(first + BATCH, number)):
            source = f"127.0.1.{1 + at % num_addresses}", 0
            held.append(socket.create_connection(("127.0.0.1", port), source_address=source))
        for connected in held[first:]:
            with suppress(ConnectionResetError):
                connected.recv(1)  # once it is accepted, there is a byte or an end
    sys.stdout.write(f"{len(held)}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
