"""The messages between a remote sink and its server: JSON, with tokens and pages as payloads.

Tokens are sent as 64-bit numbers, pages as they are. Messages are not trusted: none names a class to be made,
and a message that cannot be read raises `ProtocolError`, which breaks the link.
"""

from __future__ import annotations

import json
import re
import sys
from array import array
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from dataclasses import fields as fields_of
from typing import Final, TypeVar, cast

from hotswap.backends.fields import Fields, parse_object
from hotswap.backends.transports.link_errors import ProtocolError
from hotswap.errors import HotswapError, InstanceLost, InvalidRequest, MigrationAborted, StoreError
from hotswap.migration import KVLayout
from hotswap.request import AdapterId, ModelId, Request, RequestId
from hotswap.sampling import Sampling
from hotswap.transport import Channel

__all__ = [
    "MAX_BRACKETS",
    "TOKEN_BYTES",
    "Message",
    "check_brackets",
    "encoded",
    "error_of",
    "layout_fields",
    "layout_of",
    "most_bytes",
    "num_brackets",
    "pack",
    "pack_error",
    "pack_tokens",
    "protocol_errors",
    "request_fields",
    "request_of",
    "size",
    "tokens_of",
    "unpack",
]

_T = TypeVar("_T")

_DEFAULTS: Final = {field.name: getattr(Sampling(), field.name) for field in fields_of(Sampling)}

TOKEN_BYTES = 8
_VERSION = 5
# JSON of a megabyte may be half a million lists, which take a tenth of a second to make.
MAX_BRACKETS = 1 << 15
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"')


@dataclass(frozen=True, slots=True)
class Message:
    """One message: its `verb`, the `number` of the call or answer, and its other fields."""

    verb: str
    number: int
    fields: Fields


@contextmanager
def protocol_errors() -> Generator[None]:
    """Turn errors of reading a message into `ProtocolError`."""
    try:
        yield
    except (StoreError, InvalidRequest) as exc:
        raise ProtocolError(f"a message cannot be read ({exc})") from exc


def pack(verb: str, number: int, **fields: object) -> bytes:
    """Encode a message."""
    return encoded({"version": _VERSION, "verb": verb, "number": number, **fields})


def unpack(message: bytes) -> Message:
    """Decode a message.

    Raises:
        ProtocolError: it is not valid.
    """
    check_brackets(message)
    with protocol_errors():
        fields = parse_object(message, "a message", remedy="Use one version of hotswap at both ends.")
        if fields.get("version") != _VERSION:
            raise fields.wrong(
                f"the other end speaks version {str(fields.get('version'))[:40]}, this one {_VERSION}"
            )
        return Message(fields.text("verb"), fields.size("number"), fields)


def encoded(value: object) -> bytes:
    """Return JSON that `check_brackets` takes, unless the value itself has too many lists."""
    message = _ENCODER.encode(value).encode()
    # The brackets that a client may write, in a schema for instance, are no lists.
    return message if num_brackets(message) <= MAX_BRACKETS else _STRING.sub(_escaped, message)


def num_brackets(message: bytes) -> int:
    """Return how many brackets open in a message, in its strings too."""
    return message.count(b"[") + message.count(b"{")


def check_brackets(message: bytes) -> None:
    """Refuse a message that would become too many lists.

    Raises:
        ProtocolError: it has more than `MAX_BRACKETS` brackets.
    """
    if (brackets := num_brackets(message)) > MAX_BRACKETS:
        raise ProtocolError(f"a message has {brackets:,} brackets, over {MAX_BRACKETS:,}")


def _escaped(string: re.Match[bytes]) -> bytes:
    """A string of JSON with its opening brackets written as numbers."""
    return string[0].replace(b"[", rb"\u005b").replace(b"{", rb"\u007b")


def size(message: Message, name: str) -> int:
    """Return a field that is a whole number, 0 or more.

    Raises:
        ProtocolError: it is not.
    """
    with protocol_errors():
        return message.fields.size(name)


# ---------------------------------------------------------------------- errors


def pack_error(number: int, verb: str, error: HotswapError) -> bytes:
    """Encode an error as an answer; one without a stage gets the stage `verb`."""
    kind = "lost" if isinstance(error, InstanceLost) else "aborted"
    stage = error.stage if isinstance(error, MigrationAborted) else verb
    return pack(kind, number, stage=stage, message=str(error))


def error_of(answer: Message) -> HotswapError | None:
    """Return the error of an answer, `None` if the call succeeded.

    Raises:
        ProtocolError: it is no answer.
    """
    with protocol_errors():
        match answer.verb:
            case "lost":
                return InstanceLost(answer.fields.text("message"))
            case "aborted":
                return MigrationAborted(answer.fields.text("message"), stage=answer.fields.text("stage"))
            case "done":
                return None
            case _:
                raise answer.fields.wrong(f"{answer.verb!r} is no answer")


# ---------------------------------------------------------------------- tokens


