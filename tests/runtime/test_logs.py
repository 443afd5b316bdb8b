"""What an operator reads in the log: failures as warnings with their reason, ordinary work as information."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import pytest

from hotswap import Adapter, FleetView, InstanceId, InstanceState, Request, Sampling
from hotswap.abc import Router, TokenStream, WeightStore, WrapperEngine
from hotswap.errors import HotswapError, InstanceError, InstanceLost, ShardMissing, SwapFailed
from hotswap.offline.virtual_time import virtual_time
from tests.runtime.support import Idle, engine_of, read, sim_fleet, store_of, until
from tests.runtime.test_adapters import Counting
from tests.runtime.test_swap import Unreadable

SOME = Sampling(max_tokens=5, ignore_eos=True)
LONG = Sampling(max_tokens=300, ignore_eos=True)


def logged(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    """The messages of one level, of hotswap alone."""
    return [r.getMessage() for r in caplog.records if r.levelno == level and r.name.startswith("hotswap")]


@pytest.fixture(autouse=True)
def _all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hotswap")


@virtual_time
async def test_ordinary_work_is_information_and_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    engine = Counting("e0")
    async with sim_fleet(
        "a", "b", engines=[engine], adapters=[Adapter("sql", "a")], scheduler=Idle()
    ) as fleet:
        await fleet.swap("e0", to="a")
        await fleet.generate("a", (1,), SOME, adapter="sql")
        async with fleet.stream("a", (1,), LONG) as stream:
            await anext(stream)
            await fleet.swap("e0", to="b")
        await fleet.unload("e0")
    assert logged(caplog, logging.WARNING) == []
    said = logged(caplog, logging.INFO)
    assert [line for line in said if "'e0' from None to 'a' is done" in line]
    assert [line for line in said if "'e0' from 'a' to 'b' is done" in line and "1 requests evicted" in line]
    assert [line for line in said if "'e0' from 'b' to None is done" in line]
    assert [line for line in said if "Adapter 'sql' was loaded on 'e0'" in line]


@pytest.mark.parametrize("busy", [True, False])
@virtual_time
async def test_a_lost_engine_and_its_restart_are_told_with_the_reason(
    busy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [engine_of("e0"), engine_of("e1")]
    async with sim_fleet("a", engines=engines, scheduler=Idle()) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to="a")
        async with anyio.create_task_group() as clients:
            if busy:
                for number in range(4):
                    clients.start_soon(read, fleet, "a", (1, number), LONG)
                await anyio.sleep(0.5)
            engines[0].lose("its fan has stopped")
            await until(lambda: engines[0].status().state is InstanceState.EMPTY)
    lost = [line for line in logged(caplog, logging.WARNING) if "'e0' was lost" in line]
    (restarted,) = [line for line in logged(caplog, logging.WARNING) if "'e0' was restarted" in line]
    assert 1 <= len(lost) <= 2
    assert "its fan has stopped" in " ".join(lost)
    assert "its fan has stopped" in restarted
    assert not [line for line in logged(caplog, logging.WARNING) if "given up" in line]


@virtual_time
async def test_a_second_loss_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of("e0")
    async with sim_fleet("a", engines=[engine], scheduler=Idle()):
        for _ in range(3):
            engine.lose("it sleeps")
            await until(lambda: engine.status().state is InstanceState.EMPTY)
    assert len([line for line in logged(caplog, logging.WARNING) if "'e0' was lost" in line]) == 3


@virtual_time
async def test_a_restart_that_fails_is_told_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of("e0")
    async with sim_fleet("a", engines=[engine], scheduler=Idle()):
        engine.lose("its board burned", for_good=True)
        await anyio.sleep(2.0)
    failed = [line for line in logged(caplog, logging.WARNING) if "could not be restarted" in line]
    assert failed
    assert all("its board burned" in line for line in failed)


@pytest.mark.parametrize("planned", [True, False])
@virtual_time
async def test_a_failed_load_is_told_with_the_reason(planned: bool, caplog: pytest.LogCaptureFixture) -> None:
    store: WeightStore = Unreadable(store_of("a"), "a")
    options = {} if planned else {"scheduler": Idle()}
    async with sim_fleet("a", engines=1, store=store, **options) as fleet:
        if planned:
            with pytest.raises(HotswapError):
                await fleet.generate("a", (1,), SOME)
        else:
            with pytest.raises(SwapFailed):
                await fleet.swap("e0", to="a")
    failed = [line for line in logged(caplog, logging.WARNING) if "failed in load" in line]
    assert failed
    assert all("x.bin" in line for line in failed)


@virtual_time
async def test_an_adapter_that_cannot_be_loaded_is_told_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Without(Counting):
        async def load_adapter(self, adapter: Adapter) -> None:
            raise ShardMissing("There is no adapter_config.json.")

    engine = Without("e0")
    async with sim_fleet("a", engines=[engine], adapters=[Adapter("sql", "a")], scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        with pytest.raises(ShardMissing):
            await fleet.generate("a", (1,), SOME, adapter="sql")
    (line,) = logged(caplog, logging.WARNING)
    assert "'sql' was not loaded on 'e0'" in line
    assert "adapter_config.json" in line


class Raising(WrapperEngine):
    """Ends every stream by an error."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(engine_of(name))
        self.error = error

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[TokenStream]:
        raise self.error
        yield  # type: ignore[unreachable]


@pytest.mark.parametrize(
    "error", [InstanceError("no memory for it"), InstanceLost("a bit flipped"), ZeroDivisionError("by 0")]
)
@virtual_time
async def test_a_request_that_is_given_up_is_told_with_the_reason(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async with sim_fleet("a", engines=[Raising("e0", error)], scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        with pytest.raises(type(error)):
            await fleet.generate("a", (1,), SOME)
    (record,) = [r for r in caplog.records if "was given up" in r.getMessage()]
    assert record.levelno >= logging.WARNING
    assert str(error) in record.getMessage()
    assert (record.exc_info is not None) == isinstance(error, ZeroDivisionError), "a fault has its traceback"


@virtual_time
async def test_a_request_whose_router_fails_is_told_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Router):
        def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
            raise ZeroDivisionError("of this router")

    async with sim_fleet("a", router=Broken(), scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        with pytest.raises(ZeroDivisionError):
            await fleet.generate("a", (1,), SOME)
    assert [line for line in logged(caplog, logging.WARNING) if "of this router" in line]


@virtual_time
async def test_what_a_client_asks_wrong_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A client cannot fill the log."""
    async with sim_fleet("a", scheduler=Idle(), max_waiting=0) as fleet:
        for model, prompt in (("b", (1,)), ("a", ()), ("a", (1,) * 5000), ("a", (1,))):
            with pytest.raises(HotswapError):
                await fleet.generate(model, prompt, SOME, deadline_s=0.5)
    assert logged(caplog, logging.WARNING) == []
