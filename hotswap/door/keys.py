"""Who may do what: keys of clients and of operators, the hosts that may be named, and what a key may use."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from hotswap.checks import check_counts, check_priority, check_strings
from hotswap.door.errors import Refusal
from hotswap.door.wire import send_json
from hotswap.errors import ConfigError

__all__ = ["ApiKey", "Guard", "KeyUse", "use_of"]

_USE = "hotswap.key"
_OPEN = frozenset({"/live", "/health", "/ready", "/ui"})
_OPERATORS = ("/admin/", "/metrics")
_LOCAL_NAMES = frozenset({"localhost", "testserver"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key, and what its requests may have.

    Attributes:
        secret: What clients send, as `authorization: Bearer ...` or `x-api-key`.
        name: What logs call it.
        admin: Whether it is an operator's, for whom nothing else here holds.
        models: The models that it may name; `None` for all.
        priority: The highest priority of its requests.
        requests: How many of them may be under way at once; `None` for any number.
    """

    secret: str = field(repr=False)
    name: str = ""
    admin: bool = False
    models: tuple[str, ...] | None = None
    priority: int = 0
    requests: int | None = None

    def __post_init__(self) -> None:
        check_strings(ConfigError, secret=self.secret, name=self.name)
        check_priority(ConfigError, self.priority)
        if not self.secret.isascii() or len(self.secret) < 8:
            raise ConfigError(
                f"The secret of key {self.name!r} is too short; give 8 characters of ASCII or more."
            )
        if self.requests is not None:
            check_counts(ConfigError, 1, requests=self.requests)


class KeyUse:
    """A key with the requests that it has under way; `None` stands for clients without a key.

    Args:
        key: The key.
    """

    def __init__(self, key: ApiKey | None) -> None:
        self.key = key
        self.digest = b"" if key is None else _digest(key.secret.encode())
        self._num_requests = 0

    def may_name(self, model: str) -> bool:
        """Whether requests with it may name a model, adapters of it included."""
        models = None if self.key is None or self.key.admin else self.key.models
        return models is None or model in models

    def check_model(self, model: str) -> None:
        """Raise a `Refusal` unless requests with it may name a model."""
        if not self.may_name(model):
            raise Refusal(
                403,
                f"This key may not use model {model!r}.",
                "model_not_allowed",
                "permission_error",
                "model",
            )

    @contextmanager
    def request(self, model: str, priority: int) -> Generator[None]:
        """Bracket a request of it.

        Raises:
            Refusal: the key may not name the model, give that priority, or have another request under way.
        """
        key = self.key
        if key is not None and not key.admin:
            self.check_model(model)
            if priority > key.priority:
                raise Refusal(
                    403,
                    f"priority is {priority}, and requests of this key may have up to {key.priority}.",
                    "priority_not_allowed",
                    "permission_error",
                    "priority",
                )
            if key.requests is not None and self._num_requests >= key.requests:
                raise Refusal(
                    429,
                    f"This key has {self._num_requests} requests under way, which is all that it may have.",
                    "too_many_requests",
                    "rate_limit_error",
                    headers={"retry-after": "1"},
                )
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1


def use_of(scope: Scope) -> KeyUse:
    """Return the key that a request came with, as its `Guard` has noted."""
    found: object = scope.get(_USE)
    return found if isinstance(found, KeyUse) else KeyUse(None)


class Guard:
    """Lets requests through that have a key where one is needed; an application round another.

    Clients need a key if there are any of clients, operators if there are any of operators; without one of
    these, only this machine may call what is for operators. `/live`, `/health`, `/ready` and `/ui` need none.

    Args:
        app: What is guarded.
        keys: All keys.
        hosts: The names by which the server may be called, against pages elsewhere whose names were made to
            lead here; `None` for any.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey], hosts: Sequence[str] | None) -> None:
        self._app, self._uses = app, [KeyUse(key) for key in keys]
        self._hosts = None if hosts is None else {host.lower() for host in hosts}
        self._has_clients = any(not key.admin for key in keys)
        self._has_operators = any(key.admin for key in keys)
        self._without = KeyUse(None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http":
            try:
                scope[_USE] = self._admit(scope)
            except Refusal as refusal:
                return await send_json(send, refusal.status, refusal.body, refusal.headers)
        return await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> KeyUse:
        headers = dict(scope["headers"])
        host = _name_of(headers.get(b"host", b"").decode("latin-1").lower())
        if self._hosts is not None and host not in self._hosts:
            raise Refusal(421, f"This server is not called {host!r}.", "wrong_host")
        path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in _OPEN:
            return self._without
        use = self._used(headers)
        if path.startswith(_OPERATORS):
            self._check_operator(use, scope)
        elif self._has_clients and use is None:
            raise _unauthorized("client")
        return use or self._without

    def _check_operator(self, use: KeyUse | None, scope: Scope) -> None:
        if not self._has_operators:
            if not _is_local(scope):
                raise Refusal(
                    403,
                    "Without a key for operators, this is for the machine that the server runs on.",
                    "not_local",
                    "permission_error",
                )
        elif use is None:
            raise _unauthorized("operator")
        elif use.key is None or not use.key.admin:
            raise Refusal(403, "This key is no operator's.", "not_an_operator", "permission_error")

    def _used(self, headers: dict[bytes, bytes]) -> KeyUse | None:
        """Return the key of a request; all are compared, in a time that tells nothing of them."""
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        given = given.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        digest = _digest(given)
        found = [use for use in self._uses if hmac.compare_digest(use.digest, digest)]
        return found[0] if found else None


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _unauthorized(whose: str) -> Refusal:
    return Refusal(
        401,
        f"The key is missing or wrong; send that of a{'n' if whose == 'operator' else ''} {whose}.",
        "invalid_api_key",
        "authentication_error",
        headers={"www-authenticate": "Bearer"},
    )


def _name_of(host: str) -> str:
    """The name in a `host` header, without a port."""
    return host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]


def _is_local(scope: Scope) -> bool:
    client: tuple[str, int] | None = scope.get("client")
    if client is None or client[0] in _LOCAL_NAMES:  # a socket of this machine's file system
        return True
    try:
        return ip_address(client[0]).is_loopback
    except ValueError:
        return False
