"""Requests by their ids: given by clients, cancelled by operators; and what a model's card and texts tell."""

from __future__ import annotations

import anyio
import pytest

from hotswap import Fleet, Sampling
from hotswap.errors import FleetClosed, InvalidRequest, PromptTooLong, RequestCancelled, UnknownModel
from hotswap.offline.virtual_time import virtual_time
from tests.runtime.support import Idle, engine_of, idle, sim_fleet, until

LONG = Sampling(max_tokens=500, ignore_eos=True)


@virtual_time
async def test_a_request_has_the_id_that_its_client_gives() -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        async with fleet.stream("a", (1, 2), LONG, request_id="mine") as stream:
            assert stream.request.id == "mine"
            with pytest.raises(InvalidRequest, match="request_id is 'mine'"):
                await fleet.generate("a", (1, 2), LONG, request_id="mine")
            await anext(stream)
        # Once it has ended its id may be used again.
        done = await fleet.generate("a", (1, 2), Sampling(max_tokens=2), request_id="mine")
        assert len(done.tokens) == 2


@virtual_time
async def test_samples_have_numbers_and_no_other_request_their_ids() -> None:
    several = Sampling(n=2, temperature=1.0, max_tokens=500, ignore_eos=True)
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        async with fleet.samples("a", (1, 2), several, request_id="mine") as streams:
            assert [stream.request.id for stream in streams] == ["mine-0", "mine-1"]
            for taken in ("mine", "mine-1"):
                with pytest.raises(InvalidRequest, match="a request under way has it"):
                    await fleet.generate("a", (1, 2), LONG, request_id=taken)
            fleet.cancel("mine")
            for stream in streams:
                with pytest.raises(RequestCancelled):
                    await stream.collect()
        idle(fleet)


@pytest.mark.parametrize("wrong", ["", "a\nb", "é", "x" * 201])
@virtual_time
async def test_an_id_that_cannot_be_shown_is_refused(wrong: str) -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        with pytest.raises(InvalidRequest, match="request_id"):
            await fleet.generate("a", (1, 2), request_id=wrong)


@pytest.mark.parametrize("state", ["waiting", "running"])
@virtual_time
async def test_a_cancelled_request_ends_wherever_it_is(state: str) -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        if state == "running":
            await fleet.swap("e0", to="a")
        async with fleet.stream("a", (1, 2), LONG, request_id="mine") as stream:
            if state == "running":
                await anext(stream)
            fleet.cancel("mine")
            with pytest.raises(RequestCancelled, match="'mine' was cancelled"):
                await stream.collect()
            await until(lambda: not fleet.view().waiting and not fleet.view().running)
        idle(fleet)
        with pytest.raises(InvalidRequest, match="no request 'mine' under way"):
            fleet.cancel("mine")


def is_open(fleet: Fleet) -> bool:
    return fleet.is_open


@virtual_time
async def test_a_fleet_is_open_until_it_closes() -> None:
    fleet = sim_fleet("a", scheduler=Idle())
    assert not is_open(fleet)
    async with fleet:
        assert is_open(fleet)
        await fleet.close_gracefully()
        assert not is_open(fleet)
    with pytest.raises(FleetClosed):
        fleet.cancel("mine")
    with pytest.raises(FleetClosed):
        fleet.models.card("a")


@virtual_time
async def test_take_returns_what_has_arrived_and_nothing_at_the_end() -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        async with fleet.stream("a", (1, 2), Sampling(max_tokens=50, ignore_eos=True)) as stream:
            first = await stream.take()
            await anyio.sleep(10.0)
            rest = await stream.take()
            assert await stream.take() == []
        assert len(first) == 1
        assert [token.index for token in (*first, *rest)] == list(range(50))


@virtual_time
async def test_a_cancelled_take_loses_no_token() -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        async with fleet.stream("a", (1, 2), Sampling(max_tokens=50, ignore_eos=True)) as stream:
            found: list[int] = []
            while True:
                with anyio.move_on_after(0.0005) as soon:
                    tokens = await stream.take()
                if soon.cancelled_caught:
                    continue
                if not tokens:
                    break
                found += [token.index for token in tokens]
        assert found == list(range(50))


@virtual_time
async def test_a_request_that_outgrows_every_engine_is_refused_and_makes_no_swap() -> None:
    small = [engine_of("e0", kv_blocks=8), engine_of("e1", kv_blocks=16)]
    async with sim_fleet("a", engines=small) as fleet:
        for prompt, most in (((1,) * 300, 1), ((1,) * 200, 100)):
            with pytest.raises(PromptTooLong, match="no engine has those of more than 256"):
                await fleet.generate("a", prompt, Sampling(max_tokens=most))
        assert fleet.swaps == ()
        # As many as fit are as many as fit the KV blocks.
        async with fleet.stream("a", (1,) * 200, Sampling(max_tokens=None)) as stream:
            assert stream.request.sampling.max_tokens == 57


@virtual_time
async def test_the_card_of_a_model_is_that_of_what_serves_its_name() -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        fleet.models.alias("other", "a")
        assert fleet.models.card("other") is fleet.models.card("a")
        assert fleet.models.card("a").max_context_tokens == 4096
        assert fleet.models.aliases == {"other": "a"}
        with pytest.raises(UnknownModel):
            fleet.models.card("b")
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            await fleet.models.encode("a", "text")
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            await fleet.models.decode("a", (1, 2))