def pack_tokens(tokens: Iterable[int]) -> memoryview:
    """Encode tokens as a payload."""
    packed = array("q", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return memoryview(packed).cast("B")


def tokens_of(payload: memoryview) -> tuple[int, ...]:
    """Decode the tokens of a payload.

    Raises:
        ProtocolError: it is not valid.
    """
    if len(payload) % TOKEN_BYTES:
        raise ProtocolError(f"{len(payload)} bytes are no whole number of tokens")
    tokens = array("q", bytes(payload))
    if sys.byteorder == "big":
        tokens.byteswap()
    return tuple(tokens)


# ---------------------------------------------------------------------- values


def request_fields(request: Request) -> dict[str, object]:
    """Return a request's fields, except its tokens, and `arrived_s`: the other end has another clock."""
    return {
        "id": request.id,
        "model": request.model,
        "adapter": request.adapter,
        "priority": request.priority,
        "num_prompt": len(request.prompt),
        "sampling": _sampling_fields(request.sampling),
    }


def request_of(message: Message, tokens: tuple[int, ...]) -> Request:
    """Decode the request of a message.

    Raises:
        ProtocolError: it is not valid.
    """
    with protocol_errors():
        fields = message.fields
        num_prompt = fields.size("num_prompt")
        if num_prompt > len(tokens):
            raise fields.wrong(f"it has {len(tokens)} tokens, fewer than its prompt of {num_prompt}")
        adapter = None if fields.get("adapter") is None else AdapterId(fields.text("adapter"))
        return Request(
            id=RequestId(fields.text("id")),
            model=ModelId(fields.text("model")),
            adapter=adapter,
            priority=_one(fields, "priority", int),
            prompt=tokens[:num_prompt],
            generated=tokens[num_prompt:],
            sampling=_sampling(fields.record("sampling")),
        )


def _sampling_fields(sampling: Sampling) -> dict[str, object]:
    """Return the sampling parameters that are not the default, which both ends have."""
    defaults = _DEFAULTS.items()
    return {name: value for name, default in defaults if (value := getattr(sampling, name)) != default}


def _sampling(fields: Fields) -> Sampling:
    """Decode sampling parameters; `Sampling` itself checks each."""
    if unknown := sorted(fields.raw.keys() - _DEFAULTS.keys()):
        raise fields.wrong(f"it has the parameter {unknown[0][:40]!r}, which there is not")
    return Sampling(**fields.raw)


def layout_fields(layout: KVLayout) -> dict[str, object]:
    """Return the fields of a layout."""
    return asdict(layout)


def layout_of(message: Message) -> KVLayout:
    """Decode the layout of a message.

    Raises:
        ProtocolError: it is not valid.
    """
    with protocol_errors():
        fields = message.fields.record("layout")
        return KVLayout(
            model=ModelId(fields.text("model")),
            weights=fields.text("weights"),
            adapter=None if fields.get("adapter") is None else AdapterId(fields.text("adapter")),
            block_tokens=fields.size("block_tokens", least=1),
            layers=tuple(_layer(fields, layer) for layer in _list(fields, "layers")),
            block_bytes=fields.size("block_bytes"),
            states=tuple(_state(fields, state) for state in _list(fields, "states")),
            state_bytes=fields.size("state_bytes"),
            computed_by=fields.text("computed_by"),
        )


def most_bytes(layout: KVLayout, channel: Channel) -> int:
    """Return the most bytes of one read or write over a channel: blocks that fit a payload, and states."""
    return max(layout.block_bytes, channel.max_payload_bytes) + layout.state_bytes


def _layer(fields: Fields, layer: object) -> tuple[int, int, int, str]:
    match layer:
        case [int(kv_heads), int(key_dim), int(value_dim), str(dtype)]:
            return kv_heads, key_dim, value_dim, dtype
        case _:
            raise fields.wrong(f"{layer!r} is no layer")


def _state(fields: Fields, state: object) -> tuple[int, tuple[int, ...], str]:
    parts = cast("list[object]", state) if isinstance(state, list) else []
    if len(parts) == 3 and isinstance(parts[1], list):
        layer, dtype, sizes = parts[0], parts[2], cast("list[object]", parts[1])
        shape = tuple(size for size in sizes if isinstance(size, int))
        if isinstance(layer, int) and isinstance(dtype, str) and len(shape) == len(sizes):
            return layer, shape, dtype
    raise fields.wrong(f"{state!r} is no recurrent state")


def _one(fields: Fields, name: str, kind: type[_T]) -> _T:
    value = fields.get(name)
    # `type`, because a bool is an int to `isinstance`.
    if type(value) is not kind:
        raise fields.wrong(f"the field {name!r} is {value!r}, which is no {kind.__name__}")
    return value


def _list(fields: Fields, name: str) -> list[object]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise fields.wrong(f"the field {name!r} is {value!r}, which is no list")
    return cast("list[object]", value)
