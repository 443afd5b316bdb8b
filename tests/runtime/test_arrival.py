"""A request arrives when its client asks: what counts from then on, and what changes while it is encoded."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from hotswap import Sampling
from hotswap.errors import DeadlineExceeded, FleetClosed, UnknownModel
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
async def test_a_request_ends_at_its_deadline_though_its_prompt_is_not_encoded(
    slow_encoding: list[ModelText],
) -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        with pytest.raises(DeadlineExceeded, match="before its prompt was read"):
            await fleet.generate("a", (1, 2), SOME, deadline_s=1.0)
        assert anyio.current_time() == 1.0


@virtual_time
async def test_a_model_to_which_its_own_is_rolled_meanwhile_encodes_the_prompt(
    slow_encoding: list[ModelText],
) -> None:
    async with sim_fleet("a", "b", scheduler=Idle()) as fleet, anyio.create_task_group() as tasks:
        await fleet.swap("e0", to="a")
        tasks.start_soon(fleet.generate, "a", (1, 2), SOME)
        await anyio.sleep(1)
        await fleet.roll("a", to="b")
        await anyio.sleep(2 * ENCODING_S)
    assert [text.model for text in slow_encoding] == ["a", "b"]


@virtual_time
async def test_a_model_is_removed_after_requests_whose_prompts_are_being_encoded(
    slow_encoding: list[ModelText],
) -> None:
    async with sim_fleet("a", "b", scheduler=Idle()) as fleet, anyio.create_task_group() as tasks:
        await fleet.swap("e0", to="a")
        done: list[int] = []

        async def client() -> None:
            done.append(len((await fleet.generate("a", (1, 2), SOME)).tokens))

        tasks.start_soon(client)
        await anyio.sleep(1)
        await fleet.models.remove("a")
        assert done == [SOME.max_tokens]
        with pytest.raises(UnknownModel):
            await fleet.generate("a", (1, 2), SOME)


@virtual_time
async def test_prompts_that_are_not_encoded_at_the_deadline_of_a_removal_end_by_it(
    slow_encoding: list[ModelText],
) -> None:
    async with sim_fleet("a", "b", scheduler=Idle()) as fleet, anyio.create_task_group() as tasks:
        await fleet.swap("e0", to="a")
        await fleet.swap("e1", to="b")
        ended_s: list[float] = []

        async def client() -> None:
            with pytest.raises(UnknownModel, match="was removed"):
                await fleet.generate("a", (1, 2), SOME)
            ended_s.append(anyio.current_time())

        began_s = anyio.current_time()
        tasks.start_soon(client)
        tasks.start_soon(fleet.generate, "b", (1, 2), SOME)  # of another model
        await anyio.sleep(1)
        await fleet.models.remove("a", deadline_s=1.0)
        assert ended_s == [began_s + 2.0]


@virtual_time
async def test_a_graceful_close_finishes_requests_whose_prompts_are_being_encoded(
    slow_encoding: list[ModelText],
) -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet, anyio.create_task_group() as tasks:
        await fleet.swap("e0", to="a")
        tasks.start_soon(fleet.generate, "a", (1, 2), SOME)
        await anyio.sleep(1)
        began_s = anyio.current_time()
        assert await fleet.close_gracefully() == 0
        assert anyio.current_time() >= began_s + ENCODING_S - 1
    assert len(slow_encoding) == 1


@virtual_time
async def test_prompts_that_are_not_encoded_at_the_deadline_of_a_close_end_by_it(
    slow_encoding: list[ModelText],
) -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet, anyio.create_task_group() as tasks:

        async def client() -> None:
            with pytest.raises(FleetClosed, match="before the prompt of a request was read"):
                await fleet.generate("a", (1, 2), SOME)

        tasks.start_soon(client)
        await anyio.sleep(1)
        assert await fleet.close_gracefully(1.0) == 1
        assert anyio.current_time() == 2.0


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
