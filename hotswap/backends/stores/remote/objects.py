"""The place of a remote store, and its objects, read through obstore with retries that resume midway.

The library signs and sends the requests of each cloud. Its own retries are off for reads: they would multiply
with these, and cannot tell a stall from a long transfer.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, NoReturn, TypeVar
from urllib.parse import unquote, urlsplit

import anyio
import obstore
from obstore import exceptions, store

from hotswap.errors import ConfigError, ShardCorrupt, ShardMissing, StoreError

__all__ = ["PUSH_AGAIN", "Location", "Objects", "Part", "RetryPolicy", "Version", "mapped_errors", "reason"]


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


PUSH_AGAIN = "Push the model again with `RemoteStore.push(..., replace=True)`."

_T = TypeVar("_T")
_STATUS = re.compile(r"status code: (\d{3}[ A-Za-z-]*)")
_PREAMBLE = re.compile(r"Generic \w+ error: |Error performing \w+ \S+ in \S+ - ")
_ADDRESS = re.compile(r"\S+://\S+")
# The library's messages for a range outside of the object; the size is then checked by another request.
_RANGE_ERROR = re.compile(r"status code: 416|Requested .* got |range was invalid")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Stall limit and retries: up to `retries` further attempts, after pauses with full jitter.

    Source: Brooker, Exponential Backoff And Jitter, AWS Architecture Blog, 2015.
    """

    retries: int = 5
    stall_s: float = 20.0
    backoff_s: float = 0.2
    max_backoff_s: float = 10.0
    random: Random = field(default_factory=Random)

    def pause_s(self, failures: int) -> float:
        """Return a random pause after so many failures; its upper limit doubles each time."""
        return self.random.uniform(0.0, min(self.backoff_s * 2.0 ** (failures - 1), self.max_backoff_s))


class Version:
    """The version of an object that all its parts must have: the first seen, by entity tag and length."""

    def __init__(self, *, least_bytes: int) -> None:
        self._least_bytes = least_bytes
        self._seen: tuple[object, ...] | None = None

    def check(self, meta: obstore.ObjectMeta, url: str) -> None:
        """Raise `ShardCorrupt` if the object is of another version, or ends before `least_bytes`."""
        tag = meta["e_tag"]
        now = (tag if tag is not None else meta["last_modified"], meta["size"])
        if self._seen is None:
            self._seen = now
        if now != self._seen:
            raise ShardCorrupt(
                f"{url!r} was replaced while it was read: it was {self._seen}, it is {now}. "
                "Load the model again; if it was not pushed just now, push it again."
            )
        if meta["size"] < self._least_bytes:
            raise ShardCorrupt(
                f"{url!r} is truncated: it ends at byte {meta['size']}, its index says "
                f"{self._least_bytes}. {PUSH_AGAIN}"
            )


@dataclass(slots=True)
class Part:
    """A range of an object, and the memory it is read into; `done` bytes are read."""

    start: int
    target: memoryview
    done: int = 0

    @property
    def end(self) -> int:
        """The end of the range in the object."""
        return self.start + len(self.target)

    def put(self, piece: bytes) -> None:
        """Copy the next bytes; bytes beyond the range, a fault of the server, are dropped."""
        piece = piece[: len(self.target) - self.done]
        self.target[self.done : self.done + len(piece)] = piece
        self.done += len(piece)


class _Transient(Exception):
    """An attempt failed; the next one may succeed."""


