"""A swap is done, failed or cancelled; the instance then serves the old model, the new one, or none."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from hotswap import Fleet, InstanceId, InstanceState, Model, ModelId, Sampling, SwapLimits, SwapRecord
from hotswap.abc import (
    Engine,
    HostChunk,
    Manifest,
    ModelCard,
    Shard,
    WeightStore,
    WrapperEngine,
    WrapperStore,
)
from hotswap.errors import (
    ConfigError,
    FleetClosed,
    LoadsExhausted,
    OutOfMemory,
    ShardCorrupt,
    SwapFailed,
    SwapRefused,
    UnknownModel,
)
from hotswap.offline.virtual_time import run, virtual_time
from hotswap.policies import WeightedLoadSwap
from tests.runtime.support import PROFILE, Idle, engine_of, idle, read, sim_fleet, store_of, until

E0 = InstanceId("e0")
LONG = Sampling(max_tokens=2000, ignore_eos=True)


class Unreadable(WrapperStore):
    """Fails to read the models it is told to, after the first chunk."""

    def __init__(self, store: WeightStore, *models: str) -> None:
        super().__init__(store)
        self.models = set(models)

    def open(self, shard: Shard) -> AbstractAsyncContextManager[AsyncIterator[HostChunk]]:
        return self._broken(shard) if shard.model in self.models else super().open(shard)

    @asynccontextmanager
    async def _broken(self, shard: Shard) -> AsyncIterator[AsyncIterator[HostChunk]]:
        async with self.wrapped.open(shard) as chunks:
            yield self._one_chunk(chunks)

    async def _one_chunk(self, chunks: AsyncIterator[HostChunk]) -> AsyncIterator[HostChunk]:
        async for chunk in chunks:
            yield chunk
            raise ShardCorrupt("The file 'x.bin' is shorter than its index says; convert the model again.")


class NoPreload(WrapperEngine):
    """An engine of the five verbs alone."""


class Cramped(WrapperEngine):
    """Thinks that there is room for two models, and finds out that there is not."""

    def can_preload(self, model: ModelCard) -> bool:
        return True

    async def preload(self, model: ModelCard, store: WeightStore) -> None:
        await anyio.lowlevel.checkpoint()
        raise OutOfMemory(f"No room for {model.id!r} beside what is loaded.")

    async def drop_preload(self) -> None:
        await anyio.lowlevel.checkpoint()


class Stuck(NoPreload):
    """Never finishes one of its verbs."""

    def __init__(self, engine: Engine, verb: str) -> None:
        super().__init__(engine)
        self.verb = verb

    async def load(self, model: ModelCard, store: WeightStore) -> None:
        if self.verb == "load" and model.id == "b":
            await anyio.sleep_forever()
        await super().load(model, store)

    async def evict(self, *, deadline_s: float) -> int:
        if self.verb == "evict":
            await anyio.sleep_forever()
        return await super().evict(deadline_s=deadline_s)


def phases(record: SwapRecord) -> list[str]:
    return [phase.name for phase in record.phases]


@virtual_time
async def test_a_swap_evicts_unloads_loads_and_says_how_long_each_took() -> None:
    async with sim_fleet("a", "b", engines=[NoPreload(engine_of("e0"))], scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        record = await fleet.swap("e0", to="b", reason="because")
        assert phases(record) == ["preflight", "evict", "unload", "load"]
        assert (record.model_before, record.model, record.model_after) == ("a", "b", "b")
        assert (record.outcome, record.reason) == ("done", "because")
        assert record.loaded_bytes == 1 << 20
        assert record.tier
        assert record.phase_s("unload") == pytest.approx(PROFILE.unload_s)
        assert record.phase_s("load") >= PROFILE.load_s(1 << 20)
        assert record.seconds == pytest.approx(sum(phase.seconds for phase in record.phases))
        assert fleet.swaps[-1] == record


@virtual_time
async def test_preloading_takes_the_load_out_of_the_downtime() -> None:
    async with sim_fleet("a", "b", engines=[engine_of("e0")], scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        async with fleet.stream("a", (1, 2), LONG) as stream:
            tokens = [await anext(stream) for _ in range(5)]
            record = await fleet.swap("e0", to="b")
            assert phases(record) == ["preflight", "preload", "evict", "unload", "load"]
            assert record.downtime_s < record.phase_s("preload")
            served_meanwhile = stream._request.tokens_so_far[len(tokens) :]
            assert len(served_meanwhile) >= 2


@virtual_time
async def test_a_deadline_lets_short_requests_finish_and_evicts_the_rest() -> None:
    async with sim_fleet("a", "b", engines=1, scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        async with (
            fleet.stream("a", (1,), Sampling(max_tokens=20, ignore_eos=True)) as short,
            fleet.stream("a", (2,), LONG) as long,
        ):
            await anext(short)
            await anext(long)
            record = await fleet.swap("e0", to="b", deadline_s=5.0)
            assert record.num_evicted == 1
            assert record.phase_s("evict") == pytest.approx(5.0, abs=0.1)
            assert len(await short.collect()) == 19
            assert short.num_hops == 1


@virtual_time
async def test_a_second_swap_of_the_same_instance_is_refused() -> None:
    async with sim_fleet("a", "b", engines=1, scheduler=Idle()) as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: fleet.swap("e0", to="a"))
        await until(lambda: fleet.view().instance(E0).swapping)
        with pytest.raises(SwapRefused, match="'a'"):
            await fleet.swap("e0", to="b")
        await until(lambda: fleet.view().instance(E0).model == "a")
        with pytest.raises(SwapRefused, match="already"):
            await fleet.swap("e0", to="a")


@virtual_time
async def test_unknown_names_are_refused_before_anything_moves() -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        with pytest.raises(UnknownModel, match="'a'"):
            await fleet.swap("e0", to="zz")
        with pytest.raises(ConfigError, match="'e1'"):
            await fleet.swap("e9", to="a")
        assert fleet.swaps == ()


@virtual_time
async def test_a_failed_preload_leaves_the_old_model_serving() -> None:
    store = Unreadable(store_of("a", "b"), "b")
    async with sim_fleet("a", "b", engines=1, store=store, scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        async with fleet.stream("a", (1,), Sampling(max_tokens=50, ignore_eos=True)) as stream:
            await anext(stream)
            with pytest.raises(SwapFailed, match="serves 'a'") as failed:
                await fleet.swap("e0", to="b")
            assert failed.value.phase == "preload"
            assert isinstance(failed.value.__cause__, ShardCorrupt)
            assert len(await stream.collect()) == 49
            assert stream.num_hops == 1
        assert fleet.swaps[-1].outcome == "failed"
        assert fleet.swaps[-1].model_after == "a"
        idle(fleet)


@virtual_time
async def test_a_model_that_does_not_fit_beside_the_old_one_is_loaded_after_it() -> None:
    async with sim_fleet("a", "b", engines=[Cramped(engine_of("e0"))], scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        record = await fleet.swap("e0", to="b")
        assert record.outcome == "done"
        assert record.model_after == "b"
        assert phases(record) == ["preflight", "preload", "evict", "unload", "load"]
        idle(fleet)


@virtual_time
async def test_a_failed_load_leaves_the_instance_empty_and_the_next_swap_works() -> None:
    store = Unreadable(store_of("a", "b"), "b")
    async with sim_fleet(
        "a", "b", engines=[NoPreload(engine_of("e0"))], store=store, scheduler=Idle()
    ) as fleet:
        await fleet.swap("e0", to="a")
        with pytest.raises(SwapFailed, match="EMPTY") as failed:
            await fleet.swap("e0", to="b")
        assert failed.value.phase == "load"
        assert fleet.view().instance(E0).state is InstanceState.EMPTY
        assert fleet.view().instance(E0).weight_bytes == 0
        await fleet.swap("e0", to="a")
        await read(fleet, "a", (3,), Sampling(max_tokens=5))


@virtual_time
async def test_requests_of_a_model_that_cannot_load_are_told_why_and_others_go_on() -> None:
    store = Unreadable(store_of("a", "b"), "b")
    async with sim_fleet("a", "b", store=store, max_load_attempts=2) as fleet:
        with pytest.raises(LoadsExhausted, match=r"x\.bin"):
            await fleet.generate("b", (1,))
        await read(fleet, "a", (1,), Sampling(max_tokens=5))
        store.models.clear()
        await read(fleet, "b", (1,), Sampling(max_tokens=5))
        idle(fleet)


@pytest.mark.parametrize("verb", ["load", "evict"])
@virtual_time
async def test_each_phase_has_a_time_limit(verb: str) -> None:
    engine = Stuck(engine_of("e0"), verb)
    limits = SwapLimits(load_s=3, evict_s=3)
    async with sim_fleet("a", "b", engines=[engine], scheduler=Idle(), limits=limits) as fleet:
        await fleet.swap("e0", to="a")
        started_s = anyio.current_time()
        with pytest.raises(SwapFailed, match="limit of 3 s") as failed:
            await fleet.swap("e0", to="b")
        assert failed.value.phase == verb
        assert anyio.current_time() - started_s == pytest.approx(3, abs=0.2)
        assert not fleet.view().instance(E0).swapping


@virtual_time
async def test_unload_frees_an_instance() -> None:
    async with sim_fleet("a", engines=1, scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        record = await fleet.unload("e0")
        assert record.model_after is None
        assert fleet.view().instance(E0).state is InstanceState.EMPTY


class Unmanifest(WrapperStore):
    """Forgets a model after the fleet has opened."""

    forgotten = ""

    async def manifest(self, model: ModelId) -> Manifest:
        if model == self.forgotten:
            raise ShardCorrupt(f"The index of {model!r} is gone.")
        return await super().manifest(model)


@virtual_time
async def test_preflight_fails_before_anything_is_evicted() -> None:
    store = Unmanifest(store_of("a", "b"))
    async with sim_fleet("a", "b", engines=1, store=store, scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        store.forgotten = "b"
        with pytest.raises(SwapFailed) as failed:
            await fleet.swap("e0", to="b")
        assert failed.value.phase == "preflight"
        assert fleet.view().instance(E0).model == "a"


@virtual_time
async def test_a_planned_swap_that_failed_is_not_tried_again_at_once() -> None:
    store = Unreadable(store_of("a"), "a")
    async with sim_fleet("a", store=store, models=[Model("a", min_replicas=1)]) as fleet:
        await anyio.sleep(60)
        attempts = len(fleet.swaps)
        assert 4 <= attempts <= 20
        assert all(record.outcome == "failed" for record in fleet.swaps)


def swap_cancelled_after(seconds: float, *, preload: bool) -> tuple[str | None, bool]:
    """Cancel a swap from a to b after `seconds`; return what is served then, and whether it was cut."""

    async def scenario() -> tuple[str | None, bool]:
        engine: Engine = engine_of("e0") if preload else NoPreload(engine_of("e0"))
        async with sim_fleet("a", "b", engines=[engine, engine_of("e1")], scheduler=Idle()) as fleet:
            await fleet.swap("e0", to="a")
            await fleet.swap("e1", to="a")
            async with anyio.create_task_group() as clients:
                for n in range(4):
                    clients.start_soon(read, fleet, "a", (n,), Sampling(max_tokens=40, ignore_eos=True))
                await anyio.sleep(0.1)
                with anyio.move_on_after(seconds) as scope:
                    await fleet.swap("e0", to="b", deadline_s=0.1)
            view = fleet.view().instance(E0)
            assert view.state in (InstanceState.SERVING, InstanceState.EMPTY)
            assert fleet.swaps[-1].model_after == view.model
            assert view.preloaded is None
            assert view.weight_bytes == (0 if view.model is None else 1 << 20)
            idle(fleet)
            await fleet.unload("e0")
            await fleet.swap("e0", to="b")
            await read(fleet, "b", (1,), Sampling(max_tokens=5))
            return view.model, scope.cancelled_caught

    return run(scenario)


@pytest.mark.parametrize("preload", [True, False])
def test_a_swap_cancelled_at_any_time_ends_on_the_old_the_new_or_no_model(preload: bool) -> None:
    ends = {swap_cancelled_after(step * 0.002, preload=preload) for step in range(180)}
    assert {model for model, cut in ends if cut} <= {"a", None, "b"}
    assert ("b", False) in ends
    assert ("a", True) in ends


@virtual_time
async def test_a_manual_swap_does_not_interleave_with_the_scheduler() -> None:
    scheduler = WeightedLoadSwap(t1=0, t2=100, b=1.0, sigmas=0)
    async with sim_fleet("a", "b", "c", engines=2, scheduler=scheduler, interval_s=0.05) as fleet:
        async with anyio.create_task_group() as clients:
            for turn in range(20):
                clients.start_soon(read, fleet, "abc"[turn % 3], (turn,), Sampling(max_tokens=60))
            for turn in range(20):
                await anyio.sleep(0.1)
                try:
                    await fleet.swap(f"e{turn % 2}", to="abc"[turn % 3])
                except SwapRefused:
                    continue
        for name in ("e0", "e1"):
            mine = sorted((r.started_s, r.started_s + r.seconds) for r in fleet.swaps if r.instance == name)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(mine))
        idle(fleet)


@pytest.mark.parametrize("pause_s", [0.01, 0.09, 0.11])
@pytest.mark.parametrize("preload", [True, False])
@virtual_time
async def test_a_fleet_closes_only_once_swaps_by_hand_have_ended(preload: bool, pause_s: float) -> None:
    outcome: list[Exception] = []
    engine = engine_of("e0") if preload else NoPreload(engine_of("e0"))

    async def by_hand(fleet: Fleet) -> None:
        try:
            await fleet.swap("e0", to="b")
        except FleetClosed as exc:
            outcome.append(exc)

    async with anyio.create_task_group() as operators:
        async with sim_fleet("a", "b", engines=[engine], scheduler=Idle()) as fleet:
            await fleet.swap("e0", to="a")
            operators.start_soon(by_hand, fleet)
            await anyio.sleep(pause_s)
        view = engine.status()
        assert view.state is InstanceState.EMPTY
        assert view.weight_bytes == 0
        assert fleet.swaps[-1].outcome == "cancelled"
    assert len(outcome) == 1
    assert engine.status().state is InstanceState.EMPTY
