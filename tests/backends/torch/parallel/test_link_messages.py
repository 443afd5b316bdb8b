"""Commands and replies arrive at the other end of a link as they were sent, and nonsense is refused."""

from __future__ import annotations

import pytest
import torch

from hotswap import ModelId
from hotswap.abc import Frame
from hotswap.backends.remote.messages import Message, Said, frames_of, messages_of, said
from hotswap.backends.torch.blocks import Copy
from hotswap.backends.torch.forward import Piece, Work
from hotswap.backends.torch.kv import LayerShape
from hotswap.backends.torch.parallel.link_messages import (
    Ended,
    commands_of,
    event_of,
    said_commands,
    said_ended,
    said_reply,
)
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
from hotswap.backends.transports.link_errors import ProtocolError

STATES = StateShape((3, 128), torch.bfloat16), StateShape((4, 16, 16), torch.float32)
LAYERS = LayerShape(2, 16, 8, torch.bfloat16), LayerShape(0, 0, 0, torch.float32, STATES)
PIECES = Piece((5, 6, 7), 40, (1, 9), True, num_scored=2, slot=4), Piece((8,), 0, (3,), False)


def arrived(message: Said) -> Message:
    ((encoded, payload),) = frames_of([message], 0)
    (received,) = messages_of(Frame(encoded, payload), 0)
    return received


def setup(rank: int) -> Setup:
    return Setup(
        rank=rank, tp=2, pp=3, rendezvous="tcp://9/::1", device=f"cuda:{rank}", threads=4, invariant=False,
        depth=3, timeout_s=1.5,
    )  # fmt: skip


@pytest.mark.parametrize(
    "commands",
    [
        [setup(2), setup(3)],
        [ReadWeights(ModelId("m"), "digest", torch.float16)] * 2,
        [ReadWeights(ModelId("m"), "", None)] * 2,
        [BindRead()] * 2,
        [OpenCache(7, 16, 9, LAYERS), OpenCache(7, 16, 9, LAYERS[:1])],
        [Drop()] * 2,
        [GetStats()] * 2,
    ],
    ids=lambda commands: type(commands[0]).__name__,
)
def test_commands_arrive(commands: list[Command]) -> None:
    received = arrived(said_commands(3, commands))
    assert received.number == 3
    assert commands_of(received, 2) == commands


def test_a_step_arrives_with_its_numbers() -> None:
    restored, saved = (StateCopy(9, 4),), (StateCopy(4, 7), StateCopy(0, 8))
    work = Work(PIECES, (4, 2), (Copy(1, 2, 3),), restored, saved)
    step = Step(work, 1, is_preflight=True, eager=True)
    first, second = commands_of(arrived(said_commands(9, [step] * 2)), 2)
    assert first == second
    assert isinstance(first, Step)
    assert (first.slot, first.is_preflight, first.eager) == (1, True, True)
    assert (tuple(first.work.fresh), tuple(first.work.copies)) == ((4, 2), (Copy(1, 2, 3),))
    assert (first.work.restored, first.work.saved) == (restored, saved)
    for sent, got in zip(PIECES, first.work.pieces, strict=True):
        assert (tuple(got.tokens), got.start, tuple(got.blocks)) == (sent.tokens, sent.start, sent.blocks)
        assert (got.samples, got.num_scored, got.slot) == (sent.samples, sent.num_scored, sent.slot)


@pytest.mark.parametrize(
    "reply",
    [
        Done(4, LAYERS, 99),
        Done(4),
        Done(4, read=ReadTotal(1 << 40, "disk", buffered=True)),
        Failed(4, "OutOfMemory", "None.", "a b", ends=True),
    ],
)
def test_replies_arrive(reply: Reply) -> None:
    assert event_of(arrived(said_reply(1, reply)), 2) == (1, reply)


@pytest.mark.parametrize("code", [-9, None])
def test_ends_arrive(code: int | None) -> None:
    assert event_of(arrived(said_ended(Ended(0, code, "its output"))), 2) == Ended(0, code, "its output")


STEP: dict[str, object] = {"slot": 0, "pieces": 0, "fresh": 0, "copies": 0, "restored": 0, "saved": 0}
OPEN: dict[str, object] = {"num_blocks": 1, "block_tokens": 1, "num_slots": 1}


@pytest.mark.parametrize(
    "message",
    [
        said("dance", 1, {}),
        said("step", 1, {**STEP, "pieces": 1}),
        said("step", 1, {**STEP, "fresh": 2}, memoryview(bytes(8))),
        said("step", 1, STEP, memoryview(bytes(8))),
        said("step", 1, STEP, memoryview(bytes(7))),
        said("step", 1, {**STEP, "saved": 1}, memoryview(bytes(4))),
        said("open", 1, {**OPEN, "layers": []}),
        said("open", 1, {**OPEN, "layers": [[], [[1, 2, 3, "nn", []]]]}),
        said("open", 1, {**OPEN, "layers": [[], [[1, 2, 3, "float32", [["float32", -1]]]]]}),
        said("open", 1, {**OPEN, "layers": [[], [[1, 2, 3, "float32", [["float32"]]]]]}),
        said("read", 1, {"model": "m", "digest": "", "dtype": "load"}),
        said("setup", 1, {"tp": 2, "pp": 2, "stage": 1, "devices": ["cpu", "cpu"]}),
    ],
)
def test_nonsense_of_an_engine_is_refused(message: Said) -> None:
    with pytest.raises(ProtocolError):
        commands_of(arrived(message), 2)


@pytest.mark.parametrize(
    "message",
    [
        said("done", 1, {"part": 2, "layers": [], "sent_bytes": 0}),
        said("done", 1, {"part": 0, "layers": 7, "sent_bytes": 0}),
        said("done", 1, {"part": 0, "layers": [], "sent_bytes": 0, "read": {"num_bytes": -1}}),
        said("failed", 1, {"part": 0, "kind": 1}),
        said("step", 1, {"part": 0}),
    ],
)
def test_nonsense_of_a_host_is_refused(message: Said) -> None:
    with pytest.raises(ProtocolError):
        event_of(arrived(message), 2)
