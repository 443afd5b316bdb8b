"""The messages between a `StoreHost` and those who ask it: JSON, with weights and files as payloads.

    manifest, prefetch, drop            `done`, with the view after it; an index is its payload
    files                               `done`, with files as its payload
    watch                               `view`, at once and after each change, until the link ends
    offer                               `done`: how far a shard has arrived there, and how many read it there
    read, open                          `begin`, then `chunk` after `chunk`, then `done`

`failed` in the place of an answer has a `StoreError`, `refused` the reason why a peer is to ask elsewhere.
What comes over a link is not trusted: it names no class, and breaks the link if it cannot be read.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import cast

from hotswap.backends.fields import Fields
from hotswap.backends.transports import wire
from hotswap.backends.transports.wire import Message
from hotswap.errors import ShardCorrupt, ShardMissing, StoreBusy, StoreError, TierFull, UnsafeFile
from hotswap.model import Shard
from hotswap.request import ModelId
from hotswap.view import Residency, StoreView, TierView

__all__ = [
    "MAX_CALL_BYTES",
    "failure_of",
    "pack_failure",
    "pack_files",
    "shard_fields",
    "shard_of",
    "unpack_files",
    "view_fields",
    "view_of",
]

MAX_CALL_BYTES = 16 << 10  # of a message that asks for something

_ERRORS: dict[str, type[StoreError]] = {
    "missing": ShardMissing,
    "corrupt": ShardCorrupt,
    "unsafe": UnsafeFile,
    "full": TierFull,
    "busy": StoreBusy,
    "failed": StoreError,
}
_KINDS = {error: kind for kind, error in _ERRORS.items()}


# ---------------------------------------------------------------------- errors


def pack_failure(number: int, error: Exception) -> bytes:
    """Encode an error as an answer."""
    kind = _KINDS.get(type(error), "failed") if isinstance(error, StoreError) else "failed"
    return wire.pack("failed", number, kind=kind, message=str(error))


def failure_of(answer: Message) -> StoreError | None:
    """Return the error of an answer, `None` if it is of another kind.

    Raises:
        ProtocolError: it cannot be read.
    """
    if answer.verb != "failed":
        return None
    with wire.protocol_errors():
        kind, message = answer.fields.text("kind"), answer.fields.text("message")
        if kind not in _ERRORS:
            raise answer.fields.wrong(f"{kind!r} is no kind of error")
        return _ERRORS[kind](message)


# ---------------------------------------------------------------------- values


def shard_fields(shard: Shard) -> dict[str, object]:
    """Return the fields of a shard."""
    return asdict(shard)


def shard_of(message: Message) -> Shard:
    """Decode the shard of a message.

    Raises:
        ProtocolError: it is not valid.
    """
    with wire.protocol_errors():
        fields = message.fields.record("shard")
        return Shard(
            model=ModelId(fields.text("model")),
            rank=fields.size("rank"),
            file=fields.text("file"),
            file_offset_bytes=fields.size("file_offset_bytes"),
            buffer_offset_bytes=fields.size("buffer_offset_bytes"),
            size_bytes=fields.size("size_bytes"),
            checksum=fields.text("checksum"),
        )


def view_fields(view: StoreView) -> dict[str, object]:
    """Return the fields of a view; entries are lists, and name their tier by its place."""
    places = {tier.name: place for place, tier in enumerate(view.tiers)}
    return {
        "tiers": [_tier_fields(tier) for tier in view.tiers],
        "residency": [[e.model, places[e.tier], e.size_bytes] for e in view.residency if e.tier in places],
        "loading": [[e.model, places[e.tier], e.size_bytes] for e in view.loading if e.tier in places],
    }


def view_of(message: Message) -> StoreView:
    """Decode the view of a message.

    Raises:
        ProtocolError: it is not valid.
    """
    with wire.protocol_errors():
        fields = message.fields
        tiers = tuple(map(_tier, fields.records("tiers")))
        names = [tier.name for tier in tiers]
        residency, loading = (
            tuple(_entry(fields, entry, names) for entry in _entries(fields, name))
            for name in ("residency", "loading")
        )
        return StoreView(tiers=tiers, residency=residency, loading=loading)


def _tier_fields(tier: TierView) -> dict[str, object]:
    rate = tier.bytes_per_s
    return {
        "name": tier.name,
        "used_bytes": tier.used_bytes,
        "capacity_bytes": tier.capacity_bytes,
        "bytes_per_s": None if rate == float("inf") else rate,
        "queued_bytes": tier.queued_bytes,
    }


def _tier(fields: Fields) -> TierView:
    rate = fields.get("bytes_per_s")
    if rate is not None and not (type(rate) in (int, float) and isinstance(rate, int | float) and rate > 0):
        raise fields.wrong(f"a tier's bytes_per_s is {rate!r}")
    return TierView(
        name=fields.text("name"),
        used_bytes=fields.size("used_bytes"),
        capacity_bytes=None if fields.get("capacity_bytes") is None else fields.size("capacity_bytes"),
        bytes_per_s=float("inf") if rate is None else float(rate),
        queued_bytes=fields.size("queued_bytes"),
    )


def _entries(fields: Fields, name: str) -> list[object]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise fields.wrong(f"the field {name!r} is {value!r}, which is no list")
    return cast("list[object]", value)


def _entry(fields: Fields, entry: object, tiers: list[str]) -> Residency:
    match entry:
        case [str(model), int(place), int(size_bytes)] if 0 <= place < len(tiers) and size_bytes >= 0:
            return Residency(model=ModelId(model), tier=tiers[place], size_bytes=size_bytes)
        case _:
            raise fields.wrong(f"{entry!r} is no entry of a tier")


# ---------------------------------------------------------------------- small files


def pack_files(files: dict[str, bytes]) -> tuple[list[tuple[str, int]], memoryview]:
    """Return the names and lengths of files, and their content one after the other."""
    return [(name, len(text)) for name, text in files.items()], memoryview(b"".join(files.values()))


def unpack_files(message: Message, payload: memoryview) -> dict[str, bytes]:
    """Decode the files of an answer.

    Raises:
        ProtocolError: it is not valid.
    """
    files: dict[str, bytes] = {}
    at = 0
    with wire.protocol_errors():
        for entry in _entries(message.fields, "files"):
            match entry:
                case [str(name), int(size)] if 0 <= size <= len(payload) - at:
                    files[name], at = bytes(payload[at : at + size]), at + size
                case _:
                    raise message.fields.wrong(f"{entry!r} is no file")
    return files
