"""Adapters that come, get new weights and go while a fleet serves: each request keeps what it began with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from hotswap import Adapter, AdapterId, Fleet, Sampling
from hotswap.errors import ConfigError, FleetClosed, InstanceError, ShardMissing, UnknownAdapter
from hotswap.offline.virtual_time import virtual_time
from hotswap.testing.cancel import cancel_everywhere
from tests.runtime.support import PROFILE, Idle, expected, idle, sim_fleet, until
from tests.runtime.test_adapters import Counting
from tests.runtime.test_telemetry import Recorder

OLD, NEW = Adapter("sql", "a", "/sql/1"), Adapter("sql", "a", "/sql/2")


def fleet_of(*engines: Counting, **options: Any) -> Fleet:
    return sim_fleet("a", "b", engines=engines, **{"adapters": [OLD], "scheduler": Idle(), **options})


class Client:
    """A long request with an adapter, whose tokens must be those of one version alone."""

    def __init__(self, fleet: Fleet, seed: int = 0, adapter: str = "sql") -> None:
        self._fleet, self._seed, self._adapter = fleet, seed, adapter
        self.version: str | None = None
        self.num_tokens = 0

    async def run(self, max_tokens: int = 200) -> None:
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True, seed=self._seed, temperature=1.0)
        async with self._fleet.stream("a", (1, 2, 3), sampling, adapter=self._adapter) as stream:
            self.version, seen = stream.request.adapter, list[int]()
            async for token in stream:
                seen.append(token.id)
                self.num_tokens += 1
            assert seen == expected(stream.request)


def held(fleet: Fleet) -> list[set[str]]:
    return [set(instance.adapters) for instance in fleet.view().instances]


@virtual_time
async def test_requests_keep_the_version_they_began_with_and_new_ones_get_the_new_one() -> None:
    engines = Counting("e0"), Counting("e1")
    async with fleet_of(*engines) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to="a")
        old = [Client(fleet, seed) for seed in range(4)]
        new = [Client(fleet, seed) for seed in range(4)]
        async with anyio.create_task_group() as clients:
            for client in old:
                clients.start_soon(client.run)
            await until(lambda: all(client.num_tokens > 20 for client in old))
            assert held(fleet) == [{"sql"}, {"sql"}]
            updated = await fleet.adapters.update(NEW)
            assert (updated.epoch, updated.version) == (1, "sql@1")
            assert held(fleet) == [{"sql", "sql@1"}] * 2, (
                "the new version is loaded before any request needs it"
            )
            for client in new:
                clients.start_soon(client.run, 400)
            await until(lambda: all(client.num_tokens == 200 for client in old))
            await until(lambda: held(fleet) == [{"sql@1"}] * 2)
            assert all(client.num_tokens < 400 for client in new), "the update waited for no request to end"
        assert {client.version for client in old} == {"sql"}
        assert {client.version for client in new} == {"sql@1"}
        idle(fleet)


@virtual_time
async def test_a_request_keeps_its_version_through_moves_evictions_and_losses() -> None:
    engines = Counting("e0"), Counting("e1"), Counting("e2")
    async with fleet_of(*engines) as fleet:
        for engine in engines[:2]:
            await fleet.swap(engine.id, to="a")
        clients = [Client(fleet, seed) for seed in range(6)]
        async with anyio.create_task_group() as tasks:
            for client in clients:
                tasks.start_soon(client.run, 600)
            await until(lambda: all(client.num_tokens > 20 for client in clients))
            await fleet.adapters.update(NEW)
            await fleet.drain("e0")
            fleet.reopen("e0")
            await fleet.swap("e2", to="a")
            await fleet.swap("e1", to="b")
            engines[2].lose()
            engines[0].lose()
            await fleet.swap("e1", to="a")
        assert {client.version for client in clients} == {"sql"}
        assert "sql" in engines[1].loaded[1:], "where it was never, or not any more, it is read again"
        await until(lambda: not any("sql" in names for names in held(fleet)))
        latest = Client(fleet)
        await latest.run()
        assert latest.version == "sql@1"
        idle(fleet)


@virtual_time
async def test_an_unused_adapter_is_replaced_at_once() -> None:
    engine, recorder = Counting("e0"), Recorder()
    async with fleet_of(engine, tracer_provider=recorder.provider) as fleet:
        await fleet.swap("e0", to="a")
        await fleet.adapters.update(NEW)
        assert held(fleet) == [{"sql@1"}], "an engine that serves the model looks at it all the same"
        await fleet.adapters.update(Adapter("sql", "a", "/sql/3"))
        assert held(fleet) == [{"sql@2"}]
        assert [adapter.version for adapter in fleet.adapters] == ["sql@2"]
        idle(fleet)
    updates = recorder.spans("hotswap.adapter.update")
    assert [span.attributes and span.attributes["hotswap.adapter"] for span in updates] == ["sql@1", "sql@2"]
    assert all(recorder.children(span) for span in updates), "what was loaded where stands under it"


@virtual_time
async def test_where_there_is_no_room_for_both_the_new_one_waits_for_the_old_ones_requests() -> None:
    engine = Counting("e0", max_adapters=1)
    async with fleet_of(engine) as fleet:
        await fleet.swap("e0", to="a")
        old, new = Client(fleet), Client(fleet)
        async with anyio.create_task_group() as clients:
            clients.start_soon(old.run)
            await until(lambda: old.num_tokens > 20)
            await fleet.adapters.update(NEW)
            assert old.num_tokens < 200, "an update waits for no request"
            assert held(fleet) == [{"sql"}]
            clients.start_soon(new.run)
        assert (old.version, new.version) == ("sql", "sql@1")
        assert engine.dropped == ["sql"]
        idle(fleet)


class Picky(Counting):
    """Misses the files of one directory."""

    async def load_adapter(self, adapter: Adapter) -> None:
        if adapter.source == "/gone":
            await anyio.sleep(0.1)
            raise ShardMissing("There is no adapter_model.safetensors; fetch it.")
        await super().load_adapter(adapter)


@virtual_time
async def test_an_update_that_fails_changes_nothing() -> None:
    engines = Counting("e0"), Picky("e1")  # the first takes what the second refuses
    async with fleet_of(*engines) as fleet:
        for engine in reversed(engines):
            await fleet.swap(engine.id, to="a")
        clients = [Client(fleet, seed) for seed in range(4)]
        async with anyio.create_task_group() as tasks:
            for client in clients:
                tasks.start_soon(client.run)
            await until(lambda: held(fleet) == [{"sql"}, {"sql"}])
            with pytest.raises(ShardMissing):
                await fleet.adapters.update(Adapter("sql", "a", "/gone"))
            assert held(fleet) == [{"sql"}, {"sql"}]
            assert [adapter.version for adapter in fleet.adapters] == ["sql"]
        await fleet.adapters.update(NEW)
        assert [adapter.version for adapter in fleet.adapters] == ["sql@2"], "a number is used once"
        idle(fleet)


@virtual_time
async def test_an_update_cancelled_anywhere_is_done_or_not() -> None:
    engines = Counting("e0", max_adapters=3), Counting("e1", max_adapters=3)
    async with fleet_of(*engines) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to="a")
        clients, number = [Client(fleet, seed) for seed in range(4)], 0
        async with anyio.create_task_group() as tasks:
            for client in clients:
                tasks.start_soon(client.run, 4000)
            await until(lambda: held(fleet) == [{"sql"}, {"sql"}])

            async def update() -> None:
                nonlocal number
                number += 1
                await fleet.adapters.update(Adapter("sql", "a", f"/sql/{number + 1}"))

            async def look() -> None:
                [latest] = fleet.adapters
                assert all(names <= {"sql", latest.version} for names in held(fleet)), held(fleet)
                later = Client(fleet)
                await later.run(4)
                assert later.version == latest.version

            await cancel_everywhere(update, look)
            tasks.cancel_scope.cancel()
        await until(lambda: not any(instance.num_requests for instance in fleet.view().instances))
        assert not any("sql" in names for names in held(fleet)), "also clients that leave let go of theirs"
        idle(fleet)


@virtual_time
async def test_adapters_are_added_and_removed_while_the_fleet_serves() -> None:
    engine = Counting("e0")
    async with fleet_of(engine, adapters=[]) as fleet:
        await fleet.swap("e0", to="a")
        with pytest.raises(UnknownAdapter, match="Add it"):
            await fleet.generate("a", (1,), adapter="sql")
        fleet.adapters.add(OLD)
        fleet.adapters.add(OLD)
        assert len(fleet.adapters) == 1
        client = Client(fleet)
        async with anyio.create_task_group() as clients:
            clients.start_soon(client.run)
            await until(lambda: client.num_tokens > 20)
            await fleet.adapters.remove("a", "sql")
            with pytest.raises(UnknownAdapter):
                await fleet.generate("a", (1,), adapter="sql")
            assert held(fleet) == [{"sql"}], "a request uses it"
        assert held(fleet) == [set()]
        fleet.adapters.add(NEW)
        again = Client(fleet)
        await again.run()
        assert again.version == "sql@1", "what was held under the first name must not be taken for it"
        for verb in (fleet.adapters.update(Adapter("law", "a")), fleet.adapters.remove("b", "sql")):
            with pytest.raises(UnknownAdapter):
                await verb
        idle(fleet)


@virtual_time
async def test_what_cannot_work_is_refused() -> None:
    async with fleet_of(Counting("e0")) as fleet:
        with pytest.raises(ConfigError, match="directory of its own"):
            await fleet.adapters.update(Adapter("sql", "a", Path("/sql/../sql/1")))
        fleet.adapters.add(Adapter("sql", "a", Path("/sql/1")))
        for adapter, because in (
            (NEW, "update"),
            (Adapter("x", "c"), "not registered"),
        ):
            with pytest.raises(ConfigError, match=because):
                fleet.adapters.add(adapter)
        assert list(fleet.adapters) == [OLD]
    async with fleet_of(Counting("e0", max_adapters=0), adapters=[]) as fleet:
        with pytest.raises(ConfigError, match="engine that can"):
            fleet.adapters.add(OLD)
    with pytest.raises(ConfigError, match="version"):
        Adapter("sql@1", "a")
    with pytest.raises(ConfigError, match="epoch"):
        Adapter("sql", "a", epoch=-1)


@pytest.mark.parametrize("streams", ["pinned", "moved"])
def test_new_weights_of_a_model_need_its_adapters_and_take_its_requests_over_to_them(streams: Any) -> None:
    @virtual_time
    async def scenario() -> None:
        engines = Counting("e0"), Counting("e1")
        async with fleet_of(*engines) as fleet:
            for engine in engines:
                await fleet.swap(engine.id, to="a")
            with pytest.raises(UnknownAdapter, match="'b' has no adapter 'sql'"):
                await fleet.roll("a", to="b", streams=streams)
            assert [instance.model for instance in fleet.view().instances] == ["a", "a"]
            fleet.adapters.add(Adapter("sql", "b", Path("/sql/b")))
            await fleet.adapters.update(NEW)
            sampling = Sampling(max_tokens=300, ignore_eos=True)
            async with fleet.stream("a", (1, 2, 3), sampling, adapter="sql") as stream:
                for _ in range(20):
                    await anext(stream)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(lambda: fleet.roll("a", to="b", streams=streams))
                    rest = await stream.collect()
                    assert len(rest) == 280
                    went_on = ("b", "sql") if streams == "moved" else ("a", "sql@1")
                    assert (stream.request.model, stream.request.adapter) == went_on
            assert (await fleet.generate("a", (1,), adapter="sql")).tokens
            idle(fleet)

    scenario()


class Slow(Counting):
    """Takes its time to forget an adapter, and says when it has begun."""

    dropping = False

    async def drop_adapter(self, adapter: AdapterId) -> None:
        self.dropping = True
        await anyio.sleep(0.5)
        await super().drop_adapter(adapter)


@virtual_time
async def test_a_request_that_comes_while_its_old_version_goes_has_it_read_again() -> None:
    engines = Counting("e0"), Slow("e1")
    async with fleet_of(*engines) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to="a")
        await engines[1].load_adapter(OLD)
        client = Client(fleet)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.run)
            await until(lambda: client.num_tokens > 20)
            tasks.start_soon(fleet.adapters.update, NEW)
            await until(lambda: engines[1].dropping)
            await fleet.swap("e0", to="b")
        assert client.version == "sql"
        assert engines[1].loaded.count("sql") == 2
        idle(fleet)


@virtual_time
async def test_an_old_version_moves_as_tokens_and_is_read_once_for_all_rounds() -> None:
    engines = Counting("e0"), Counting("e1")
    async with fleet_of(*engines) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to="a")
        sampling = Sampling(max_tokens=600, ignore_eos=True)
        async with fleet.stream("a", range(1, 700), sampling, adapter="sql") as stream:
            got = [(await anext(stream)).id]
            await fleet.adapters.update(NEW)
            move = await fleet.migrate(stream.request.id, to="e1", method="tokens")
            assert (move.outcome, move.error) == ("done", "")
            assert engines[1].loaded.count("sql") == 1
            got += [token.id async for token in stream]
            assert got == expected(stream.request)
        assert held(fleet) == [{"sql@1"}, set()]


@virtual_time
async def test_what_was_removed_while_its_update_was_read_stays_removed() -> None:
    async with fleet_of(Counting("e0")) as fleet:
        await fleet.swap("e0", to="a")

        async def update() -> None:
            with pytest.raises(UnknownAdapter, match="removed while"):
                await fleet.adapters.update(NEW)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(update)
            await anyio.sleep(PROFILE.adapter_s / 2)
            await fleet.adapters.remove("a", "sql")
        assert (list(fleet.adapters), held(fleet)) == ([], [set()])


@virtual_time
async def test_an_update_ends_with_the_fleet_and_changes_nothing_then() -> None:
    fleet = fleet_of(Counting("e0"))

    async def update() -> None:
        with pytest.raises(FleetClosed):
            await fleet.adapters.update(NEW)

    async with anyio.create_task_group() as tasks, fleet:
        await fleet.swap("e0", to="a")
        tasks.start_soon(update)
        await anyio.sleep(PROFILE.adapter_s / 2)
    await update()
    assert [adapter.source for adapter in fleet.adapters] == [OLD.source]


@virtual_time
async def test_an_update_does_not_wait_behind_those_that_wait_for_room() -> None:
    engine = Counting("e0", max_adapters=2)
    adapters = [OLD, Adapter("law", "a"), Adapter("poems", "a")]
    async with fleet_of(engine, adapters=adapters) as fleet:
        await fleet.swap("e0", to="a")
        first, second, third = (Client(fleet, adapter=name) for name in ("sql", "law", "poems"))
        async with anyio.create_task_group() as clients:
            clients.start_soon(first.run, 400)
            clients.start_soon(second.run, 400)
            await until(lambda: min(first.num_tokens, second.num_tokens) > 4)
            clients.start_soon(third.run)
            await anyio.sleep(0.2)
            await fleet.adapters.update(NEW)
            assert max(first.num_tokens, second.num_tokens) < 400
            assert third.num_tokens == 0
        assert third.num_tokens == 200
        idle(fleet)


class Reading(Counting):
    """Takes seconds to read a new version."""

    async def load_adapter(self, adapter: Adapter) -> None:
        await anyio.sleep(5 * adapter.epoch)
        await super().load_adapter(adapter)


@virtual_time
async def test_an_engine_with_the_name_of_one_that_left_has_adapters_of_its_own() -> None:
    async with fleet_of(Reading("e0"), Counting("e1")) as fleet:
        for name in ("e0", "e1"):
            await fleet.swap(name, to="a")
        async with anyio.create_task_group() as clients:
            for seed in range(2):
                clients.start_soon(Client(fleet, seed).run, 20)
        assert held(fleet) == [{"sql"}, {"sql"}]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fleet.adapters.update, NEW)
            await anyio.sleep(1)
            await fleet.remove("e1")  # while the update is at the other
        await fleet.add(Counting("e1"))
        await fleet.swap("e1", to="a")
        await fleet.drain("e0")
        client = Client(fleet)
        with anyio.fail_after(10):
            await client.run(20)
        assert fleet.view().instances[1].adapters == ("sql@1",)
        fleet.reopen("e0")
        idle(fleet)


@virtual_time
async def test_streams_of_an_adapter_that_was_removed_end_with_the_old_weights() -> None:
    engines = Counting("e0"), Counting("e1")
    async with fleet_of(*engines) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to="a")
        clients = [Client(fleet, seed) for seed in range(4)]
        async with anyio.create_task_group() as tasks:
            for client in clients:
                tasks.start_soon(client.run, 400)
            await until(lambda: all(client.num_tokens > 20 for client in clients))
            await fleet.adapters.remove("a", "sql")
            assert await fleet.roll("a", to="b", streams="moved") == ("e0", "e1")
        assert [client.num_tokens for client in clients] == [400] * 4
        with pytest.raises(ConfigError, match="rolled to 'b'"):
            fleet.adapters.add(OLD)
        await fleet.roll("b", to="a")
        fleet.adapters.add(OLD)
        back = Client(fleet)
        await back.run(20)
        assert back.version == "sql@1"
        idle(fleet)


class ById(Counting):
    """Holds an adapter by its name, whatever its version."""

    async def load_adapter(self, adapter: Adapter) -> None:
        await super().load_adapter(replace(adapter, epoch=0))


@virtual_time
async def test_an_engine_that_knows_no_versions_is_named_and_holds_nothing_up() -> None:
    async with fleet_of(ById("e0")) as fleet:
        await fleet.swap("e0", to="a")
        await Client(fleet).run(4)
        with pytest.raises(InstanceError, match="by their version"):
            await fleet.adapters.update(NEW)
        await Client(fleet).run(4)
        idle(fleet)
