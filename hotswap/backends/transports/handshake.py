"""What the two ends of a TCP connection say before the first frame: each proves that it has the secret.

    server -> client    challenge    a nonce, and whether there is a secret
    client -> server    hello        a nonce, and the client's proof
    server -> client    welcome      the server's proof

The client sends the first bytes of its hello without waiting: a server with TLS, which waits for its client,
sees by them that this one has none, and answers with an alert of TLS.

A proof is an HMAC-SHA256 of both nonces and of the role of the end, so the secret is never sent, and a proof
is of no use on another connection or in the other direction. The server proves itself to clients with the
secret alone. Messages have a fixed length of at most 70 bytes. Without a secret the same is said with an
empty one.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from dataclasses import dataclass, field
from typing import cast

from anyio import EndOfStream
from anyio.abc import ByteStream

from hotswap.backends.transports.link_errors import ProtocolError
from hotswap.errors import ConfigError

__all__ = ["TLS_ALERT", "LinkSecret", "authenticate_client", "authenticate_server", "check_secret"]

# What a server with TLS tells a client without: a fatal alert, "handshake failure" (RFC 8446, 6.2).
TLS_ALERT = b"\x15\x03\x03\x00\x02\x02\x28"
# How alerts (to a client) and hellos (to a server) of TLS begin, and what was called without TLS.
_TLS_LACKS = {b"\x15\x03": "connect_tcp", b"\x16\x03": "serve_tcp"}

_MAGIC, _VERSION = b"HSHS", 1
_NONCE_BYTES = _PROOF_BYTES = 32
_START = struct.Struct("!4sH")
_CHALLENGE = struct.Struct(f"!?{_NONCE_BYTES}s")  # after the start, like the next
_HELLO = struct.Struct(f"!{_NONCE_BYTES}s{_PROOF_BYTES}s")
_MIN_SECRET_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class LinkSecret:
    """The secret that both ends of a TCP link have; no `repr`, log line or error shows it.

    Make one by `secrets.token_hex(32)`, and give it to both processes in a file that others cannot read. One
    that can be guessed is found by trying, from a recorded connection.

    Args:
        key: At least 16 bytes; all of them count, a newline at the end too.

    Raises:
        ConfigError: it is no bytes, or too short.
    """

    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        given = cast("object", self.key)
        if not isinstance(given, bytes) or len(given) < _MIN_SECRET_BYTES:
            raise ConfigError(
                f"The secret of a link is no bytes, or fewer than {_MIN_SECRET_BYTES}. Make one by "
                "`python -c 'import secrets; print(secrets.token_hex(32))'`."
            )


def check_secret(secret: object) -> None:
    """Raise `ConfigError` unless `secret` is a secret of links, or `None`."""
    if secret is not None and not isinstance(secret, LinkSecret):
        raise ConfigError("The secret of a link is no LinkSecret; give secret=LinkSecret(...), or None.")


async def authenticate_client(stream: ByteStream, secret: LinkSecret | None) -> None:
    """Ask a client for its proof, check it, and answer with the server's.

    Raises:
        ProtocolError: the client has another secret or none, or does not speak this protocol.
        EndOfStream: it has left.
    """
    mine = secrets.token_bytes(_NONCE_BYTES)
    await stream.send(_START.pack(_MAGIC, _VERSION) + _CHALLENGE.pack(secret is not None, mine))
    theirs, proof = _HELLO.unpack(await _read_message(stream, _HELLO.size))
    if not hmac.compare_digest(proof, _proof(secret, b"client", mine, theirs)):
        raise ProtocolError("it did not prove that it has the secret of this server")
    await stream.send(_proof(secret, b"server", mine, theirs))


async def authenticate_server(stream: ByteStream, secret: LinkSecret | None) -> None:
    """Prove to a server that this end has the secret, and check the server's proof.

    Raises:
        ProtocolError: the server has another secret or none, or does not speak this protocol.
        EndOfStream, BrokenResourceError: it has closed the connection at once, as one does that has too many.
    """
    await stream.send(_START.pack(_MAGIC, _VERSION))
    has_secret, theirs = _CHALLENGE.unpack(await _read_message(stream, _CHALLENGE.size))
    if has_secret and secret is None:
        raise ProtocolError("it asks for a secret: give connect_tcp the secret of the server")
    if secret is not None and not has_secret:
        raise ProtocolError("it has no secret, and this end has one: give serve_tcp the same")
    mine = secrets.token_bytes(_NONCE_BYTES)
    await stream.send(_HELLO.pack(mine, _proof(secret, b"client", theirs, mine)))
    try:
        proof = await _read(stream, _PROOF_BYTES)
    except EndOfStream:
        raise ProtocolError("it did not accept this end's proof: give both ends the same secret") from None
    if not hmac.compare_digest(proof, _proof(secret, b"server", theirs, mine)):
        raise ProtocolError("it did not prove that it has the secret: give both ends the same, or stop it")


def _proof(secret: LinkSecret | None, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    # The parts have fixed lengths, so no two connections have the same text.
    text = _START.pack(_MAGIC, _VERSION) + role + server_nonce + client_nonce
    return hmac.digest(b"" if secret is None else secret.key, text, "sha256")


async def _read_message(stream: ByteStream, size_bytes: int) -> bytes:
    """Read the start of a message, check it, and return so many bytes after it."""
    _check_start(await _read(stream, _START.size))
    return await _read(stream, size_bytes)


def _check_start(start: bytes) -> None:
    magic, version = _START.unpack(start)
    if lacks := _TLS_LACKS.get(start[:2]):
        raise ProtocolError(f"it speaks TLS, and this end does not: give {lacks} an `ssl_context`")
    if magic != _MAGIC:
        raise ProtocolError(f"{start!r} was received in the place of a handshake")
    if version != _VERSION:
        raise ProtocolError(f"its handshake is of version {version}, that of this end {_VERSION}")


async def _read(stream: ByteStream, size_bytes: int) -> bytes:
    """Read so many bytes and none beyond."""
    data = b""
    while len(data) < size_bytes:
        data += await stream.receive(size_bytes - len(data))
    return data
