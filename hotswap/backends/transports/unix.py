"""Unix sockets that processes of one user share: a private directory, and the user of the other end."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from hotswap.backends.transports.link_errors import ProtocolError
from hotswap.errors import ConfigError

__all__ = ["check_same_user", "listening_at"]

_CREDENTIALS = struct.Struct("=iII")  # process, user, group; as `struct ucred`


def check_same_user(connected: socket.socket) -> None:
    """Refuse the other end of a Unix socket if it is another user's process, where the system tells.

    Raises:
        ProtocolError: it is.
        OSError: the socket is not connected.
    """
    if hasattr(socket, "SO_PEERCRED"):
        told = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        process, user, _ = _CREDENTIALS.unpack(told)
        if user != os.geteuid():
            raise ProtocolError(
                f"the process at the other end ({process}) is of user {user}, not of {os.geteuid()}"
            )


@contextmanager
def listening_at(path: str, backlog: int) -> Generator[socket.socket]:
    """Listen at a path, which is removed afterwards unless another process has taken it over.

    Raises:
        ConfigError: other users may use the directory of the path, or it cannot be listened at.
    """
    _private_directory(Path(path).absolute().parent)
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.setblocking(False)
        try:
            listener.bind(path)
        except OSError as exc:
            raise ConfigError(
                f"{path!r} cannot be listened at: {exc.strerror or exc}. Remove what is there, or choose "
                "another path; it may have 107 bytes."
            ) from exc
        mine = os.stat(path).st_ino
        try:
            os.chmod(path, 0o600)  # no client can connect before `listen`
            listener.listen(backlog)
            yield listener
        finally:
            with suppress(FileNotFoundError):
                if os.stat(path).st_ino == mine:
                    os.unlink(path)


def _private_directory(directory: Path) -> None:
    """Make a directory of this user alone, or check that it is one."""
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = directory.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{str(directory)!r} is open to other users (mode {stat.S_IMODE(status.st_mode):o} of user "
            f"{status.st_uid}), so a Unix socket in it is not safe. Name a directory of your own, with "
            "`chmod 700`, or one that does not exist: it is made."
        )
