"""The messages between an engine and the host of a stage on another node.

    engine -> host    setup, read, bind, open, step, drop, stats    a command to all ranks of the stage
                      end                                           the host ends the ranks, then the link
    host -> engine    done, failed                                  the reply of one rank
                      ended                                         its process has ended by itself

The numbers of a step, which are most of what is sent, are its payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import cast

import torch

from hotswap.backends.fields import Fields
from hotswap.backends.remote.messages import Message, Said, said
from hotswap.backends.torch.blocks import Copy
from hotswap.backends.torch.forward import Piece, Work
from hotswap.backends.torch.kv import LayerShape
from hotswap.backends.torch.parallel.grid import Grid
from hotswap.backends.torch.parallel.messages import (
    BindRead,
    Command,
    Done,
    Drop,
    Failed,
    GetStats,
    OpenCache,
    ReadTotal,
    ReadWeights,
    Reply,
    Setup,
    Step,
)
from hotswap.backends.torch.recurrent import StateCopy, StateShape
from hotswap.backends.transports import wire
from hotswap.backends.transports.link_errors import ProtocolError
from hotswap.request import ModelId

__all__ = [
    "END",
    "Ended",
    "commands_of",
    "end",
    "event_of",
    "said_commands",
    "said_ended",
    "said_reply",
]

END = "end"
_MAX_TEXT = 8192
_PIECE_HEAD = 6


@dataclass(frozen=True, slots=True)
class Ended:
    """The process of a rank has ended by itself.

    Attributes:
        part: Which of its stage.
        code: The exit code, if it is known.
        output: The end of its standard error.
    """

    part: int
    code: int | None
    output: str


def end() -> Said:
    """Encode the wish that the host ends."""
    return said(END, 0, {})


# ---------------------------------------------------------------------- commands


def said_commands(number: int, commands: Sequence[Command]) -> Said:
    """Encode a command to the ranks of a stage, given for each."""
    match commands[0]:
        case Setup() as setup:
            return said("setup", number, {
                "tp": setup.tp, "pp": setup.pp, "stage": setup.rank // setup.tp,
                "rendezvous": setup.rendezvous, "threads": setup.threads, "invariant": setup.invariant,
                "depth": setup.depth, "timeout_ms": round(setup.timeout_s * 1000),
                "devices": [each.device for each in commands if isinstance(each, Setup)],
            })  # fmt: skip
        case ReadWeights() as read:
            dtype = "" if read.dtype is None else _name(read.dtype)
            return said("read", number, {"model": read.model, "digest": read.digest, "dtype": dtype})
        case BindRead():
            return said("bind", number, {})
        case OpenCache() as cache:
            layers = [_layer_lists(each.layers) for each in commands if isinstance(each, OpenCache)]
            sizes = {
                "num_blocks": cache.num_blocks, "block_tokens": cache.block_tokens,
                "num_slots": cache.num_slots,
            }  # fmt: skip
            return said("open", number, {**sizes, "layers": layers})
        case Step() as step:
            return _said_step(number, step)
        case Drop():
            return said("drop", number, {})
        case GetStats():
            return said("stats", number, {})
        case other:
            raise AssertionError(f"{type(other).__name__} has open files, which do not go to other machines")


def commands_of(message: Message, tp: int) -> list[Command]:
    """Decode a command, for each of the `tp` ranks of a stage; of a `setup` the message says how many.

    Raises:
        ProtocolError: it is not valid.
    """
    with wire.protocol_errors():
        fields = message.fields
        match message.verb:
            case "setup":
                return list[Command](_setups_of(fields))
            case "read":
                name = fields.text("dtype")
                dtype = _dtype_of(fields, name) if name else None
                return [ReadWeights(ModelId(fields.text("model")), fields.text("digest"), dtype)] * tp
            case "bind":
                return [BindRead()] * tp
            case "open":
                sizes = (
                    fields.size("num_blocks"),
                    fields.size("block_tokens", least=1),
                    fields.size("num_slots"),
                )
                layers = _list(fields, "layers", tp)
                return [OpenCache(*sizes, _layers_of(fields, each)) for each in layers]
            case "step":
                return [_step_of(message)] * tp
            case "drop":
                return [Drop()] * tp
            case "stats":
                return [GetStats()] * tp
            case _:
                raise ProtocolError(f"{message.verb[:40]!r} is no command")


def _setups_of(fields: Fields) -> list[Setup]:
    grid = Grid(fields.size("tp", least=1), fields.size("pp", least=1))
    stage, devices = fields.size("stage"), _list(fields, "devices", grid.tp)
    if stage >= grid.pp - 1:
        raise fields.wrong(f"stage {stage} of {grid.pp} belongs on the engine's machine")
    return [
        Setup(
            rank=stage * grid.tp + part,
            tp=grid.tp,
            pp=grid.pp,
            rendezvous=fields.text("rendezvous"),
            device=str(device),
            threads=fields.size("threads", least=1),
            invariant=bool(fields.get("invariant")),
            depth=fields.size("depth", least=1),
            timeout_s=fields.size("timeout_ms", least=1) / 1000,
        )
        for part, device in enumerate(devices)
    ]


def _said_step(number: int, step: Step) -> Said:
    work, numbers = step.work, list[int]()
    for piece in work.pieces:
        numbers += (
            len(piece.tokens),
            piece.start,
            len(piece.blocks),
            piece.samples,
            piece.num_scored,
            piece.slot,
        )
        numbers += (*piece.tokens, *piece.blocks)
    numbers += work.fresh
    for copy in work.copies:
        numbers += copy.source, copy.target, copy.num_tokens
    for moved in (*work.restored, *work.saved):
        numbers += moved.source, moved.target
    fields: dict[str, object] = {
        "slot": step.slot, "preflight": step.is_preflight, "eager": step.eager,
        "pieces": len(work.pieces), "fresh": len(work.fresh), "copies": len(work.copies),
        "restored": len(work.restored), "saved": len(work.saved),
    }  # fmt: skip
    return said("step", number, fields, wire.pack_tokens(numbers))


def _step_of(message: Message) -> Step:
    fields, numbers = message.fields, _Numbers(wire.tokens_of(message.payload))
    pieces = list[Piece]()
    for _ in range(fields.size("pieces")):
        num_tokens, start, num_blocks, samples, num_scored, slot = numbers.take(_PIECE_HEAD)
        tokens, blocks = numbers.take(num_tokens), numbers.take(num_blocks)
        pieces.append(Piece(tokens, start, blocks, bool(samples), num_scored=num_scored, slot=slot))
    fresh = numbers.take(fields.size("fresh"))
    copies = tuple(Copy(*numbers.take(3)) for _ in range(fields.size("copies")))
    restored = tuple(StateCopy(*numbers.take(2)) for _ in range(fields.size("restored")))
    saved = tuple(StateCopy(*numbers.take(2)) for _ in range(fields.size("saved")))
    numbers.check_none_left()
    is_preflight, eager = bool(fields.get("preflight")), bool(fields.get("eager"))
    work = Work(tuple(pieces), fresh, copies, restored, saved)
    return Step(work, fields.size("slot"), is_preflight, eager)


class _Numbers:
    """Takes numbers from the front of a payload."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self._numbers, self._at = numbers, 0

    def take(self, count: int) -> tuple[int, ...]:
        """Return the next numbers; raises `ProtocolError` if there are fewer."""
        if not 0 <= count <= len(self._numbers) - self._at:
            raise ProtocolError(f"a step has {len(self._numbers)} numbers and names more")
        self._at += count
        return self._numbers[self._at - count : self._at]

    def check_none_left(self) -> None:
        """Raise `ProtocolError` if some were not taken."""
        if self._at != len(self._numbers):
            raise ProtocolError(f"a step has {len(self._numbers)} numbers and names {self._at}")


