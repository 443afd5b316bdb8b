"""Models that come and go while a fleet serves: others are undisturbed, and each comes or goes as a whole."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest

from hotswap import Adapter, Fleet, InstanceId, InstanceState, Model, ModelId, Sampling
from hotswap.abc import Manifest, Tokenizer, WrapperStore
from hotswap.errors import (
    ConfigError,
    FleetClosed,
    HotswapError,
    MemoryNotReclaimed,
    PromptTooLong,
    ShardCorrupt,
    ShardMissing,
    StoreError,
    SwapFailed,
    UnknownAdapter,
    UnknownModel,
)
from hotswap.offline.virtual_time import virtual_time
from hotswap.testing.cancel import cancel_everywhere
from tests.runtime.support import Idle, engine_of, expected, idle, models, read, sim_fleet, store_of, until
from tests.runtime.test_faults import Raising
from tests.runtime.test_text import Bytes

SOME = Sampling(max_tokens=25, ignore_eos=True)
LONG = Sampling(max_tokens=300, ignore_eos=True)
E0, E1, M3 = InstanceId("e0"), InstanceId("e1"), ModelId("m3")


class Importing(WrapperStore):
    """Has model m3 only once it was imported, which takes a while; the sources that it knows are these."""

    def __init__(self, *sources: str) -> None:
        super().__init__(store_of("a", "b", "m3"))
        self.sources = set(sources)
        self.imported: list[str] = []

    async def import_model(self, model: Model) -> None:
        await anyio.sleep(0.5)
        if str(model.source) not in self.sources:
            raise ShardMissing(f"There is no checkpoint at {model.source!r}.")
        if model.id not in self.imported:
            self.imported.append(model.id)

    async def manifest(self, model: ModelId) -> Manifest:
        if model == "m3" and "m3" not in self.imported:
            raise ShardMissing(f"This store has no model {model!r}.")
        return await super().manifest(model)

    async def tokenizer(self, model: ModelId) -> Tokenizer | None:
        return Bytes()


def fleet_of(*registered: str, engines: Any = 2, **options: Any) -> Fleet:
    """A fleet of some models, with a store that has m3 as well."""
    names = registered or ("a", "b")
    defaults: dict[str, Any] = {"store": store_of("a", "b", "m3"), "models": models(*names)}
    return sim_fleet(*names, engines=engines, **{**defaults, **options})


def registered(fleet: Fleet) -> list[str]:
    """The models that the fleet has, which its view and its `models` must agree on."""
    names = [model.id for model in fleet.models]
    assert len(fleet.models) == len(names)
    assert sorted(view.id for view in fleet.view().models) == sorted(names)
    return names


async def unknown(fleet: Fleet, model: str) -> None:
    """Assert that requests for a model are refused at once."""
    now_s = anyio.current_time()
    with anyio.fail_after(10), pytest.raises(UnknownModel, match=model):
        await fleet.generate(model, (1,), SOME)
    assert anyio.current_time() == now_s


# ---------------------------------------------------------------- they come


@virtual_time
async def test_a_model_that_was_added_is_served() -> None:
    async with fleet_of() as fleet:
        assert registered(fleet) == ["a", "b"]
        await unknown(fleet, "m3")
        await fleet.models.add(Model("m3"))
        assert registered(fleet) == ["a", "b", "m3"]
        await read(fleet, "m3", (1, 2), SOME)
        await read(fleet, "a", (1, 2), SOME)
        idle(fleet)


@virtual_time
async def test_a_model_that_was_added_has_what_its_registration_says() -> None:
    async with fleet_of() as fleet:
        await fleet.models.add(Model("m3", min_replicas=1, max_context_tokens=5))
        with anyio.fail_after(60):
            await fleet.ready()
        assert "m3" in {instance.model for instance in fleet.view().instances}
        assert fleet.view().model(M3).min_replicas == 1
        assert next(model for model in fleet.models if model.id == "m3").min_replicas == 1
        with pytest.raises(PromptTooLong):
            await fleet.generate("m3", (1, 2, 3, 4, 5))


@virtual_time
async def test_a_fleet_that_begins_without_a_model_serves_those_that_come() -> None:
    async with fleet_of(models=[]) as fleet:
        assert registered(fleet) == []
        for name in ("m3", "a"):
            await fleet.models.add(Model(name))
            await read(fleet, name, (1,), SOME)
        assert registered(fleet) == ["m3", "a"]


async def test_a_model_with_a_source_is_imported_with_its_tokenizer() -> None:
    store = Importing("/m3")
    async with fleet_of(store=store) as fleet:
        await fleet.models.add(Model("m3", "/m3"))
        assert store.imported == ["m3"]
        done = await fleet.generate("m3", "abc", Sampling(max_tokens=6, ignore_eos=True))
        assert done.text


@virtual_time
async def test_requests_are_served_while_a_model_is_imported() -> None:
    async with fleet_of(store=Importing("/m3")) as fleet, anyio.create_task_group() as tasks:
        await read(fleet, "a", (1,), SOME)
        tasks.start_soon(fleet.models.add, Model("m3", "/m3"))
        await anyio.sleep(0.1)
        await unknown(fleet, "m3")
        assert registered(fleet) == ["a", "b"], "it comes as a whole"
        await read(fleet, "a", (2,), SOME)
    assert [model.id for model in fleet.models] == ["a", "b", "m3"]


@virtual_time
async def test_an_id_that_is_taken_is_refused_and_the_model_there_stays() -> None:
    async with fleet_of() as fleet:
        await read(fleet, "a", (1,), SOME)
        with pytest.raises(ConfigError, match="'a'"):
            await fleet.models.add(Model("a", min_replicas=2, max_context_tokens=2))
        assert registered(fleet) == ["a", "b"]
        assert fleet.view().model(ModelId("a")).min_replicas == 0
        await read(fleet, "a", (1, 2, 3), SOME)


@virtual_time
async def test_of_models_of_one_id_that_are_added_at_once_one_comes() -> None:
    errors: list[Exception] = []

    async def add(fleet: Fleet) -> None:
        try:
            await fleet.models.add(Model("m3", "/m3"))
        except ConfigError as exc:
            errors.append(exc)

    async with fleet_of(store=Importing("/m3")) as fleet:
        async with anyio.create_task_group() as operators:
            for _ in range(4):
                operators.start_soon(add, fleet)
        assert len(errors) == 3
        assert registered(fleet) == ["a", "b", "m3"]
        await read(fleet, "m3", (1,), SOME)


@pytest.mark.parametrize(
    "model", [Model("m3"), Model("m3", "/elsewhere")], ids=["not there", "no checkpoint"]
)
@virtual_time
async def test_a_model_that_the_store_lacks_is_refused_and_nothing_has_changed(model: Model) -> None:
    store = Importing("/m3")
    async with fleet_of(store=store) as fleet:
        with pytest.raises((UnknownModel, StoreError), match=r"m3|elsewhere"):
            await fleet.models.add(model)
        assert registered(fleet) == ["a", "b"]
        await unknown(fleet, "m3")
        await fleet.models.add(Model("m3", "/m3"))
        await read(fleet, "m3", (1,), SOME)


class Damaged(Importing):
    """Cannot read what lies beside the weights of m3."""

    async def tokenizer(self, model: ModelId) -> Tokenizer | None:
        if model == "m3" and self.sources:
            raise ShardCorrupt("The file 'tokenizer.json' is cut off.")
        return await super().tokenizer(model)


@virtual_time
async def test_a_model_whose_tokenizer_is_damaged_does_not_come_by_half() -> None:
    store = Damaged("/m3")
    async with fleet_of(store=store) as fleet:
        with pytest.raises(ShardCorrupt, match=r"tokenizer\.json"):
            await fleet.models.add(Model("m3", "/m3"))
        assert registered(fleet) == ["a", "b"]
        await unknown(fleet, "m3")
        store.sources.clear()
        await fleet.models.add(Model("m3"))
        await read(fleet, "m3", (1,), SOME)


@virtual_time
async def test_an_addition_cancelled_at_every_turn_leaves_the_model_whole_or_unknown() -> None:
    async with fleet_of(store=Importing("/m3")) as fleet:

        async def check() -> None:
            await anyio.sleep(5)
            if "m3" not in registered(fleet):
                await unknown(fleet, "m3")
                await fleet.models.add(Model("m3", "/m3"))
            await read(fleet, "m3", (1,), SOME)
            await fleet.models.remove("m3")
            idle(fleet)

        assert await cancel_everywhere(lambda: fleet.models.add(Model("m3", "/m3")), check, every="turn") > 1


@virtual_time
async def test_models_come_and_go_only_while_the_fleet_is_open() -> None:
    async def closed() -> None:
        with pytest.raises(FleetClosed):
            await fleet.models.add(Model("m3"))
        with pytest.raises(FleetClosed):
            await fleet.models.remove("a")
        assert [model.id for model in fleet.models] == ["a", "b"]

    fleet = fleet_of()
    await closed()
    async with fleet:
        await read(fleet, "a", (1,), SOME)
    await closed()


# ---------------------------------------------------------------- they go


@virtual_time
async def test_a_model_that_was_removed_is_unknown_and_unloaded() -> None:
    async with fleet_of("a", "m3", scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        await fleet.swap("e1", to="m3")
        await fleet.models.remove("m3")
        assert registered(fleet) == ["a"]
        await unknown(fleet, "m3")
        with pytest.raises(UnknownModel, match="m3"):
            await fleet.swap("e1", to="m3")
        assert fleet.view().instance(E0).model == "a"
        assert fleet.view().instance(E1).state is InstanceState.EMPTY
        await read(fleet, "a", (1,), SOME)
        idle(fleet)


@virtual_time
async def test_requests_of_a_model_that_is_removed_end_first_and_new_ones_are_refused_at_once() -> None:
    ended_s: list[float] = []

    async def client(fleet: Fleet, number: int) -> None:
        await read(fleet, "m3", (1, number), LONG)
        ended_s.append(anyio.current_time())

    engine = engine_of("e0", max_requests=2)
    async with fleet_of("a", "m3", engines=[engine], scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="m3")
        async with anyio.create_task_group() as clients:
            for number in range(6):
                clients.start_soon(client, fleet, number)
            await until(lambda: fleet.view().instance(E0).num_running == 2)
            async with anyio.create_task_group() as operators:
                operators.start_soon(fleet.models.remove, "m3")
                await anyio.sleep(0.1)
                await unknown(fleet, "m3")
                assert fleet.view().instance(E0).model == "m3"
                assert len(fleet.view().waiting) == 4, "those that waited before still may"
            assert len(ended_s) == 6
        assert fleet.view().instance(E0).state is InstanceState.EMPTY
        assert fleet.swaps[-1].started_s >= max(ended_s)
        assert registered(fleet) == ["a"]
        idle(fleet)


@pytest.mark.parametrize("deadline_s", [0.0, 0.5])
@virtual_time
async def test_after_the_deadline_of_a_removal_its_requests_end_by_an_error_that_says_so(
    deadline_s: float,
) -> None:
    errors: list[HotswapError] = []
    ended_s: list[float] = []

    async def client(fleet: Fleet, number: int) -> None:
        async with fleet.stream("m3", (1, number), LONG) as stream:
            tokens: list[int] = []
            try:
                async for token in stream:
                    tokens.append(token.id)  # noqa: PERF401 - it ends by an error
            except HotswapError as exc:
                errors.append(exc)
                ended_s.append(anyio.current_time())
            assert tokens == expected(stream.request)[: len(tokens)]

    engine = engine_of("e0", max_requests=2)
    async with fleet_of("a", "m3", engines=[engine], scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="m3")
        async with anyio.create_task_group() as clients:
            for number in range(5):
                clients.start_soon(client, fleet, number)
            await until(lambda: fleet.view().instance(E0).num_running == 2)
            started_s = anyio.current_time()
            await fleet.models.remove("m3", deadline_s=deadline_s)
            assert ended_s == pytest.approx([started_s + deadline_s] * 5, abs=1e-9)
        assert all(type(error) is not FleetClosed and "m3" in str(error) for error in errors)
        assert len(set(map(id, errors))) == 5, "each client has its own, with its own traceback"
        assert fleet.view().instance(E0).state is InstanceState.EMPTY
        assert registered(fleet) == ["a"]
        idle(fleet)


@virtual_time
async def test_requests_that_wait_for_a_model_that_nothing_serves_end_with_the_deadline_of_its_removal() -> (
    None
):
    async with fleet_of("a", "m3", scheduler=Idle()) as fleet, anyio.create_task_group() as clients:

        async def client() -> None:
            with pytest.raises(HotswapError, match="m3"):
                await fleet.generate("m3", (1,), SOME)

        clients.start_soon(client)
        await until(lambda: len(fleet.view().waiting) == 1)
        with anyio.fail_after(60):
            await fleet.models.remove("m3", deadline_s=1.0)
        assert registered(fleet) == ["a"]


@virtual_time
async def test_a_model_that_is_loaded_meanwhile_is_removed_all_the_same() -> None:
    async with fleet_of("a", "m3", scheduler=Idle()) as fleet, anyio.create_task_group() as tasks:
        await fleet.swap("e0", to="a")

        async def load(instance: str) -> None:
            try:
                await fleet.swap(instance, to="m3")
            except HotswapError:
                return

        for instance in ("e0", "e1"):
            tasks.start_soon(load, instance)
        await until(lambda: all(i.swapping for i in fleet.view().instances))
        with anyio.fail_after(60):
            await fleet.models.remove("m3")
        await anyio.sleep(5)
        assert all(i.model != "m3" and i.preloaded != "m3" for i in fleet.view().instances)
        assert registered(fleet) == ["a"]
        idle(fleet)


@virtual_time
async def test_a_scheduler_does_not_bring_back_a_model_that_is_removed() -> None:
    registered = models("a", min_replicas=1) + models("m3", min_replicas=1)
    async with fleet_of(models=registered, interval_s=0.01) as fleet:
        await fleet.ready()
        async with anyio.create_task_group() as clients:
            clients.start_soon(read, fleet, "m3", (1,), LONG)
            await until(lambda: len(fleet.view().running) == 1)
            await fleet.models.remove("m3")
        await anyio.sleep(10)
        assert "m3" not in {instance.model for instance in fleet.view().instances}
        await read(fleet, "a", (1,), SOME)
        with anyio.fail_after(10):
            await fleet.ready()


@virtual_time
async def test_requests_of_other_models_are_undisturbed_while_models_come_and_go() -> None:
    async with fleet_of("a", scheduler=Idle()) as fleet, anyio.create_task_group() as clients:
        await fleet.swap("e0", to="a")
        for number in range(4):
            clients.start_soon(read, fleet, "a", (1, number), Sampling(max_tokens=1500, ignore_eos=True))
        await until(lambda: fleet.view().instance(E0).num_running == 4)
        for number in range(10):
            await fleet.models.add(Model("m3"))
            await fleet.swap("e1", to="m3")
            await read(fleet, "m3", (1, number), SOME)
            await fleet.models.remove("m3")
            assert fleet.view().instance(E1).state is InstanceState.EMPTY
        assert [running.model for running in fleet.view().running] == ["a"] * 4
        assert all(move.instance == E1 for move in fleet.swaps[1:])


@virtual_time
async def test_a_model_comes_back_as_it_is_registered_then() -> None:
    async with fleet_of("a", "m3") as fleet:
        await read(fleet, "m3", (1,), SOME)
        await fleet.models.remove("m3")
        await fleet.models.add(Model("m3", max_context_tokens=4))
        with pytest.raises(PromptTooLong):
            await fleet.generate("m3", (1, 2, 3, 4))
        done = await fleet.generate("m3", (1, 2), SOME)
        assert len(done.tokens) == 2


@virtual_time
async def test_adapters_go_with_their_model_after_the_requests_that_use_them() -> None:
    adapters = [Adapter("x", "a", "/a/x"), Adapter("x", "m3", "/m3/x"), Adapter("y", "m3", "/m3/y")]
    async with fleet_of("a", "m3", adapters=adapters) as fleet:

        async def client(number: int) -> None:
            async with fleet.stream("m3", (1, number), LONG, adapter="xy"[number % 2]) as stream:
                assert [token.id for token in await stream.collect()] == expected(stream.request)

        async with anyio.create_task_group() as clients:
            for number in range(4):
                clients.start_soon(client, number)
            await until(lambda: len(fleet.view().running) == 4)
            await fleet.models.remove("m3")
        assert [(adapter.id, adapter.model) for adapter in fleet.adapters] == [("x", "a")]
        with pytest.raises(ConfigError, match="m3"):
            fleet.adapters.add(Adapter("z", "m3"))
        await fleet.models.add(Model("m3"))
        with pytest.raises(UnknownAdapter, match="'x'"):
            await fleet.generate("m3", (1,), SOME, adapter="x")
        fleet.adapters.add(Adapter("x", "m3", "/m3/new"))
        await fleet.generate("m3", (1,), SOME, adapter="x")
        await fleet.generate("a", (1,), SOME, adapter="x")
        idle(fleet)


# ---------------------------------------------------------------- they are refused to go


@virtual_time
async def test_a_model_that_the_fleet_does_not_have_cannot_be_removed() -> None:
    async with fleet_of() as fleet:
        with pytest.raises(UnknownModel, match="m3"):
            await fleet.models.remove("m3")
        assert registered(fleet) == ["a", "b"]


@virtual_time
async def test_a_model_to_which_another_was_rolled_stays_until_that_one_has_gone() -> None:
    async with fleet_of("a", "b", scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        await fleet.roll("a", to="b")
        with pytest.raises(ConfigError, match="'a'"):
            await fleet.models.remove("b")
        assert registered(fleet) == ["a", "b"]
        done = await fleet.generate("a", (1,), SOME)
        assert len(done.tokens) == 25
        await fleet.models.remove("a")
        await unknown(fleet, "a")
        await read(fleet, "b", (1,), SOME)
        await fleet.models.remove("b")
        assert registered(fleet) == []
        assert fleet.view().instance(E0).state is InstanceState.EMPTY


@pytest.mark.parametrize("name", ["a", "b"])
@virtual_time
async def test_no_model_of_a_roll_is_removed_while_it_is_under_way(name: str) -> None:
    async with fleet_of("a", "b", scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, fleet, "a", (1,), LONG)
            await until(lambda: len(fleet.view().running) == 1)
            tasks.start_soon(lambda: fleet.roll("a", to="b"))
            await until(lambda: fleet.view().instance(E0).draining)
            with pytest.raises(ConfigError, match="under way"):
                await fleet.models.remove(name)
        assert fleet.view().instance(E0).model == "b"
        assert registered(fleet) == ["a", "b"]
        await fleet.models.remove("a")


@virtual_time
async def test_a_model_is_removed_once_and_its_id_is_taken_until_it_has_gone() -> None:
    async with fleet_of("a", "m3", scheduler=Idle()) as fleet, anyio.create_task_group() as tasks:
        await fleet.swap("e0", to="m3")
        tasks.start_soon(read, fleet, "m3", (1,), LONG)
        await until(lambda: len(fleet.view().running) == 1)
        tasks.start_soon(fleet.models.remove, "m3")
        await anyio.sleep(0.1)
        with pytest.raises(ConfigError, match="m3"):  # an `UnknownModel` is one
            await fleet.models.remove("m3")
        with pytest.raises(ConfigError, match="m3"):
            await fleet.models.add(Model("m3"))
        await until(lambda: len(fleet.view().models) == 1)
        await fleet.models.add(Model("m3"))
        assert registered(fleet) == ["a", "m3"]


@virtual_time
async def test_a_model_that_an_instance_fails_to_unload_stays_registered() -> None:
    engine = Raising(engine_of("e0"), "unload", MemoryNotReclaimed("It is still taken."))
    async with fleet_of("a", "m3", engines=[engine], scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="m3")
        with pytest.raises(SwapFailed, match="still taken"):
            await fleet.models.remove("m3")
        assert registered(fleet) == ["a", "m3"]
        await until(lambda: fleet.view().instance(E0).free)
        await fleet.swap("e0", to="m3")
        await read(fleet, "m3", (1,), SOME)
        await fleet.models.remove("m3")
        assert registered(fleet) == ["a"]
        assert fleet.view().instance(E0).state is InstanceState.EMPTY


@pytest.mark.parametrize("deadline_s", [None, 0.1])
@virtual_time
async def test_a_removal_cancelled_at_every_turn_leaves_the_model_registered_or_gone(
    deadline_s: float | None,
) -> None:
    async with fleet_of("a", "m3", engines=1) as fleet:
        await read(fleet, "m3", (1,), SOME)

        async def client() -> None:
            try:
                await fleet.generate("m3", (1, 2), SOME)
            except UnknownModel:
                return

        async def remove() -> None:
            async with anyio.create_task_group() as clients:
                clients.start_soon(client)
                await anyio.sleep(0.05)
                await fleet.models.remove("m3", deadline_s=deadline_s)

        async def check() -> None:
            await anyio.sleep(5)
            idle(fleet)
            if "m3" not in registered(fleet):
                await unknown(fleet, "m3")
                assert fleet.view().instance(E0).model != "m3"
                await fleet.models.add(Model("m3"))
            with anyio.fail_after(60):
                await read(fleet, "m3", (1,), SOME)

        assert await cancel_everywhere(remove, check, every="turn") > 10


async def waits_for_requests(fleet: Fleet) -> None:
    await fleet.models.remove("m3")


async def has_ended_requests(fleet: Fleet) -> None:
    await fleet.models.remove("m3", deadline_s=0.05)


@pytest.mark.parametrize("removal", [waits_for_requests, has_ended_requests])
@virtual_time
async def test_a_cancelled_removal_leaves_the_model_registered_and_served(
    removal: Callable[[Fleet], Coroutine[Any, Any, None]],
) -> None:
    async with fleet_of("a", "m3", engines=1, scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="m3")
        async with anyio.create_task_group() as clients:

            async def client() -> None:
                try:
                    await read(fleet, "m3", (1,), LONG)
                except UnknownModel:
                    assert removal is has_ended_requests

            clients.start_soon(client)
            await until(lambda: len(fleet.view().running) == 1)
            with anyio.move_on_after(0.055) as scope:  # an unload takes longer
                await removal(fleet)
            assert scope.cancelled_caught
            await anyio.sleep(1)
            assert registered(fleet) == ["a", "m3"]
            if fleet.view().instance(E0).model is None:
                await fleet.swap("e0", to="m3")
            await read(fleet, "m3", (2,), SOME)
        idle(fleet)


# ------------------------------------------------------------------------------ aliases


@virtual_time
async def test_an_alias_is_served_by_its_model_and_may_be_given_to_another() -> None:
    async with sim_fleet("a", "b", engines=[engine_of("e0"), engine_of("e1")]) as fleet:
        fleet.models.alias("org/gpt", "a")
        async with fleet.stream("org/gpt", (1, 2), LONG) as running:
            await anext(running)
            fleet.models.alias("org/gpt", "b")
            assert (await fleet.generate("org/gpt", (1, 2), SOME)).tokens == (
                await fleet.generate("b", (1, 2), SOME)
            ).tokens
            assert len(await running.collect()) == LONG.max_tokens - 1, "it goes on"
        assert [model.id for model in fleet.models] == ["a", "b"]
        fleet.models.alias("org/gpt", None)
        with pytest.raises(UnknownModel, match="org/gpt"):
            await fleet.generate("org/gpt", (1, 2), SOME)
        idle(fleet)


@virtual_time
async def test_an_alias_follows_a_roll_and_goes_with_its_model() -> None:
    async with sim_fleet("a", "b", engines=[engine_of("e0")]) as fleet:
        fleet.models.alias("gpt", "a")
        await fleet.roll("a", to="b")
        assert (await fleet.generate("gpt", (1, 2), SOME)).tokens == (
            await fleet.generate("b", (1, 2), SOME)
        ).tokens
        await fleet.models.remove("a")
        await fleet.models.remove("b")
        with pytest.raises(UnknownModel):
            await fleet.generate("gpt", (1, 2), SOME)
        await fleet.models.add(Model("a"))
        fleet.models.alias("gpt", "a")
        await read(fleet, "a", (1, 2), SOME)


@virtual_time
async def test_names_of_models_and_aliases_never_clash() -> None:
    async with sim_fleet("a", "b", engines=[engine_of("e0")]) as fleet:
        with pytest.raises(ConfigError, match="name of its own"):
            fleet.models.alias("a", "b")
        with pytest.raises(UnknownModel):
            fleet.models.alias("gpt", "c")
        with pytest.raises(UnknownModel):
            await fleet.generate("gpt", (1, 2), SOME)
        fleet.models.alias("gpt", "b")
        with pytest.raises(ConfigError, match="gpt"):
            await fleet.models.add(Model("gpt"))
    with pytest.raises(FleetClosed):
        fleet.models.alias("gpt", "a")
