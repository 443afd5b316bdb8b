"""When a host tells a load that has changed and goes with no token: after 0.1 s at the latest."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import anyio
import pytest

from hotswap import InstanceState, Model, ModelId
from hotswap.abc import ModelCard
from hotswap.backends.sim import SimEngine
from hotswap.engine import StatusListener
from hotswap.offline.virtual_time import virtual_time
from hotswap.view import EngineStatus
from tests.backends.remote.support import PROFILE, HandingEngine, over_memory, request
from tests.backends.test_sim import TestSimEngineConforms as Sim

TOLD_S = 0.1
MOMENT_S = 0.001  # for a frame to cross
LONG_S = 10.0  # a step, so that no token is due

Make: TypeAlias = Callable[..., SimEngine]
Load: TypeAlias = tuple[int, int, int, int]


class Unwatched(SimEngine):
    """An engine that tells no changes, so that its host asks."""

    def watch(self, listener: StatusListener) -> bool:
        return False


kinds_of_engines = pytest.mark.parametrize("make", [SimEngine, Unwatched])


@asynccontextmanager
async def serving(make: Make, *, step_s: float, **options: Any) -> AsyncGenerator[HandingEngine]:
    """A remote engine that serves the model "a"; `engine` is that of its host."""
    behind = make("e0", replace(PROFILE, floor_s=step_s), kv_blocks=160, kv_block_tokens=4, **options)
    store = Sim().make_store()
    async with store, over_memory(behind, epoch=1) as engine:
        await engine.load(ModelCard.of(Model("a"), await store.manifest(ModelId("a"))), store)
        yield engine
        await engine.unload()
        assert behind.status().state is InstanceState.EMPTY


def load_in(status: EngineStatus) -> Load:
    return status.num_running, status.num_waiting, status.num_prefill_tokens, status.num_free_kv_blocks


@kinds_of_engines
@virtual_time
async def test_a_queue_that_grows_at_the_host_is_told_though_no_token_is_due(make: Make) -> None:
    async with serving(make, step_s=LONG_S, max_requests=1) as engine, anyio.create_task_group() as tasks:

        async def client(number: int) -> None:
            async with engine.engine.stream(request(number)):  # the controller has no part in it
                await anyio.sleep_forever()

        for number in range(4):
            tasks.start_soon(client, number)
            await anyio.sleep(TOLD_S + MOMENT_S)
            there, here = engine.engine.status(), engine.status()
            assert there.num_running + there.num_waiting == number + 1
            assert load_in(here) == load_in(there), f"after {number + 1} requests"
        tasks.cancel_scope.cancel()


@kinds_of_engines
@virtual_time
async def test_a_long_prompt_is_told_as_it_is_computed_and_no_more_often_than_it_may(make: Make) -> None:
    async with serving(make, step_s=0.03, token_budget=8) as engine:
        long = replace(request(), prompt=tuple(range(1, 401)))  # 50 steps without a token
        seen: list[tuple[float, Load]] = []
        told: list[Load] = []
        async with engine.stream(long) as tokens:
            while engine.engine.status().num_prefill_tokens:
                now_s = anyio.current_time()
                seen.append((now_s, load_in(engine.engine.status())))
                here = load_in(engine.status())
                late = [load for at_s, load in seen if now_s - at_s <= TOLD_S + 2 * MOMENT_S]
                if now_s - seen[0][0] > TOLD_S:
                    assert here in late, f"{here} was told, and of late it was {late}"
                if here not in told:
                    told.append(here)
                await anyio.sleep(MOMENT_S)
            first = await anext(tokens)
        assert first.index == 0
        took_s = seen[-1][0] - seen[0][0]
        assert took_s > 1.0
        assert took_s / TOLD_S / 2 <= len(told) <= took_s / TOLD_S + 2
