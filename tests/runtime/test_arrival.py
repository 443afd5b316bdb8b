"""A request arrives when its client asks: what counts from then on, and what changes while it is encoded."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from hotswap import Model, Sampling
from hotswap.errors import DeadlineExceeded, FleetClosed
from hotswap.offline.virtual_time import virtual_time
from hotswap.runtime.texts import ModelText
from tests.runtime.support import Idle, idle, sim_fleet

SOME = Sampling(max_tokens=4, ignore_eos=True)
ENCODING_S = 5.0


@pytest.fixture
def slow_encoding(monkeypatch: pytest.MonkeyPatch) -> list[ModelText]:
    """Every prompt takes `ENCODING_S` to encode; return the texts that did it, in order."""
    encode, used = ModelText.encode, list[ModelText]()

    async def slowly(self: ModelText, *arguments: Any, **options: Any) -> tuple[int, ...]:
        used.append(self)
        await anyio.sleep(ENCODING_S)
        return await encode(self, *arguments, **options)

    monkeypatch.setattr(ModelText, "encode", slowly)
    return used


@virtual_time
async def test_the_time_of_encoding_counts(slow_encoding: list[ModelText]) -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        done = await fleet.generate("a", (1, 2), SOME)
        assert done.ttft_s > done.queue_s >= ENCODING_S
        with pytest.raises(DeadlineExceeded):
            await fleet.generate("a", (1, 2), SOME, deadline_s=ENCODING_S - 1)
        await fleet.generate("a", (1, 2), SOME, deadline_s=ENCODING_S + 1)
        idle(fleet)


@virtual_time
async def test_a_model_that_is_replaced_meanwhile_encodes_the_prompt_itself(
    slow_encoding: list[ModelText],
) -> None:
    async with sim_fleet("a", "b", scheduler=Idle()) as fleet, anyio.create_task_group() as tasks:
        await fleet.swap("e0", to="a")
        tasks.start_soon(fleet.generate, "a", (1, 2), SOME)
        await anyio.sleep(1)
        await fleet.models.remove("a")
        await fleet.models.add(Model("a"))
        await fleet.swap("e0", to="a")
        await anyio.sleep(2 * ENCODING_S)
    old, new = slow_encoding
    assert old is not new


@virtual_time
async def test_a_fleet_that_was_closed_gracefully_can_be_opened_again() -> None:
    fleet = sim_fleet("a", scheduler=Idle())
    for _ in range(2):
        async with fleet:
            await fleet.swap("e0", to="a")
            await fleet.generate("a", (1, 2), SOME)
            await fleet.close_gracefully()
            with pytest.raises(FleetClosed, match="closing"):
                await fleet.generate("a", (1, 2), SOME)


@virtual_time
async def test_a_stream_that_is_read_after_its_block_says_so() -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        async with fleet.stream("a", (1, 2), SOME) as stream:
            await anext(stream)
        with pytest.raises(FleetClosed, match="block of the stream was left"):
            await stream.complete()
        with pytest.raises(FleetClosed):
            sim_fleet("a").models.sampling("a")
