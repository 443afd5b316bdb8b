"""A client that leaves ends its request, in whatever state it is, and all that it held is free."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from hotswap import Fleet, InstanceId
from hotswap.door import create_app
from hotswap.offline.virtual_time import virtual_time
from hotswap.runtime.texts import ModelText
from tests.door.support import Caller
from tests.door.test_messages import WithTemplate
from tests.runtime.support import Idle, idle, sim_fleet, store_of
from tests.runtime.test_text import WithTokenizer

PATH = "/v1/completions"
E0 = InstanceId("e0")
SOON_S = 0.1


def fleet_of(*models: str, **options: Any) -> Fleet:
    return sim_fleet(*models, store=WithTokenizer(store_of(*models)), **options)


def asked(**fields: Any) -> dict[str, Any]:
    return {
        "model": "a",
        "prompt": [1] * 64,
        "max_tokens": 2000,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


@asynccontextmanager
async def calling(fleet: Fleet, **fields: Any) -> AsyncGenerator[Caller]:
    """A client that leaves at the end of the block; everything is free soon after."""
    caller = Caller(create_app(fleet), PATH, asked(**fields))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(caller)
        yield caller
        caller.leave()
        with anyio.fail_after(SOON_S):
            await caller.ended.wait()
    await anyio.sleep(SOON_S)  # the step that was under way has ended
    assert not fleet.view().running
    assert not fleet.view().waiting


async def served(fleet: Fleet) -> None:
    """The fleet serves the next request as ever."""
    for instance in fleet.view().instances:
        if instance.model is None and not instance.swapping:
            await fleet.swap(instance.id, to="a")
    caller = Caller(create_app(fleet), PATH, asked(max_tokens=5))
    await caller()
    assert caller.sent[0]["status"] == 200
    idle(fleet)


@pytest.mark.parametrize("stream", [False, True])
@virtual_time
async def test_while_it_waits(stream: bool) -> None:
    async with fleet_of("a", scheduler=Idle()) as fleet:
        async with calling(fleet, stream=stream) as caller:
            await caller.until(lambda: bool(fleet.view().waiting))
        await served(fleet)


@pytest.mark.parametrize("stream", [False, True])
@virtual_time
async def test_while_its_prompt_is_read(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = anyio.Event()

    async def endless(*_: Any, **__: Any) -> tuple[int, ...]:
        entered.set()
        await anyio.sleep_forever()
        return ()

    async with fleet_of("a", scheduler=Idle()) as fleet:
        with monkeypatch.context() as patched:
            patched.setattr(ModelText, "encode", endless)
            async with calling(fleet, stream=stream):
                await entered.wait()
        await served(fleet)


@pytest.mark.parametrize("stream", [False, True])
@virtual_time
async def test_while_its_model_is_loaded(stream: bool) -> None:
    async with fleet_of("a", engines=1) as fleet:
        async with calling(fleet, stream=stream) as caller:
            await caller.until(lambda: fleet.view().instance(E0).state == "LOADING")
        await caller.until(lambda: not fleet.view().instance(E0).swapping)
        await served(fleet)


@pytest.mark.parametrize("stream", [False, True])
@virtual_time
async def test_in_prefill(stream: bool) -> None:
    async with fleet_of("a", scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        async with calling(fleet, stream=stream, prompt=[1] * 1500, max_tokens=2000) as caller:
            await caller.until(lambda: fleet.view().instance(E0).num_free_kv_blocks < 512)
            assert not caller.sent
        await served(fleet)


@pytest.mark.parametrize("stream", [False, True])
@virtual_time
async def test_in_decode(stream: bool) -> None:
    async with fleet_of("a", scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        async with calling(fleet, stream=stream) as caller:
            await caller.until(lambda: any(request.begun for request in fleet.view().running))
            await anyio.sleep(0.3)
            assert bool(caller.sent) is stream
        await served(fleet)


@pytest.mark.parametrize("stream", [False, True])
@virtual_time
async def test_in_a_swap_that_evicts_it(stream: bool) -> None:
    async with fleet_of("a", "b", engines=1, scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as swaps:

            async def swap() -> None:
                await fleet.swap("e0", to="b")

            async with calling(fleet, stream=stream) as caller:
                await caller.until(lambda: any(request.begun for request in fleet.view().running))
                swaps.start_soon(swap)
                await caller.until(lambda: bool(fleet.view().waiting))
                assert fleet.view().instance(E0).swapping
        await fleet.unload("e0")
        await served(fleet)


@pytest.mark.parametrize("stream", [False, True])
@virtual_time
async def test_in_a_move(stream: bool) -> None:
    async with fleet_of("a", scheduler=Idle()) as fleet:
        for instance in ("e0", "e1"):
            await fleet.swap(instance, to="a")
        async with anyio.create_task_group() as moves:

            async def move(request: str, to: str) -> None:
                await fleet.migrate(request, to=to)

            async with calling(fleet, stream=stream, prompt=[1] * 2000) as caller:
                await caller.until(lambda: any(request.begun for request in fleet.view().running))
                (request,) = fleet.view().running
                moves.start_soon(move, request.id, "e1" if request.instance == "e0" else "e0")
                await caller.until(lambda: any(one.moving for one in fleet.view().running))
        await served(fleet)


@virtual_time
async def test_with_several_choices() -> None:
    async with fleet_of("a", scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        async with calling(fleet, stream=True, n=3, temperature=1.0) as caller:
            await caller.until(lambda: len(caller.sent) > 5)
        await served(fleet)


async def leaves_after(fleet: Fleet, path: str, body: dict[str, Any], num_writes: int) -> bool:
    """Have a client leave after so many writes, or at the end; return whether that has come before."""
    caller = Caller(create_app(fleet), path, body)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(caller)
        await caller.until(lambda: len(caller.sent) >= num_writes or caller.ended.is_set())
        has_ended = caller.ended.is_set()
        caller.leave()
        with anyio.fail_after(SOON_S):
            await caller.ended.wait()
    assert caller.sent[0]["status"] == 200
    return has_ended


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
@virtual_time
async def test_after_every_write(path: str) -> None:
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    said = {"messages": [{"role": "user", "content": "ab"}]}
    prompts: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": [1] * 8},
        "/v1/responses": {"input": "ab"},
    }
    prompt = prompts.get(path, said)
    body = {"model": "a", "stream": True, "temperature": 0, most: 8, **prompt}
    async with sim_fleet("a", store=WithTemplate(store_of("a")), scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        num_writes = 1
        while not await leaves_after(fleet, path, body, num_writes):
            await anyio.sleep(SOON_S)
            assert not fleet.view().running
            assert not fleet.view().waiting
            idle(fleet)
            num_writes += 1
        assert num_writes > 4
        await served(fleet)
