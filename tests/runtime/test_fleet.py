"""What a client and an operator of a fleet rely on."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from hotswap import Fleet, FleetView, InstanceId, InstanceState, Model, Request, Sampling, SwapLimits
from hotswap.abc import Router
from hotswap.backends.sim import SimStore
from hotswap.errors import (
    ConfigError,
    DeadlineExceeded,
    FleetClosed,
    InvalidRequest,
    ModelTooLarge,
    PromptTooLong,
    QueueFull,
    ShardMissing,
    UnknownModel,
)
from hotswap.offline.virtual_time import virtual_time
from hotswap.policies import LeastLoadedRouter
from tests.runtime.support import (
    Idle,
    engine_of,
    expected,
    idle,
    models,
    read,
    sim_fleet,
    store_of,
    until,
)

PROMPT = (5, 6, 7)


@virtual_time
async def test_a_request_for_an_unserved_model_makes_the_scheduler_load_it() -> None:
    async with sim_fleet("a", "b") as fleet:
        await read(fleet, "a", PROMPT, Sampling(max_tokens=20))
        assert [record.model for record in fleet.swaps] == ["a"]
        idle(fleet)


@virtual_time
async def test_more_models_than_engines_are_all_served() -> None:
    names = [f"m{n}" for n in range(6)]
    async with sim_fleet(*names, engines=2) as fleet:
        async with anyio.create_task_group() as clients:
            for turn in range(3):
                for name in names:
                    clients.start_soon(read, fleet, name, (turn, 9), Sampling(max_tokens=30))
        assert {record.model for record in fleet.swaps} == set(names)
        idle(fleet)


@virtual_time
async def test_generate_returns_the_whole_generation() -> None:
    async with sim_fleet("a") as fleet:
        done = await fleet.generate("a", PROMPT, Sampling(max_tokens=9, ignore_eos=True))
        assert len(done.tokens) == 9
        assert done.finish_reason == "length"
        assert done.text == ""


@virtual_time
async def test_what_can_never_be_served_is_refused_at_once() -> None:
    store = SimStore({"a": 1 << 20, "huge": 1 << 40})
    async with sim_fleet("a", store=store, models=models("a", "huge")) as fleet:
        refused: list[tuple[type[Exception], str, str | tuple[int, ...]]] = [
            (UnknownModel, "nope", PROMPT),
            (ModelTooLarge, "huge", PROMPT),
            (InvalidRequest, "a", ()),
            (InvalidRequest, "a", "text without a tokenizer"),
        ]
        for error, model, prompt in refused:
            with pytest.raises(error):
                async with fleet.stream(model, prompt):
                    raise AssertionError("the stream was opened")
        with pytest.raises(InvalidRequest, match="stop_token_ids"):
            await fleet.generate("a", PROMPT, Sampling(stop=("x",)))
        assert anyio.current_time() == 0
        idle(fleet)


@virtual_time
async def test_a_prompt_as_long_as_the_context_is_refused() -> None:
    async with sim_fleet("a", store=store_of("a", context=8)) as fleet:
        with pytest.raises(PromptTooLong, match="8"):
            await fleet.generate("a", range(1, 9))
        assert (await fleet.generate("a", range(1, 8))).finish_reason in ("length", "stop")


@virtual_time
async def test_a_model_keeps_the_shorter_of_two_contexts() -> None:
    async with sim_fleet("a", models=[Model("a", max_context_tokens=5)]) as fleet:
        with pytest.raises(PromptTooLong):
            await fleet.generate("a", (1, 2, 3, 4, 5))


@virtual_time
async def test_a_full_waiting_room_says_when_to_come_back() -> None:
    async with sim_fleet("a", scheduler=Idle(), max_waiting=2) as fleet, anyio.create_task_group() as clients:
        for _ in range(2):
            clients.start_soon(fleet.generate, "a", PROMPT)
        await until(lambda: len(fleet.view().waiting) == 2)
        with pytest.raises(QueueFull) as refused:
            await fleet.generate("a", PROMPT)
        assert refused.value.retry_after_s > 0
        clients.cancel_scope.cancel()
    idle(fleet)


@virtual_time
async def test_a_client_that_leaves_frees_its_blocks() -> None:
    async with sim_fleet("a") as fleet:
        async with fleet.stream("a", PROMPT, Sampling(max_tokens=1000, ignore_eos=True)) as stream:
            await anext(stream)
            assert fleet.view().instances[0].num_requests + fleet.view().instances[1].num_requests == 1
        idle(fleet)


@virtual_time
async def test_a_client_that_leaves_while_waiting_leaves_the_queue() -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        with anyio.move_on_after(1):
            await fleet.generate("a", PROMPT)
        idle(fleet)


@virtual_time
async def test_a_deadline_ends_the_stream_by_its_own_error() -> None:
    async with sim_fleet("a") as fleet:
        with pytest.raises(DeadlineExceeded):
            await fleet.generate("a", PROMPT, Sampling(max_tokens=4000, ignore_eos=True), deadline_s=1.0)
        assert anyio.current_time() == pytest.approx(1.0, abs=0.1)
        idle(fleet)


@virtual_time
async def test_a_closing_fleet_tells_the_streams_that_are_open() -> None:
    outcome: list[BaseException] = []

    async def client(fleet: Fleet, opened: anyio.Event) -> None:
        try:
            async with fleet.stream("a", PROMPT, Sampling(max_tokens=4000, ignore_eos=True)) as stream:
                await anext(stream)
                opened.set()
                await stream.collect()
        except FleetClosed as exc:
            outcome.append(exc)

    async with anyio.create_task_group() as clients, sim_fleet("a") as fleet:
        opened = anyio.Event()
        clients.start_soon(client, fleet, opened)
        await opened.wait()
    assert len(outcome) == 1
    with pytest.raises(FleetClosed):
        await fleet.generate("a", PROMPT)


@virtual_time
async def test_higher_priority_leaves_the_waiting_room_first() -> None:
    finished: list[int] = []

    async def client(fleet: Fleet, priority: int) -> None:
        await fleet.generate("a", PROMPT, Sampling(max_tokens=5, ignore_eos=True), priority=priority)
        finished.append(priority)

    engine = engine_of("e0", max_requests=1)
    async with (
        sim_fleet("a", engines=[engine], scheduler=Idle()) as fleet,
        anyio.create_task_group() as clients,
    ):
        for priority in (0, 1, 2):
            clients.start_soon(client, fleet, priority)
        await until(lambda: len(fleet.view().waiting) == 3)
        await fleet.swap("e0", to="a")
    assert finished == [2, 1, 0]


class Broken(Router):
    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        raise ZeroDivisionError("a router's own fault")


class Lying(Router):
    """Names an instance that does not serve the model, whatever is asked."""

    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        return InstanceId("e1")


@pytest.mark.parametrize("answer", ["nope", 3, ["e0"]], ids=repr)
@virtual_time
async def test_a_router_that_names_no_instance_fails_the_request_alone(answer: Any) -> None:
    class Wrong(LeastLoadedRouter):
        def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
            return answer if request.prompt == (1,) else super().route(request, fleet)

    async with sim_fleet("a", router=Wrong()) as fleet:
        await fleet.swap("e0", to="a")
        with pytest.raises(ConfigError, match="no such instance"):
            await fleet.generate("a", (1,))
        assert (await fleet.generate("a", (2,))).tokens


@virtual_time
async def test_several_readers_of_one_stream_share_its_tokens_and_all_get_its_end() -> None:
    got: list[list[int]] = []
    sampling = Sampling(max_tokens=20, ignore_eos=True)
    async with sim_fleet("a") as fleet, fleet.stream("a", (1,), sampling) as stream:

        async def read() -> None:
            got.append([token.index for token in await stream.collect()])

        async with anyio.create_task_group() as readers:
            for _ in range(3):
                readers.start_soon(read)
    assert sorted(index for each in got for index in each) == list(range(20))


@virtual_time
async def test_a_router_that_raises_fails_the_request_alone() -> None:
    async with sim_fleet("a", router=Broken()) as fleet:
        with pytest.raises(ZeroDivisionError):
            await fleet.generate("a", PROMPT)
        idle(fleet)
        assert anyio.current_time() < 1


@virtual_time
async def test_an_instance_that_does_not_serve_the_model_is_never_asked() -> None:
    async with sim_fleet("a", "b", router=Lying(), scheduler=Idle()) as fleet:
        await fleet.swap("e1", to="b")
        with anyio.move_on_after(5):
            await fleet.generate("a", PROMPT)
            raise AssertionError("served by an instance of another model")
        idle(fleet)


@virtual_time
async def test_a_scheduler_that_raises_does_not_end_the_fleet(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(Idle):
        def plan(self, fleet: FleetView) -> tuple[()]:
            raise ZeroDivisionError("a scheduler's own fault")

    async with sim_fleet("a", scheduler=Faulty()) as fleet:
        await fleet.swap("e0", to="a")
        await read(fleet, "a", PROMPT, Sampling(max_tokens=5))
    assert "failed to plan" in caplog.text


def test_two_engines_or_models_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="e0"):
        sim_fleet("a", engines=[engine_of("e0"), engine_of("e0")])
    with pytest.raises(ConfigError, match="'a'"):
        sim_fleet("a", models=models("a", "a"))


@virtual_time
async def test_the_repr_tells_the_state() -> None:
    async with sim_fleet("a", "b", scheduler=Idle()) as fleet:
        assert repr(fleet) == "<Fleet [requests: 0 running, 0 waiting | instances: 2 EMPTY]>"
        await fleet.swap("e0", to="a")
        assert "1 SERVING a" in repr(fleet)


@virtual_time
async def test_a_request_crosses_a_swap_by_hand_without_a_seam() -> None:
    async with sim_fleet("a", "b", scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        await fleet.swap("e1", to="b")
        async with fleet.stream("a", PROMPT, Sampling(max_tokens=60, ignore_eos=True)) as stream:
            tokens = [await anext(stream) for _ in range(20)]
            record = await fleet.swap("e0", to="b", reason="test")
            assert record.num_evicted == 1
            assert fleet.view().instance(InstanceId("e0")).model == "b"
            assert (await fleet.swap("e1", to="a")).outcome == "done"
            tokens += await stream.collect()
            assert [token.id for token in tokens] == expected(stream.request)
            assert stream.num_hops == 2
        idle(fleet)


@virtual_time
async def test_a_lost_instance_sends_its_requests_elsewhere_and_comes_back() -> None:
    engines = [engine_of("e0"), engine_of("e1")]
    async with sim_fleet("a", engines=engines, scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        await fleet.swap("e1", to="a")
        async with fleet.stream("a", PROMPT, Sampling(max_tokens=60, ignore_eos=True)) as stream:
            tokens = [await anext(stream) for _ in range(10)]
            at = next(i.id for i in fleet.view().instances if i.num_requests)
            next(e for e in engines if e.id == at).lose("pulled the plug")
            tokens += await stream.collect()
            assert [token.id for token in tokens] == expected(stream.request)
        await until(lambda: fleet.view().instance(at).state is InstanceState.EMPTY)
        idle(fleet)


@virtual_time
async def test_minimum_replicas_are_restored_after_a_loss() -> None:
    engines = [engine_of("e0"), engine_of("e1")]
    registered = [Model("a", min_replicas=1), Model("b", min_replicas=1)]
    async with sim_fleet("a", "b", engines=engines, models=registered) as fleet:

        def min_replicas_serve() -> bool:
            return {i.model for i in fleet.view().instances if i.state is InstanceState.SERVING} == {"a", "b"}

        await until(min_replicas_serve)
        engines[0].lose()
        assert not min_replicas_serve()
        await until(min_replicas_serve)


@virtual_time
async def test_least_loaded_spreads_requests() -> None:
    async with sim_fleet("a", scheduler=Idle(), router=LeastLoadedRouter()) as fleet:
        await fleet.swap("e0", to="a")
        await fleet.swap("e1", to="a")
        async with anyio.create_task_group() as clients:
            for _ in range(6):
                clients.start_soon(fleet.generate, "a", PROMPT, Sampling(max_tokens=10, ignore_eos=True))
            await until(lambda: sum(i.num_requests for i in fleet.view().instances) == 6)
            assert [i.num_requests for i in fleet.view().instances] == [3, 3]


@virtual_time
async def test_an_error_of_the_block_leaves_the_fleet_as_itself() -> None:
    with pytest.raises(ZeroDivisionError):
        async with sim_fleet("a"):
            raise ZeroDivisionError
    with pytest.raises(ShardMissing, match="'zz'"):
        async with sim_fleet("a", models=models("a", "zz")):
            raise AssertionError("opened without the model")


@virtual_time
async def test_ready_waits_for_min_replicas_and_for_nothing_else() -> None:
    registered = [Model("a", min_replicas=1), Model("b", min_replicas=1), Model("c")]
    async with sim_fleet("a", "b", "c", models=registered) as fleet:
        with anyio.fail_after(10):
            await fleet.ready()
        serving = {i.model for i in fleet.view().instances if i.state is InstanceState.SERVING}
        assert serving == {"a", "b"}
        before_s = anyio.current_time()
        await fleet.ready()
        assert anyio.current_time() == before_s
    with pytest.raises(FleetClosed):
        await fleet.ready()


@virtual_time
async def test_the_waiting_room_takes_no_more_than_it_may_of_those_who_come_at_once() -> None:
    refused: list[QueueFull] = []

    async def client(fleet: Fleet) -> None:
        try:
            await fleet.generate("a", PROMPT)
        except QueueFull as exc:
            refused.append(exc)

    async with sim_fleet("a", scheduler=Idle(), max_waiting=2) as fleet, anyio.create_task_group() as clients:
        for _ in range(5):
            clients.start_soon(client, fleet)
        await anyio.sleep(1)
        assert len(refused) == 3
        assert len(fleet.view().waiting) == 2
        clients.cancel_scope.cancel()
    idle(fleet)


@virtual_time
async def test_a_full_waiting_room_lets_those_pass_who_need_not_wait() -> None:
    async with (
        sim_fleet("a", "b", scheduler=Idle(), max_waiting=1) as fleet,
        anyio.create_task_group() as clients,
    ):
        await fleet.swap("e0", to="b")
        clients.start_soon(fleet.generate, "a", PROMPT)
        await until(lambda: len(fleet.view().waiting) == 1)
        await read(fleet, "b", PROMPT, Sampling(max_tokens=5))
        clients.cancel_scope.cancel()


@pytest.mark.parametrize(
    "wrong", [{"interval_s": 0.0}, {"interval_s": -1.0}, {"max_waiting": -1}, {"max_load_attempts": 0}]
)
def test_settings_that_could_never_work_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        sim_fleet("a", **wrong)


def test_a_swap_phase_without_time_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="load_s"):
        SwapLimits(load_s=0)


@virtual_time
async def test_a_fleet_that_is_not_open_says_so_before_anything_else() -> None:
    fleet = sim_fleet("a")
    with pytest.raises(FleetClosed):
        await fleet.swap("e0", to="a")
    with pytest.raises(FleetClosed):
        await fleet.generate("a", PROMPT)


@virtual_time
async def test_an_instance_was_used_last_when_a_request_came_or_left() -> None:
    def used_s(fleet: Fleet) -> list[float | None]:
        return [instance.last_used_s for instance in fleet.view().instances]

    async with sim_fleet("a", scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        assert used_s(fleet) == [None, None]
        async with fleet.stream("a", PROMPT, Sampling(max_tokens=50, ignore_eos=True)) as stream:
            came_s = anyio.current_time()
            await anyio.sleep(0.1)
            assert used_s(fleet) == [came_s, None]
            await stream.collect()
        ended_s = anyio.current_time()
        await anyio.sleep(5.0)
        assert used_s(fleet) == [ended_s, None]
        assert ended_s > came_s + 0.1
        await fleet.unload("e0")
        assert used_s(fleet) == [ended_s, None]
