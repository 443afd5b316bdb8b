"""A request that loses every engine it runs on is given up, and no other request is given up with it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Literal, TypeAlias

import anyio
import pytest

from hotswap import Adapter, Fleet, Request, RequestId, Sampling
from hotswap.abc import TokenQueue, TokenStream
from hotswap.backends.sim import SimEngine
from hotswap.errors import InstanceLost
from hotswap.offline.virtual_time import virtual_time
from hotswap.policies import RestoreMinReplicas
from tests.runtime.support import PROFILE, expected, idle, models, read, sim_fleet, until

POISON = (666,)
SOME = Sampling(max_tokens=25, ignore_eos=True)
LONG = Sampling(max_tokens=400, ignore_eos=True)
MOST_LOSSES = 5  # engines that one request may take down before it is given up

Moment: TypeAlias = Literal[
    "on entering", "while its prompt is computed", "while it decodes", "without its engine", "adapter"
]
MOMENTS: tuple[Moment, ...] = (
    "on entering",
    "while its prompt is computed",
    "while it decodes",
    "without its engine",
    "adapter",
)


class Fragile(SimEngine):
    """Is lost whenever it runs the poison request, at one moment of it."""

    def __init__(self, name: str, moment: Moment = "on entering", *, max_requests: int = 8) -> None:
        super().__init__(name, PROFILE, kv_blocks=512, max_requests=max_requests)
        self.moment = moment
        self.lost_s: list[float] = []

    def _die(self) -> InstanceLost:
        self.lost_s.append(anyio.current_time())
        if self.moment != "without its engine":
            self.lose("a kernel faulted")
        return InstanceLost(f"Engine {self.id!r} is lost: a kernel faulted.")

    async def load_adapter(self, adapter: Adapter) -> None:
        if adapter.id == "poison":
            raise self._die()
        await super().load_adapter(adapter)

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[TokenStream]:
        poisoned = request.prompt == POISON and self.moment != "adapter"
        if poisoned and self.moment in ("on entering", "without its engine"):
            raise self._die()
        async with AsyncExitStack() as stack:
            tokens = await stack.enter_async_context(super().stream(request))
            if poisoned and self.moment == "while its prompt is computed":
                with anyio.move_on_after(0.002):  # of a step that takes longer
                    await anyio.sleep_forever()
                self._die()
            if poisoned and self.moment == "while it decodes":
                first = TokenQueue()
                first.put(await anext(tokens))
                first.close(self._die())
                tokens = first
            yield tokens


def num_losses(engines: list[Fragile]) -> int:
    return sum(len(engine.lost_s) for engine in engines)


async def given_up(fleet: Fleet, adapter: str | None) -> tuple[RequestId, InstanceLost]:
    """Send the poison request and return the error that its client gets."""
    async with fleet.stream("a", POISON, SOME, adapter=adapter) as stream:
        try:
            await stream.collect()
        except InstanceLost as exc:
            return stream.request.id, exc
    raise AssertionError("the poison request was served")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("count", [1, 3, 8])
@virtual_time
async def test_a_request_that_loses_every_engine_is_given_up_by_the_cause_after_a_few(
    count: int, moment: Moment, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [Fragile(f"e{number}", moment) for number in range(count)]
    async with sim_fleet(
        "a",
        engines=engines,
        models=models("a", min_replicas=count),
        scheduler=RestoreMinReplicas(),
        interval_s=0.1,
        adapters=[Adapter("poison", "a")],
    ) as fleet:
        await fleet.ready()
        adapter = "poison" if moment == "adapter" else None
        with caplog.at_level(logging.WARNING, "hotswap"), anyio.fail_after(300):
            poison, error = await given_up(fleet, adapter)
        assert 2 <= num_losses(engines) <= MOST_LOSSES, "one loss may be chance, and more than a few are not"
        assert isinstance(error.__cause__, InstanceLost)
        assert "a kernel faulted" in str(error.__cause__)
        told = [r for r in caplog.records if r.name == "hotswap" and repr(poison) in r.getMessage()]
        assert [record.levelno for record in told] == [logging.WARNING]
        assert "a kernel faulted" in told[0].getMessage()
        await fleet.ready()
        await read(fleet, "a", (1,), SOME)
        idle(fleet)


@pytest.mark.parametrize("moment", MOMENTS[:3])
@virtual_time
async def test_requests_beside_a_poison_request_go_on_exactly(moment: Moment) -> None:
    engines = [Fragile(f"e{number}", moment) for number in range(4)]
    registered = models("a", min_replicas=4)
    async with sim_fleet(
        "a", engines=engines, models=registered, scheduler=RestoreMinReplicas(), interval_s=0.1
    ) as fleet:
        await fleet.ready()
        async with anyio.create_task_group() as clients:
            for number in range(12):
                clients.start_soon(read, fleet, "a", (1, number), LONG)
            await until(lambda: sum(i.num_running for i in fleet.view().instances) == 12)
            await anyio.sleep(0.3)
            with anyio.fail_after(300), pytest.raises(InstanceLost):
                await fleet.generate("a", POISON, SOME)
        assert num_losses(engines) <= MOST_LOSSES
        idle(fleet)


@virtual_time
async def test_a_request_that_waits_for_its_first_token_beside_a_poison_request_is_not_given_up() -> None:
    """Where one prompt is long and the other kills, both lose every engine; only one of them is at fault."""
    engines = [Fragile("e0", "while its prompt is computed")]
    async with sim_fleet("a", engines=engines, interval_s=0.1) as fleet:
        await read(fleet, "a", (1,), SOME)
        async with anyio.create_task_group() as clients:

            async def poison() -> None:
                with anyio.fail_after(300), pytest.raises(InstanceLost):
                    await fleet.generate("a", POISON, SOME)

            clients.start_soon(poison)
            clients.start_soon(read, fleet, "a", range(1, 2000), SOME)
        idle(fleet)


@virtual_time
async def test_a_request_that_gets_tokens_between_losses_is_not_given_up() -> None:
    engines = [Fragile(f"e{number}") for number in range(3)]
    registered = models("a", min_replicas=3)
    async with sim_fleet(
        "a", engines=engines, models=registered, scheduler=RestoreMinReplicas(), interval_s=0.1
    ) as fleet:
        await fleet.ready()
        async with fleet.stream("a", (1, 2), Sampling(max_tokens=120, ignore_eos=True)) as stream:
            seen: list[int] = []
            with anyio.fail_after(600):
                async for token in stream:
                    seen.append(token.id)
                    if token.index % 4 == 3:
                        at = stream.hops[-1].instance
                        next(engine for engine in engines if engine.id == at).lose("by chance")
            assert seen == expected(stream.request)
            assert stream.num_hops >= 20
        await fleet.ready()
        idle(fleet)


@virtual_time
async def test_a_request_that_lost_two_engines_by_chance_is_served() -> None:
    engines = [Fragile(f"e{number}") for number in range(3)]
    registered = models("a", min_replicas=3)
    async with sim_fleet(
        "a", engines=engines, models=registered, scheduler=RestoreMinReplicas(), interval_s=0.1
    ) as fleet:
        await fleet.ready()
        async with fleet.stream("a", range(1, 3000), SOME) as stream:
            for num_hops in (1, 2):
                await until(lambda wanted=num_hops: stream.num_hops == wanted)  # type: ignore[misc]
                await anyio.sleep(0.005)  # of a prefill that takes longer
                at = stream.hops[-1].instance
                next(engine for engine in engines if engine.id == at).lose("by chance")
            with anyio.fail_after(60):
                assert [token.id for token in await stream.collect()] == expected(stream.request)
        await fleet.ready()
        idle(fleet)