# ---------------------------------------------------------------------- replies


def said_reply(part: int, reply: Reply) -> Said:
    """Encode the reply of one rank."""
    match reply:
        case Done():
            return said("done", reply.number, {
                "part": part, "layers": _layer_lists(reply.layers),
                "sent_bytes": reply.sent_bytes, "read": None if reply.read is None else asdict(reply.read),
            })  # fmt: skip
        case Failed():
            return said("failed", reply.number, {
                "part": part, "kind": reply.kind, "message": reply.message[:_MAX_TEXT],
                "traceback": reply.traceback[-_MAX_TEXT:], "ends": reply.ends,
            })  # fmt: skip


def said_ended(ended: Ended) -> Said:
    """Encode the end of a rank."""
    fields: dict[str, object] = {"part": ended.part, "code": ended.code, "output": ended.output[-_MAX_TEXT:]}
    return said("ended", 0, fields)


def event_of(message: Message, tp: int) -> Ended | tuple[int, Reply]:
    """Decode what a host says: the end of a rank, or its part and its reply.

    Raises:
        ProtocolError: it is not valid.
    """
    with wire.protocol_errors():
        fields, part = message.fields, message.fields.size("part")
        if part >= tp:
            raise fields.wrong(f"there is no part {part} of {tp}")
        match message.verb:
            case "done":
                layers, sent = _layers_of(fields, fields.get("layers")), fields.size("sent_bytes")
                return part, Done(message.number, layers, sent, _read_total_of(fields))
            case "failed":
                texts = fields.text("kind"), fields.text("message"), fields.text("traceback")
                return part, Failed(message.number, *texts, bool(fields.get("ends")))
            case "ended":
                code = fields.get("code")
                return Ended(part, code if isinstance(code, int) else None, fields.text("output"))
            case _:
                raise ProtocolError(f"{message.verb[:40]!r} is no reply")


