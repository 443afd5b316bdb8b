"""Who may do what: keys of clients and of operators, the hosts that may be named, and what a key may use."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address

from starlette._utils import get_route_path  # what routes are found by
from starlette.types import ASGIApp, Receive, Scope, Send

from hotswap.checks import check_counts, check_priority, check_strings, shown
from hotswap.door.errors import Refusal
from hotswap.door.wire import send_json
from hotswap.errors import ConfigError, UnknownAdapter, UnknownModel
from hotswap.loop_time import current_time

__all__ = ["ApiKey", "Guard", "KeyRing", "KeyUse", "use_of"]

_USE = "hotswap.key"
_OPEN = frozenset({"/live", "/health", "/ready", "/ui"})
_OPERATORS = (
    "/admin/",
    "/metrics",
    "/models/",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)
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
        tokens_per_minute: How many tokens of prompts and answers they may have in a minute, a minute's worth
            at once; those that are only encoded or decoded count. `None` for any number.
    """

    secret: str = field(repr=False)
    name: str = ""
    admin: bool = False
    models: tuple[str, ...] | None = None
    priority: int = 0
    requests: int | None = None
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        check_strings(ConfigError, secret=self.secret, name=self.name)
        check_priority(ConfigError, self.priority)
        if not self.secret.isascii() or len(self.secret) < 8:
            raise ConfigError(
                f"The secret of key {self.name!r} is too short; give 8 characters of ASCII or more."
            )
        if self.requests is not None:
            check_counts(ConfigError, 1, requests=self.requests)
        if self.tokens_per_minute is not None:
            check_counts(ConfigError, 1, tokens_per_minute=self.tokens_per_minute)


class KeyUse:
    """A key with the requests that it has under way; `None` stands for clients without a key.

    Attributes:
        key: The key.
    """

    def __init__(self, key: ApiKey | None) -> None:
        self.key = key
        self.digest = b"" if key is None else _digest(key.secret.encode())
        self._num_requests = 0
        self._num_spent, self._spent_s = 0.0, 0.0  # tokens that the budget lacks, and when it did

    @property
    def is_restricted(self) -> bool:
        """Whether requests with it may name some models alone."""
        return self.key is not None and not self.key.admin and self.key.models is not None

    def may_name(self, model: str) -> bool:
        """Whether requests with it may name a model, adapters of it included."""
        models = None if self.key is None or self.key.admin else self.key.models
        return models is None or model in models

    def check_model(self, model: str) -> None:
        """Raise a `Refusal` unless requests with it may name a model; it is not told whether there is one."""
        if not self.may_name(model):
            raise _unknown()

    def told(self, error: Exception) -> Exception:
        """Return an error as requests with it are told it: names of other models are not in it."""
        hides = self.is_restricted and isinstance(error, UnknownModel | UnknownAdapter)
        return _unknown() if hides else error

    def check_priority(self, priority: int) -> None:
        """Raise a `Refusal` unless requests with it may have a priority."""
        key = self.key
        if key is not None and not key.admin and priority > key.priority:
            raise Refusal(
                403,
                f"priority is {shown(priority)}, and requests of this key may have up to {key.priority}.",
                "priority_not_allowed",
                "permission_error",
                "priority",
            )

    @contextmanager
    def request(self) -> Generator[None]:
        """Bracket a request of it, from before its body is read.

        Raises:
            Refusal: the key may not have another request under way, or has spent its tokens.
        """
        key = self.key
        if key is not None and not key.admin:
            if key.requests is not None and self._num_requests >= key.requests:
                raise _too_many(
                    f"This key has {self._num_requests} requests under way, which is all that it may have.",
                    1.0,
                )
            if key.tokens_per_minute is not None and (lacking := self._lacking(key.tokens_per_minute)) > 0:
                raise _too_many(
                    f"This key has spent its {key.tokens_per_minute} tokens of a minute.",
                    lacking * 60.0 / key.tokens_per_minute,
                )
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1

    def spend(self, num_tokens: int) -> None:
        """Note the tokens of a request, once it has ended; a request may spend more than there is left."""
        if self.key is not None and self.key.tokens_per_minute is not None:
            self._refill(self.key.tokens_per_minute)
            self._num_spent += num_tokens

    def _lacking(self, tokens_per_minute: int) -> float:
        self._refill(tokens_per_minute)
        return self._num_spent + 1 - tokens_per_minute

    def _refill(self, tokens_per_minute: int) -> None:
        now_s = current_time()
        given = (now_s - self._spent_s) * tokens_per_minute / 60.0
        self._num_spent, self._spent_s = max(0.0, self._num_spent - given), now_s


