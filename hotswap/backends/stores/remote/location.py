"""The URL of a remote store, without credentials, and its connection options."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from obstore import exceptions, store

from hotswap.errors import ConfigError

__all__ = ["Location"]

# No limit on a whole transfer: `objects` watches whether bytes arrive.
_A_DAY = "86400s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A URL without credentials, and the options to open it with, which may have some."""

    url: str
    scheme: str
    options: Mapping[str, Any]
    client_options: Mapping[str, Any]

    @classmethod
    def of(cls, url: str, options: Mapping[str, Any], client_options: Mapping[str, Any]) -> Location:
        """Parse a URL; a name and password in it become a header.

        Raises:
            ConfigError: it has a query, or a password in a scheme without passwords. The message does not
                contain it.
        """
        parts = urlsplit(url)
        web = parts.scheme in ("http", "https")
        if parts.query or parts.fragment or (parts.password is not None and not web):
            raise ConfigError(
                f"The URL of a remote store at {parts.hostname!r} has more than a location. "
                "Give keys and tokens as `options`, or by the environment of the process."
            )
        client: dict[str, Any] = {"timeout": _A_DAY}
        if parts.scheme == "http" or str(options.get("endpoint", "")).startswith("http://"):
            client["allow_http"] = True
        if web and parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            client["default_headers"] = {"authorization": f"Basic {b64encode(user.encode()).decode()}"}
            parts = parts._replace(netloc=parts.netloc.rpartition("@")[2])
        return cls(
            url=parts.geturl().rstrip("/"),
            scheme=parts.scheme,
            options=options,
            client_options={**client, **client_options},
        )

    @property
    def has_attributes(self) -> bool:
        """Whether objects can have user-defined attributes; files and plain HTTP cannot."""
        return self.scheme not in ("file", "memory", "http", "https")

    def open(self, *, writing: bool = False) -> store.ObjectStore:
        """Return obstore's store for this location.

        The library retries writes only; `objects` retries reads.

        Raises:
            ConfigError: the library knows no such kind of URL, or no such option.
        """
        arguments: dict[str, Any] = {"config": dict(self.options)} if self.options else {}
        if self.scheme not in ("file", "memory"):
            arguments["client_options"] = dict(self.client_options)
            arguments |= {} if writing else {"retry_config": {"max_retries": 0}}
        try:
            return store.from_url(self.url + "/", **arguments)
        except (exceptions.BaseError, ValueError, TypeError) as exc:
            reason = str(exc).partition("\n")[0]
            raise ConfigError(
                f"No remote store can be opened at {self.url!r}: {reason} "
                "Give a URL such as 's3://bucket/path' or 'https://host/path', and options of its kind."
            ) from None  # the library's message repeats all its arguments
