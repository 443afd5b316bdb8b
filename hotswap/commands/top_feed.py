"""What `hotswap top` knows of a fleet, over HTTP."""

from __future__ import annotations

import http.client
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import quote, urlsplit

from hotswap.config.reading import secret_of
from hotswap.errors import ConfigError

__all__ = ["Feed", "FleetPicture", "ServerLost", "key_of"]

Row = Mapping[str, Any]

# Seconds after which a server that says nothing counts as lost.
TIMEOUT_S = 5.0
# Over so many seconds the rate of tokens is smoothed.
SMOOTHING_S = 2.5
NUM_SWAPS = 12


class ServerLost(ConfigError):
    """The server does not answer, or not as a door of hotswap does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPicture:
    """A fleet at loop time `now_s`, as `/admin/summary` tells it.

    Attributes:
        now_s: The server's loop time.
        is_open: Whether it admits requests.
        num_running: Requests on instances.
        num_waiting: Requests in the queue.
        tokens_per_s: Of all models.
        instances: By id.
        models: By id.
        tiers: The fastest first.
        swaps: The records of the last ones, oldest first.
        rates: Tokens a second by model.
    """

    now_s: float
    is_open: bool
    num_running: int
    num_waiting: int
    tokens_per_s: float
    instances: Sequence[Row]
    models: Sequence[Row]
    tiers: Sequence[Row]
    swaps: Sequence[Row]
    rates: Mapping[str, float] = field(default_factory=dict[str, float])


def key_of(given: str | None) -> str:
    """Return the key that an argument gives or refers to; without one that of the variable HOTSWAP_KEY."""
    if given is None:
        return os.environ.get("HOTSWAP_KEY", "")
    return secret_of(given, "--key") if given.startswith(("env:", "file:")) else given


class Feed:
    """Looks at a server again and again, over one connection; for one thread.

    Args:
        url: Where a door is: `http://host:port`, with a path if it is mounted under one.
        key: The key of an operator, "" for none.

    Raises:
        ConfigError: the address cannot be one.
    """

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(f"{url!r} is no address of a server; give one such as http://127.0.0.1:8000.")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._connection = kind(host, port, timeout=TIMEOUT_S)
        path = parts.path.rstrip("/")
        self._path = path.removesuffix("/ui").removesuffix("/v1")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._version = ""
        self._instances: dict[str, Row] = {}
        self._models: dict[str, Row] = {}
        self._rates: dict[str, float] = {}
        self._now_s = 0.0

    def look(self) -> FleetPicture:
        """Return the fleet as it is now.

        Raises:
            ServerLost: the server does not answer; it may be asked again.
            ConfigError: the server refuses the key.
        """
        found = self._get(f"/admin/summary?since={quote(self._version)}")
        swaps = self._get(f"/admin/swaps?last={NUM_SWAPS}")
        try:
            self._take(found)
            return FleetPicture(
                now_s=found["now_s"],
                is_open=found["is_open"],
                num_running=found["num_running"],
                num_waiting=found["num_waiting"],
                tokens_per_s=sum(self._rates.values()),
                instances=[self._instances[key] for key in sorted(self._instances)],
                models=[self._models[key] for key in sorted(self._models)],
                tiers=found["tiers"],
                swaps=swaps["data"],
                rates=dict(self._rates),
            )
        except (KeyError, TypeError) as exc:
            raise ServerLost(f"{self.url} does not answer as hotswap does; give its address.") from exc

    def _take(self, found: Row) -> None:
        if found["whole"]:
            self._instances, self._models, self._rates = {}, {}, {}
        else:
            self._note_rates(found["models"], found["now_s"] - self._now_s)
        for rows, name in ((self._instances, "instances"), (self._models, "models")):
            for gone in found[f"gone_{name}"]:
                rows.pop(gone, None)
            rows.update({row["id"]: row for row in found[name]})
        self._version, self._now_s = found["version"], found["now_s"]

    def _note_rates(self, changed: Sequence[Row], seconds: float) -> None:
        if seconds <= 0.0:
            return
        old = math.exp(-seconds / SMOOTHING_S)
        given = {
            row["id"]: row["num_tokens"] - self._models.get(row["id"], row)["num_tokens"] for row in changed
        }
        rates = {
            model: old * self._rates.get(model, 0.0) + (1 - old) * max(0, given.get(model, 0)) / seconds
            for model in self._rates.keys() | given.keys()
        }
        self._rates = {model: rate for model, rate in rates.items() if rate > 0.05}

    def _get(self, path: str) -> dict[str, Any]:
        try:
            self._connection.request("GET", f"{self._path}{path}", headers=self._headers)
            answer = self._connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as exc:
            self._connection.close()
            what = str(exc) or type(exc).__name__
            raise ServerLost(
                f"{self.url} does not answer ({what}). Is `hotswap serve` running there?"
            ) from exc
        try:
            value: Any = json.loads(body)
        except ValueError:
            value = None
        if answer.status != 200:
            raise self._refusal(answer.status, value)
        return cast("dict[str, Any]", value)

    def _refusal(self, status: int, value: Any) -> ConfigError:
        try:
            message = str(value["error"]["message"])
        except (KeyError, TypeError):
            message = f"it answers with status {status}."
        if status in (401, 403):
            return ConfigError(f"{self.url} refuses the key: {message} Give --key, or set HOTSWAP_KEY.")
        return ServerLost(f"{self.url} does not show a fleet: {message}")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
