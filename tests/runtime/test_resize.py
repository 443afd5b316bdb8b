"""KV pools that a scheduler resizes: in order, traced and told, and refused where they make no sense."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import anyio
import pytest

from hotswap import DeviceBudget, Fleet, FleetView, InstanceId, Model, ModelId, Sampling
from hotswap.abc import Action, ModelCard, Resize, Scheduler, WrapperEngine
from hotswap.backends.sim import SimEngine, SimStore, sim_manifest
from hotswap.errors import ConfigError, InstanceError, OutOfMemory, PromptTooLong
from hotswap.offline.replay import dump_view, load_view
from hotswap.offline.virtual_time import virtual_time
from tests.runtime.support import PROFILE, WEIGHT_BYTES, Idle, engine_of, expected, idle, sim_fleet, until
from tests.runtime.test_telemetry import Recorder

BLOCK_BYTES = 16 * 64
FLOOR_BYTES = WEIGHT_BYTES + 64 * BLOCK_BYTES
E0, E1 = InstanceId("e0"), InstanceId("e1")
LONG = Sampling(max_tokens=400, ignore_eos=True)


class Plans(Scheduler):
    """Plans actions once."""

    def __init__(self, *actions: Action) -> None:
        self.actions: tuple[Action, ...] = actions

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        actions, self.actions = self.actions, ()
        return actions


class FixedEngine(SimEngine):
    """An engine that cannot resize its KV pool."""

    resize_kv = None  # type: ignore[assignment]


def store() -> SimStore:
    facts: dict[str, Any] = {"max_context_tokens": 4096, "eos_token_ids": (0,), "kv_bytes_per_token": 64}
    return SimStore([sim_manifest(name, WEIGHT_BYTES, **facts) for name in "ab"])


def budget_of(num_blocks: int) -> DeviceBudget:
    """Of two engines: their weights, and so many KV blocks together."""
    return DeviceBudget(2 * WEIGHT_BYTES + num_blocks * BLOCK_BYTES, name="d0")


def sharing(name: str, budget: DeviceBudget, **options: Any) -> SimEngine:
    return engine_of(name, device_budget=budget, floor_bytes=FLOOR_BYTES, **options)


def fleet_of(scheduler: Scheduler, num_blocks: int = 256, **options: Any) -> Fleet:
    budget = budget_of(num_blocks)
    engines = [sharing(name, budget) for name in ("e0", "e1")]
    return sim_fleet("a", "b", engines=engines, store=store(), scheduler=scheduler, **options)


def blocks(fleet: Fleet) -> list[int]:
    return [view.num_kv_blocks for view in fleet.view().instances]


@virtual_time
async def test_a_resize_is_traced_logged_and_told(caplog: pytest.LogCaptureFixture) -> None:
    plans, recorder = Plans(), Recorder()
    async with fleet_of(plans, interval_s=0.1, tracer_provider=recorder.provider) as fleet:
        await fleet.swap("e0", to="a")
        assert blocks(fleet) == [64, 0]
        events = fleet.events()
        with caplog.at_level(logging.INFO, "hotswap"):
            plans.actions = (Resize(instance=E0, kv_blocks=1000, reason="its queue lacks blocks"),)
            await until(lambda: blocks(fleet) == [192, 0])
        told = [(event.instance, event.reason) for event in await events.take() if event.kind == "kv_resized"]
        idle(fleet)
    assert told == [("e0", "its queue lacks blocks")]
    assert "'e0' has 192 KV blocks now (its queue lacks blocks)" in caplog.text
    (span,) = recorder.spans("hotswap.resize")
    assert dict(span.attributes or {}) == {
        "hotswap.instance": "e0",
        "hotswap.swap.reason": "its queue lacks blocks",
        "hotswap.kv.wanted_blocks": 1000,
        "hotswap.kv.reached_blocks": 192,
    }


@virtual_time
async def test_memory_that_one_resize_gives_is_there_for_the_next_of_the_plan() -> None:
    plans, recorder = Plans(), Recorder()
    async with (
        fleet_of(plans, interval_s=0.1, tracer_provider=recorder.provider) as fleet,
        anyio.create_task_group() as clients,
    ):
        await fleet.swap("e0", to="a")
        await fleet.swap("e1", to="b")
        for number in range(8):
            clients.start_soon(fleet.generate, "a", (number,) * 600, LONG)
        await until(lambda: blocks(fleet) == [192, 64])
        plans.actions = (Resize(instance=E0, kv_blocks=100), Resize(instance=E1, kv_blocks=150))
        await until(lambda: len(recorder.spans("hotswap.resize")) == 2)
    reached = [
        (span.attributes or {})["hotswap.kv.reached_blocks"] for span in recorder.spans("hotswap.resize")
    ]
    assert reached == [100, 150]


@virtual_time
async def test_a_pool_that_shrinks_below_its_requests_has_the_last_ones_compute_again() -> None:
    plans = Plans()
    async with fleet_of(plans, interval_s=0.1) as fleet, anyio.create_task_group() as clients:
        await fleet.swap("e0", to="a")
        streamed: dict[int, list[int]] = {}

        async def ask(number: int) -> None:
            async with fleet.stream("a", tuple(range(number, number + 400)), LONG) as stream:
                streamed[number] = [token.id for token in await stream.collect()]
                assert streamed[number] == expected(stream.request)

        for number in range(4):
            clients.start_soon(ask, number)
        await until(lambda: fleet.view().instance(E0).num_running == 4)
        grown = fleet.view().instance(E0)
        assert grown.num_kv_blocks > 64, "it grew for its queue"
        plans.actions = (Resize(instance=E0, kv_blocks=1),)
        await until(lambda: bool(fleet.view().instance(E0).preempted))
        await until(lambda: len(streamed) == 4)
        idle(fleet)


@pytest.mark.parametrize(
    ("action", "told"),
    [
        (Resize(instance=InstanceId("e9"), kv_blocks=8), "There is no instance 'e9'"),
        (Resize(instance=E0, kv_blocks=0), "kv_blocks is 0"),
        (Resize(instance=E0, kv_blocks=8.5), "kv_blocks is 8.5"),  # type: ignore[arg-type]
        (Resize(instance=InstanceId("plain"), kv_blocks=8), "'plain' cannot resize its KV pool"),
    ],
)
@virtual_time
async def test_resizes_that_make_no_sense_are_logged(
    action: Resize, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [sharing("e0", budget_of(256)), WrapperEngine(FixedEngine("plain", PROFILE))]
    plans = Plans(action)
    async with sim_fleet("a", "b", engines=engines, store=store(), scheduler=plans) as fleet:
        await until(lambda: not plans.actions)
        await fleet.swap("e0", to="a")
        assert fleet.view().instance(E0).num_kv_blocks == 64
    assert "was not begun" in caplog.text
    assert told in caplog.text


@virtual_time
async def test_a_wrapped_engine_is_resized_like_any_other() -> None:
    budget, plans = budget_of(256), Plans()
    engines = [WrapperEngine(WrapperEngine(sharing("e0", budget))), sharing("e1", budget)]
    async with sim_fleet("a", engines=engines, store=store(), scheduler=plans, interval_s=0.1) as fleet:
        await fleet.swap("e0", to="a")
        plans.actions = (Resize(instance=E0, kv_blocks=100),)
        await until(lambda: blocks(fleet) == [100, 0])


@virtual_time
async def test_an_engine_that_fails_to_resize_goes_on_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    plans = Plans()
    async with sim_fleet("a", engines=[engine_of("e0")], scheduler=plans, interval_s=0.1) as fleet:
        await fleet.swap("e0", to="a")
        plans.actions = (Resize(instance=E0, kv_blocks=8),)
        await until(lambda: "was not resized" in caplog.text)
        assert "Engine 'e0' has no device_budget" in caplog.text
        assert blocks(fleet) == [512]


@virtual_time
async def test_an_instance_without_a_model_is_not_resized(caplog: pytest.LogCaptureFixture) -> None:
    plans = Plans(Resize(instance=E0, kv_blocks=8))
    async with fleet_of(plans) as fleet:
        await until(lambda: not plans.actions)
        assert blocks(fleet) == [0, 0]
    assert "not" not in caplog.text


@virtual_time
async def test_a_pool_is_resized_by_hand_as_a_plan_would() -> None:
    async with fleet_of(Idle()) as fleet:
        with pytest.raises(InstanceError, match="'e0' serves no model"):
            await fleet.resize("e0", kv_blocks=100)
        await fleet.swap("e0", to="a")
        await fleet.swap("e1", to="b")
        events = fleet.events()
        assert await fleet.resize("e0", kv_blocks=100, reason="more of a") == 100
        assert await fleet.resize("e1", kv_blocks=1000) == 192, "e0 gives what is free above its floor"
        assert await fleet.resize("e1", kv_blocks=1) == 64
        told = [event.reason for event in await events.take() if event.kind == "kv_resized"]
        assert told == ["more of a", "by hand", "by hand"]
        idle(fleet)


@virtual_time
@pytest.mark.parametrize("wrong", [0, 1.5, True, None])
async def test_a_resize_by_hand_of_what_is_none_is_refused(wrong: Any) -> None:
    async with sim_fleet(
        "a", engines=[FixedEngine("plain", PROFILE)], store=store(), scheduler=Idle()
    ) as fleet:
        with pytest.raises(ConfigError, match="kv_blocks is"):
            await fleet.resize("plain", kv_blocks=wrong)
        with pytest.raises(ConfigError, match="no instance 'e9'"):
            await fleet.resize("e9", kv_blocks=8)
        with pytest.raises(ConfigError, match="'plain' cannot resize its KV pool"):
            await fleet.resize("plain", kv_blocks=8)


@virtual_time
async def test_an_engine_that_hangs_in_a_resize_fails_that_call_alone() -> None:
    class Hanging(SimEngine):
        async def resize_kv(self, num_blocks: int) -> int:
            await anyio.sleep_forever()
            raise AssertionError

    engine = Hanging("e0", PROFILE, kv_blocks=256, device_budget=budget_of(256), floor_bytes=FLOOR_BYTES)
    async with sim_fleet("a", engines=[engine], store=store(), scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        with pytest.raises(InstanceError, match="longer than 10 s"):
            await fleet.resize("e0", kv_blocks=8)
        plain = await fleet.generate("a", [1, 2, 3], Sampling(max_tokens=4))
        assert len(plain.tokens) == 4
        idle(fleet)


@virtual_time
async def test_views_tell_of_pools_that_can_be_resized_and_are_replayed() -> None:
    async with fleet_of(Idle()) as fleet:
        await fleet.swap("e0", to="a")
        view = fleet.view()
        held, empty = view.instances
    assert (held.device_budget, held.kv_block_bytes) == ("d0", BLOCK_BYTES)
    assert (held.least_kv_blocks, held.num_kv_blocks, held.most_kv_blocks) == (64, 64, 192)
    assert held.max_tokens == 64 * 16, "a request gets what the floor holds, whatever the pool has"
    assert (empty.least_kv_blocks, empty.most_kv_blocks) == (0, 0)
    assert load_view(dump_view(view)).instances == view.instances


# ---------------------------------------------------------------------- the simulated engine


@virtual_time
async def test_a_request_that_the_floor_does_not_hold_is_refused_at_once() -> None:
    async with fleet_of(Idle()) as fleet:
        await fleet.swap("e0", to="a")
        with pytest.raises(PromptTooLong, match="1024"):
            await fleet.generate("a", (1,) * 1000, Sampling(max_tokens=26))
        assert len((await fleet.generate("a", (1,) * 1000, Sampling(max_tokens=25))).tokens) > 0


@virtual_time
async def test_free_blocks_go_to_the_engine_whose_queue_lacks_them_and_come_back() -> None:
    async with fleet_of(Idle()) as fleet:
        await fleet.swap("e0", to="a")
        await fleet.swap("e1", to="b")
        for model, instance in (("a", E0), ("b", E1), ("a", E0)):
            async with anyio.create_task_group() as clients:
                for number in range(8):
                    clients.start_soon(fleet.generate, model, (number,) * 350, LONG)
                await until(lambda at=instance: fleet.view().instance(at).num_running >= 4)  # type: ignore[misc]
                await until(lambda at=instance: fleet.view().instance(at).num_kv_blocks > 180)  # type: ignore[misc]
                assert sum(blocks(fleet)) <= 256
        idle(fleet)


@virtual_time
async def test_a_floor_that_holds_no_block_beside_the_weights_is_refused() -> None:
    budget = DeviceBudget(4 * WEIGHT_BYTES)
    engine = SimEngine("e0", PROFILE, device_budget=budget, floor_bytes=WEIGHT_BYTES)
    models = store()
    async with engine:
        card = ModelCard.of(Model("a"), await models.manifest(ModelId("a")))
        with pytest.raises(OutOfMemory, match="raise its floor_bytes"):
            await engine.load(card, models)
        assert budget.held_bytes == 0
        with pytest.raises(InstanceError, match="can resize its KV pool only while SERVING"):
            await engine.resize_kv(8)


@virtual_time
async def test_unloads_losses_and_the_end_of_an_engine_give_everything_back() -> None:
    budget = budget_of(256)
    engines = [sharing(name, budget) for name in ("e0", "e1")]
    async with sim_fleet("a", "b", engines=engines, store=store(), scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        await fleet.swap("e1", to="b")
        held = budget.held_bytes
        assert held == 2 * FLOOR_BYTES
        await fleet.swap("e0", to="b")  # with a preload beside
        assert budget.held_bytes == held
        await fleet.unload("e0")
        assert budget.held_bytes == FLOOR_BYTES
        engines[1].lose()
        assert budget.held_bytes == 0
    assert budget.leases == ()


@virtual_time
async def test_every_resize_makes_the_next_step_longer() -> None:
    seconds = []
    for resize_s in (0.0, 0.5):
        profile = replace(PROFILE, kv_resize_s=resize_s)
        budget = DeviceBudget(FLOOR_BYTES + 192 * BLOCK_BYTES)
        engine = SimEngine(
            "e0", profile, kv_blocks=512, device_budget=budget, floor_bytes=FLOOR_BYTES, max_requests=8
        )
        async with sim_fleet("a", engines=[engine], store=store(), scheduler=Idle()) as fleet:
            await fleet.swap("e0", to="a")
            await fleet.generate("a", (1,), Sampling(max_tokens=2, ignore_eos=True))
            await engine.resize_kv(128)
            began_s = anyio.current_time()
            await fleet.generate("a", (1,), Sampling(max_tokens=2, ignore_eos=True))
            seconds.append(anyio.current_time() - began_s)
    assert seconds[1] - seconds[0] == pytest.approx(0.5)