def _read_total_of(fields: Fields) -> ReadTotal | None:
    if fields.get("read") is None:
        return None
    read = fields.record("read")
    return ReadTotal(read.size("num_bytes"), read.text("tier"), read.flag("buffered"))


# ---------------------------------------------------------------------- values


def _layer_lists(layers: Sequence[LayerShape]) -> list[list[object]]:
    return [
        [each.kv_heads, each.key_dim, each.value_dim, _name(each.dtype), [*map(_state_list, each.states)]]
        for each in layers
    ]


def _state_list(state: StateShape) -> list[object]:
    return [_name(state.dtype), *state.shape]


def _layers_of(fields: Fields, layers: object) -> tuple[LayerShape, ...]:
    return tuple(_layer_of(fields, layer) for layer in _values_of(fields, layers))


def _layer_of(fields: Fields, layer: object) -> LayerShape:
    match _values_of(fields, layer):
        case [int(kv_heads), int(key_dim), int(value_dim), str(dtype), states]:
            kept = tuple(_state_of(fields, state) for state in _values_of(fields, states))
            return LayerShape(kv_heads, key_dim, value_dim, _dtype_of(fields, dtype), kept)
        case _:
            raise fields.wrong(f"{str(layer)[:40]!r} is no layer")


def _state_of(fields: Fields, state: object) -> StateShape:
    values = _values_of(fields, state)
    sizes = values[1:]
    shape = tuple(size for size in sizes if isinstance(size, int) and size > 0)
    if not 0 < len(shape) == len(sizes):
        raise fields.wrong(f"{str(state)[:40]!r} is no state")
    return StateShape(shape, _dtype_of(fields, str(values[0])))


def _values_of(fields: Fields, value: object) -> list[object]:
    if not isinstance(value, list):
        raise fields.wrong(f"{str(value)[:40]!r} is no list")
    return cast("list[object]", value)


def _list(fields: Fields, name: str, length: int) -> list[object]:
    value = fields.get(name)
    if not isinstance(value, list) or len(cast("list[object]", value)) != length:
        raise fields.wrong(f"the field {name!r} is no list of {length}")
    return cast("list[object]", value)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(fields: Fields, name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise fields.wrong(f"{name[:40]!r} is no dtype")
    return dtype
