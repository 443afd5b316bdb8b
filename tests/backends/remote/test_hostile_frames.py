"""Whatever frames an end gets: the link ends with a reason, both ends release what they hold and go on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap import InstanceState, RequestId
from hotswap.abc import Channel, SupportsMigration
from hotswap.backends.remote import RemoteEngine
from hotswap.backends.remote.messages import VERSION
from hotswap.backends.transports import memory_channels, wire
from hotswap.errors import InstanceLost, MigrationAborted
from hotswap.offline.virtual_time import run, virtual_time
from tests.backends.remote.support import Plan, Rig, expected, request, rig

FEW = settings(max_examples=60, deadline=None)

Frames = list[tuple[bytes, bytes]]


async def serve_requests(made: Rig, *, is_loaded: bool = False) -> list[list[int]]:
    """Load, and run three requests beside each other; those whose engine is lost have fewer tokens."""
    read: list[list[int]] = [[], [], []]

    async def one(number: int) -> None:
        async with made.engine.stream(request(number, max_tokens=20)) as tokens:
            async for token in tokens:
                read[number].append(token.id)

    async def unless_lost(number: int) -> None:
        try:
            await one(number)
        except InstanceLost:
            lost.append(number)

    lost: list[int] = []
    try:
        if not is_loaded:
            await made.engine.load(made.card, made.store)
    except InstanceLost:
        return read
    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(unless_lost, number)
    return read


def cut(frames: Frames, at: int) -> Plan:
    message, payload = frames[at]
    return {at: [(message[:-3], payload)]}


def without_its_payload(frames: Frames, at: int) -> Plan:
    return {at: [(frames[at][0], b"")]} if frames[at][1] else cut(frames, at)


def dropped(frames: Frames, at: int) -> Plan:
    return {at: []}


def repeated(frames: Frames, at: int) -> Plan:
    return {at: [frames[at], frames[at]]}


def reordered(frames: Frames, at: int) -> Plan:
    return {at: [], at + 1: [frames[at + 1], frames[at]]} if at + 1 < len(frames) else cut(frames, at)


def damaged(frames: Frames, at: int) -> Plan:
    message, payload = frames[at]
    wrong = message.replace(b",", b";", 1) if b"," in message else message[:-1] + bytes([message[-1] ^ 1])
    return {at: [(wrong, payload)]}


FAULTS = (cut, without_its_payload, dropped, repeated, reordered, damaged)


@pytest.mark.parametrize("end", ["controller", "host"])
@pytest.mark.parametrize("fault", FAULTS)
@virtual_time
async def test_a_wrong_frame_ends_the_link_and_the_next_one_works(
    fault: Callable[[Frames, int], Plan], end: Literal["controller", "host"]
) -> None:
    async with rig() as made:
        await serve_requests(made)
        frames = made.links.opened[0][0 if end == "controller" else 1].frames[:]
        await made.engine.unload()
    for at in range(1, len(frames), max(1, len(frames) // 8)):
        plan = fault(frames, at)
        async with rig((plan, {}) if end == "controller" else ({}, plan)) as made:
            for number, tokens in enumerate(await serve_requests(made)):
                whole = expected(request(number, max_tokens=20), made.card)
                assert tokens == whole[: len(tokens)], "no wrong token"
            with anyio.fail_after(30):
                await made.links.ended[0].wait()
            assert made.engine.status().state is InstanceState.LOST
            made.assert_released()
            await made.engine.unload()
            assert all(len(tokens) == 20 for tokens in await serve_requests(made))
            await made.engine.unload()


HELLO: list[object] = [0, ["control", 0, {"version": VERSION, "epoch": 5, "silence_s": 8}, 0]]
NONSENSE: dict[str, object] = {
    "no list": {"verb": "open"},
    "another number": [7],
    "a number that is none": [True],
    "a message that is none": [1, "open"],
    "an unknown verb": [1, ["reboot", 1, {}, 0]],
    "a request without a model": [1, ["open", 1, {"id": "r"}, 0]],
    "a load of no model": [1, ["load", 1, {"model": {"id": 3}}, 0]],
    "a payload that is not there": [1, ["open", 1, {}, 8]],
    "a number used twice": [1, ["unload", 1, {}, 0], ["unload", 1, {}, 0]],
    "a deadline that is none": [1, ["evict", 1, {"deadline_s": "soon"}, 0]],
    "blocks without a move": [1, ["push", 1, {"key": 3}, 0]],
    "memory without a name": [1, ["open_memory", 1, {"capacity_bytes": 4096}, 0]],
    "memory of no size": [1, ["open_memory", 1, {"memory": "m", "capacity_bytes": -1}, 0]],
    "pages of memory without a format": [
        1,
        ["open_memory", 1, {"memory": "m", "capacity_bytes": 4096}, 0],
        ["lend_memory", 2, {"memory": "m", "layout": {}}, 0],
    ],
    "a deep list": "[" * 20_000 + "]" * 20_000,
    "many lists": [1, ["cancel", 1, {"a": [[]] * 40_000}, 0]],
}


@pytest.mark.parametrize("name", NONSENSE)
@virtual_time
async def test_a_host_ends_the_link_of_a_controller_that_says_nonsense_and_serves_the_next(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig() as made:
        near = await made.links.open()
        nonsense = NONSENSE[name]
        await near.send(json.dumps(HELLO).encode())
        await near.send(nonsense.encode() if isinstance(nonsense, str) else json.dumps(nonsense).encode())
        with anyio.fail_after(5):
            await made.links.ended[1].wait()
        assert "has ended" in caplog.text
        made.engine.epoch = 6
        await made.engine.unload()
        await made.engine.load(made.card, made.store)
        await made.engine.unload()


@pytest.mark.parametrize(
    "hello",
    [
        [0],
        [0, ["control", 0, {"version": VERSION, "epoch": -1, "silence_s": 8}, 0]],
        [0, ["control", 0, {"version": 99, "epoch": 1, "silence_s": 8}, 0]],
        [0, ["control", 0, {"version": VERSION, "epoch": 1}, 0]],
        [0, ["control", 0, {"version": VERSION, "epoch": 1, "silence_s": 0}, 0]],
        [0, ["control", 0, {"version": VERSION, "epoch": 1, "silence_s": 1e-9}, 0]],
        [0, ["control", 0, {"version": VERSION, "epoch": 1, "silence_s": 1e9}, 0]],
        [0, ["control", 0, {"version": VERSION, "epoch": 1, "silence_s": "long"}, 0]],
        [0, ["control", 0, {"version": VERSION, "epoch": 1, "silence_s": True}, 0]],
        [0, ["pages", 0, {"version": VERSION, "key": "guessed"}, 0]],
        [0, ["open", 0, {"version": VERSION}, 0]],
    ],
)
@virtual_time
async def test_a_host_ends_a_link_that_begins_with_nonsense_and_disturbs_no_controller(hello: object) -> None:
    async with rig() as made:
        await made.engine.load(made.card, made.store)
        near = await made.links.open()
        await near.send(json.dumps(hello).encode())
        with anyio.fail_after(5):
            await made.links.ended[1].wait()
        assert all(len(tokens) == 20 for tokens in await serve_requests(made, is_loaded=True))
        await made.engine.unload()


@FEW
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=20))
def test_a_host_goes_on_after_any_json(said: object) -> None:
    async def test() -> None:
        async with rig() as made:
            near = await made.links.open()
            await near.send(json.dumps(HELLO).encode())
            await near.send(json.dumps([1, said]).encode())
            with anyio.fail_after(5):
                await made.links.ended[1].wait()
            made.engine.epoch = 6
            await made.engine.unload()

    run(test)


WELCOME: dict[str, Any] = {
    "abilities": ["adapters", "time travel"],
    "status": {"state": "SERVING", "model": "a"},
    "silence_s": 8,
}
ANSWERS: dict[str, tuple[str, int, object, int]] = {
    "an unknown verb": ("reboot", 1, {}, 0),
    "half a pair": ("tokens", 0, {}, 8),
    "too many tokens": ("tokens", 0, {}, 16 * 60),
    "a status of no state": ("status", 0, {"state": "DANCING"}, 0),
    "a status with another id": ("status", 0, {"id": "e7"}, 0),
    "a negative count": ("status", 0, {"num_running": -1}, 0),
    "an error of no kind": ("ended", 1, {"error": {"text": "x"}}, 0),
    "an error without its stage": (
        "ended",
        1,
        {"error": {"kind": "MigrationAborted", "text": "x", "about": {}}},
        0,
    ),
    "a prompt that is none": ("prompt", 1, {"num_entries": 3}, 16),
    "a token that is none": ("scored", 1, {"kind": 9}, 16),
}


@pytest.mark.parametrize("name", ANSWERS)
@virtual_time
async def test_a_controller_ends_the_link_of_a_host_that_says_nonsense(name: str) -> None:
    near, far = memory_channels()

    async def host() -> None:
        await far.receive()
        await far.send(json.dumps([0, ["welcome", 0, WELCOME, 0]]).encode())
        await far.receive()
        verb, number, fields, size = ANSWERS[name]
        payload = bytes([4, *7 * [0]]) * (size // 8)
        await far.send(json.dumps([1, [verb, number, fields, size]]).encode(), memoryview(payload))

    async def open_link() -> Channel:
        return near

    async with anyio.create_task_group() as tasks, far:
        tasks.start_soon(host)
        async with RemoteEngine("e0", open_link) as engine:
            with pytest.raises(InstanceLost):
                async with engine.stream(request(max_tokens=20)) as tokens:
                    await tokens.collect()
            assert engine.status().state is InstanceState.LOST


@virtual_time
async def test_a_host_that_never_admits_a_request_is_lost_and_the_request_goes_elsewhere() -> None:
    near, far = memory_channels()

    async def host() -> None:
        await far.receive()
        await far.send(json.dumps([0, ["welcome", 0, WELCOME, 0]]).encode())
        with suppress(MigrationAborted):
            for number in range(1, 100):
                await far.receive()
                await far.send(json.dumps([number]).encode())

    async def open_link() -> Channel:
        return near

    async with anyio.create_task_group() as tasks, far:
        tasks.start_soon(host)
        async with RemoteEngine("e0", open_link) as engine:
            with pytest.raises(InstanceLost, match="did not admit"):
                async with engine.stream(request()):
                    pass
        tasks.cancel_scope.cancel()


def page_call(verb: str, **fields: object) -> str:
    return wire.pack(verb, 1, **{"first_block": 0, "num_tokens": 1, **fields}).decode()


PAGES: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "a message"),
    "no message": ("[1]", "a message"),
    "another version": (json.dumps({"version": 99, "verb": "read", "number": 1}), "speaks version 99"),
    "an unknown verb": (page_call("erase"), "'erase' is no call"),
    "a write to a source": (page_call("write"), "'write' is no call"),
    "a negative block": (page_call("read", first_block=-1), "first_block"),
    "no block": (page_call("read", first_block=None), "first_block"),
}


@pytest.mark.parametrize("name", PAGES)
@virtual_time
async def test_a_host_ends_a_link_for_blocks_that_asks_for_nonsense_and_the_move_goes_on(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    said, reason = PAGES[name]
    async with rig() as made:
        await made.engine.load(made.card, made.store)
        async with made.engine.stream(request(max_tokens=30)) as tokens:
            read = [(await anext(tokens)).id]
            assert isinstance(made.engine, SupportsMigration)
            async with made.engine.export_kv(RequestId("r0")) as source:
                (key,) = re.findall(rb'"key":"(\w+)"', b"".join(m for m, _ in made.links.opened[0][1].frames))
                near = await made.links.open()
                hello: list[object] = [0, ["pages", 0, {"version": VERSION, "key": key.decode()}, 0]]
                await near.send(json.dumps(hello).encode())
                await near.send(said.encode())
                with anyio.fail_after(5):
                    await made.links.ended[1].wait()
                assert reason in caplog.text
                assert (await source.read(0, 4)).num_tokens == 4
            read += [token.id for token in await tokens.collect()]
        assert read == expected(request(max_tokens=30), made.card)
        await made.engine.unload()


@virtual_time
async def test_a_controller_of_another_version_is_refused_with_both_versions() -> None:
    hello: list[object] = [0, ["control", 0, {"version": VERSION - 1, "epoch": 1}, 0]]
    async with rig() as made:
        await made.engine.load(made.card, made.store)
        made.links.plans.append(({0: [(json.dumps(hello).encode(), b"")]}, {}))
        other = RemoteEngine("e0", made.links.open)
        with pytest.raises(
            InstanceLost, match=f"speaks version {VERSION - 1}, this one {VERSION}.*both ends"
        ):
            await other.__aenter__()
        assert len((await serve_requests(made, is_loaded=True))[0]) == 20, "the other controller goes on"
        await made.engine.unload()