class Objects:
    """The objects below a URL. Every failure is a `StoreError` that names the object, without credentials.

    A body is read in pieces of at least `piece_bytes`; an attempt fails when none has arrived for `stall_s`.
    """

    def __init__(self, location: Location, retry_policy: RetryPolicy, *, piece_bytes: int) -> None:
        self.location = location
        self._store = location.open()
        self._retry_policy = retry_policy
        self._piece_bytes = max(piece_bytes, 1)

    def url(self, path: str) -> str:
        """Return the URL of an object."""
        return f"{self.location.url}/{path}"

    async def read_part(self, path: str, part: Part, version: Version) -> None:
        """Fill the part; each attempt resumes where the last one failed.

        Raises:
            ShardMissing: there is no such object.
            ShardCorrupt: it is too short, or not the version that `version` has seen.
            StoreError: access or ranges are refused, or every attempt failed.
        """
        await self._with_retries(path, partial(self._resume, path, part, version))

    async def read_small(
        self, path: str, *, most_bytes: int, unless: str | None = None
    ) -> tuple[bytes, str | None] | None:
        """Return the content of an object and its entity tag; `None` if the tag is `unless`.

        Raises:
            ShardMissing: there is no such object.
            ShardCorrupt: it is longer than `most_bytes`.
            StoreError: as for `read_part`.
        """
        return await self._with_retries(path, partial(self._read_whole, path, most_bytes, unless))

    # ------------------------------------------------------------------------------------------- attempts

    async def _with_retries(self, path: str, attempt: Callable[[], Awaitable[_T]]) -> _T:
        failures = 0
        while True:
            try:
                return await attempt()
            except _Transient as exc:
                failures += 1
                if failures > self._retry_policy.retries:
                    raise StoreError(
                        f"Reading {self.url(path)!r} failed {failures} times, the last time with: {exc}. "
                        "Check the server and the network, or give more `retries`."
                    ) from None
            await anyio.sleep(self._retry_policy.pause_s(failures))

    async def _resume(self, path: str, part: Part, version: Version) -> None:
        url, start = self.url(path), part.start + part.done
        with self._retryable(url):
            try:
                answer = await self._get(path, {"range": (start, part.end)})
            except exceptions.GenericError as exc:
                if _RANGE_ERROR.search(str(exc)):
                    version.check((await self._get(path, {"head": True})).meta, url)
                raise
        version.check(answer.meta, url)
        await self._receive(url, answer, part)

    async def _receive(self, url: str, answer: obstore.GetResult, part: Part) -> None:
        pieces = answer.stream(min_chunk_size=self._piece_bytes)
        while part.done < len(part.target):
            with self._retryable(url):
                try:
                    piece = await self._within_stall_limit(anext(pieces))
                except StopAsyncIteration:
                    raise _Transient("a body shorter than announced") from None
            part.put(piece)

    async def _read_whole(
        self, path: str, most_bytes: int, unless: str | None
    ) -> tuple[bytes, str | None] | None:
        url = self.url(path)
        with self._retryable(url):
            try:
                answer = await self._get(path, {} if unless is None else {"if_none_match": unless})
            except exceptions.NotModifiedError:
                return None
        size = answer.meta["size"]
        if size > most_bytes:
            raise ShardCorrupt(f"{url!r} is {size} bytes long, over the limit of {most_bytes}. {PUSH_AGAIN}")
        data = bytearray(size)
        await self._receive(url, answer, Part(0, memoryview(data)))
        return bytes(data), answer.meta["e_tag"]

    async def _get(self, path: str, options: obstore.GetOptions) -> obstore.GetResult:
        return await self._within_stall_limit(obstore.get_async(self._store, path, options=options))

    async def _within_stall_limit(self, answer: Awaitable[_T]) -> _T:
        with anyio.fail_after(self._retry_policy.stall_s):
            return await answer

    @contextmanager
    def _retryable(self, url: str) -> Generator[None]:
        """Turn errors that another attempt may not have into `_Transient`."""
        try:
            with mapped_errors(url):
                yield
        except TimeoutError:
            raise _Transient(f"no bytes arrived for {self._retry_policy.stall_s} s") from None
        except (exceptions.BaseError, OSError) as exc:
            raise _Transient(reason(exc)) from None


@contextmanager
def mapped_errors(url: str) -> Generator[None]:
    """Turn the library's permanent errors about an object into a `StoreError`.

    The causes are left out: their text quotes the whole request, whose URL may be signed.
    """
    try:
        yield
    except FileNotFoundError:
        raise ShardMissing(f"There is no object {url!r}. {PUSH_AGAIN}") from None
    except (exceptions.UnauthenticatedError, exceptions.PermissionDeniedError) as exc:
        raise StoreError(
            f"Access to {url!r} was refused: {reason(exc)}. Check the credentials, or whether it exists."
        ) from None
    except (exceptions.NotSupportedError, NotImplementedError) as exc:
        _unsupported(url, exc)


def _unsupported(url: str, exc: Exception) -> NoReturn:
    if "Range" in str(exc):
        raise StoreError(
            f"The server of {url!r} ignores byte ranges and sends the whole object. "
            "Use a server that supports them: any object store, nginx, Caddy."
        ) from None
    raise StoreError(f"The server of {url!r} cannot do it: {reason(exc)}. Use an object store.") from None


def reason(exc: Exception) -> str:
    """The library's message without URLs, which may be signed."""
    text = str(exc)
    if status := _STATUS.search(text):
        return f"the server answered {status[1].strip()}"
    line = _ADDRESS.sub("its URL", _PREAMBLE.sub("", text.partition("\n")[0]))[:200].rstrip(".: ")
    return line or type(exc).__name__