def use_of(scope: Scope) -> KeyUse:
    """Return the key that a request came with, as its `Guard` has noted."""
    found: object = scope.get(_USE)
    return found if isinstance(found, KeyUse) else KeyUse(None)


class KeyRing:
    """All keys, and the names of a server; `use` others at any time, under which requests go on.

    Args:
        keys: All keys.
        hosts: The names by which the server may be called; `None` for any.
    """

    def __init__(self, keys: Sequence[ApiKey] = (), hosts: Sequence[str] | None = None) -> None:
        self._uses = list[KeyUse]()
        self.use(keys, hosts)

    def use(self, keys: Sequence[ApiKey], hosts: Sequence[str] | None) -> None:
        """Have these keys and names hold from now on; a key that stays keeps what it has used."""
        before, uses = {use.digest: use for use in self._uses}, [KeyUse(key) for key in keys]
        kept = [before.get(use.digest, use) for use in uses]
        for use, key in zip(kept, keys, strict=True):
            use.key = key
        self._uses = kept
        self.hosts = None if hosts is None else {host.lower() for host in hosts}
        self.has_clients = any(not key.admin for key in keys)
        self.has_operators = any(key.admin for key in keys)

    def found(self, secret: bytes) -> KeyUse | None:
        """Return the key of a secret; all are compared, in a time that tells nothing of them."""
        digest = _digest(secret)
        found = [use for use in self._uses if hmac.compare_digest(use.digest, digest)]
        return found[0] if found else None

    def check_client(self, use: KeyUse | None) -> None:
        """Raise a `Refusal` where clients need a key and a request has none."""
        if self.has_clients and (use is None or use.key is None):
            raise _unauthorized("client")


class Guard:
    """Lets requests through that have a key where one is needed; an application round another.

    Clients need a key if there are any of clients, operators if there are any of operators; without one of
    these, only this machine may call what is for operators. `/live`, `/health`, `/ready` and `/ui` need none,
    and tell no names of models without one. Names of the server keep pages elsewhere out, whose names were
    made to lead here.

    Args:
        app: What is guarded.
        ring: The keys and the names.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing) -> None:
        self._app, self._ring = app, ring
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
        if self._ring.hosts is not None and host not in self._ring.hosts:
            raise Refusal(421, f"This server is not called {host!r}.", "wrong_host")
        path = get_route_path(scope)
        use = self._used(headers)
        if path in _OPEN:
            return use or self._without
        if path.startswith(_OPERATORS):
            self._check_operator(use, scope)
        else:
            self._ring.check_client(use)
        return use or self._without

    def _check_operator(self, use: KeyUse | None, scope: Scope) -> None:
        if not self._ring.has_operators:
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
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        given = given.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        return self._ring.found(given)


def _too_many(message: str, after_s: float) -> Refusal:
    milliseconds = max(1, math.ceil(after_s * 1000))
    headers = {"retry-after": str(math.ceil(milliseconds / 1000)), "retry-after-ms": str(milliseconds)}
    return Refusal(429, message, "too_many_requests", "rate_limit_error", headers=headers)


def _unknown() -> Refusal:
    return Refusal(404, "There is no such model for this key.", "model_not_found", param="model")


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
