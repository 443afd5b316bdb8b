"""Where ranks of several machines find each other: a rendezvous, and the network interface of an address."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import sys
import tempfile
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import FileStore, Store, TCPStore

__all__ = ["Rendezvous", "interface_of", "store_at"]

_TCP = "tcp://"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_ADDRESS_AT, _REQUEST_BYTES = 20, 256  # in `struct ifreq`: a name of 16 bytes, family and port


class Rendezvous:
    """Where the ranks of an engine find each other once: a file, or a port of this machine.

    Args:
        address: The address of the port, which nothing authenticates; "" for a file.
        num_ranks: The number of ranks.
        timeout_s: How long a rank waits for the others.

    Attributes:
        place: For `store_at`, in the processes of ranks.
    """

    def __init__(self, address: str, num_ranks: int, timeout_s: float) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._store: TCPStore | None = None
        if not address:
            self._folder = tempfile.TemporaryDirectory(prefix="hotswap-ranks-")
            self.place = str(Path(self._folder.name) / "rendezvous")
            return
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        port = int(listener.getsockname()[1])
        self._store = TCPStore(
            address, port, num_ranks, True, timedelta(seconds=timeout_s), False,
            master_listen_fd=listener.detach(),  # of this address alone
        )  # fmt: skip
        self.place = f"{_TCP}{port}/{address}"

    def close(self) -> None:
        """Remove the file, or close the port."""
        self._store = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def store_at(place: str, num_ranks: int, timeout_s: float) -> Store:
    """Return the store of a rendezvous, in the process of a rank."""
    if not place.startswith(_TCP):
        return FileStore(place, num_ranks)
    port, _, address = place.removeprefix(_TCP).partition("/")
    return TCPStore(address, int(port), num_ranks, False, timedelta(seconds=timeout_s), False)


def interface_of(address: str) -> str | None:
    """Return the network interface that has an address of this machine; `None` if that cannot be told."""
    if sys.platform != "linux":
        return None
    known = ipaddress.ip_address(address)
    if known.is_loopback:
        return "lo"
    if known.version == 6:
        return _ipv6_interfaces().get(known)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                request = struct.pack(f"{_REQUEST_BYTES}s", name.encode()[:15])
                found = fcntl.ioctl(any_socket.fileno(), _GET_ADDRESS, request)
                if socket.inet_ntoa(found[_ADDRESS_AT : _ADDRESS_AT + 4]) == str(known):
                    return name
    return None


def _ipv6_interfaces() -> dict[ipaddress.IPv6Address | ipaddress.IPv4Address, str]:
    found = dict[ipaddress.IPv6Address | ipaddress.IPv4Address, str]()
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            found[ipaddress.IPv6Address(bytes.fromhex(digits))] = name
    return found
