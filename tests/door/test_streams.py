"""Streams over a real server have the text of undisturbed requests, whatever engines do meanwhile."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import anyio
import httpx
import pytest

from hotswap import Fleet, Sampling
from hotswap.backends.sim import SimEngine
from hotswap.door import create_app, listen
from hotswap.errors import HotswapError
from tests.door.support import events_of
from tests.patience import PATIENCE_S
from tests.runtime.support import engine_of, idle, sim_fleet, store_of
from tests.runtime.test_text import WithTokenizer

STREAMS, TOKENS = 6, 120


class Disturbances:
    """Swaps, moves and one lost engine at random, until streams have ended."""

    def __init__(self, fleet: Fleet, engines: list[SimEngine], chance: Random) -> None:
        self._fleet, self._engines, self._chance = fleet, engines, chance
        self.num_swaps = self.num_moves = self.num_losses = 0

    async def __call__(self) -> None:
        await anyio.sleep(0.3)
        await self._lose()
        while self._fleet.view().running or self._fleet.view().waiting:
            await anyio.sleep(0.1)
            with suppress(HotswapError):  # of a verb that comes at the wrong moment: no client's
                await self._chance.choice([self._swap, self._move, self._move])()

    async def _lose(self) -> None:
        busy = [one for one in self._engines if one.status().num_running]
        self._chance.choice(busy or self._engines).lose()
        self.num_losses += 1

    async def _swap(self) -> None:
        await self._fleet.swap(self._chance.choice(self._engines).id, to=self._chance.choice("ab"))
        self.num_swaps += 1

    async def _move(self) -> None:
        if running := self._fleet.view().running:
            request = self._chance.choice(running)
            await self._fleet.migrate(request.id, to=self._chance.choice(self._engines).id)
            self.num_moves += 1


def body(number: int, **fields: Any) -> dict[str, Any]:
    return {"model": "ab"[number % 2], "prompt": [1, 2, number + 3], "max_tokens": TOKENS, **fields}


@pytest.mark.parametrize("seed", [1, 2])
async def test_streams_over_http_equal_those_of_the_fleet(seed: int) -> None:
    chance = Random(seed)
    engines = [engine_of(f"e{number}") for number in range(3)]
    texts: dict[int, str] = {}

    async def read(client: httpx.AsyncClient, number: int) -> None:
        asked = body(number, ignore_eos=True, temperature=1, seed=number, stream=True)
        answer = await client.post("/v1/completions", json=asked)
        assert answer.status_code == 200, answer.text
        texts[number] = "".join(event["choices"][0]["text"] for event in events_of(answer.text))

    store = WithTokenizer(store_of("a", "b"))
    async with sim_fleet("a", "b", engines=engines, store=store) as fleet:
        await fleet.swap("e0", to="a")
        await fleet.swap("e1", to="b")
        disturb = Disturbances(fleet, engines, chance)
        async with listen(create_app(fleet), port=0) as port:
            url = f"http://127.0.0.1:{port}"
            async with (
                httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
                anyio.create_task_group() as clients,
            ):
                for number in range(STREAMS):
                    clients.start_soon(read, client, number)
                clients.start_soon(disturb)
        for number in range(STREAMS):
            sampling = Sampling(max_tokens=TOKENS, ignore_eos=True, temperature=1, seed=number)
            asked = body(number)
            right = await fleet.generate(asked["model"], asked["prompt"], sampling)
            assert texts[number] == right.text
            assert len(right.tokens) == TOKENS
        idle(fleet)
    assert disturb.num_losses == 1
    assert disturb.num_swaps + disturb.num_moves > 0
