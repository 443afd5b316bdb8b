"""Two controllers of one host, a controller that comes after another, and the abilities that they find."""

from __future__ import annotations

from functools import partial

import anyio
import pytest
from anyio import to_thread

from hotswap import InstanceState
from hotswap.abc import (
    SupportsAdapters,
    SupportsGrammars,
    SupportsMigration,
    SupportsModelCheck,
    SupportsModelTrial,
    SupportsPreload,
    WrapperEngine,
)
from hotswap.backends.remote import EngineHost, RemoteEngine
from hotswap.backends.sim import SimEngine
from hotswap.backends.transports import LinkSecret, connect_tcp, serve_tcp
from hotswap.errors import ConfigError, ControllerSuperseded, InstanceError, InstanceLost, InvalidRequest
from hotswap.offline.virtual_time import virtual_time
from hotswap.testing.conformance.engine_suite import Reader
from tests.backends.remote.support import MemoryLinks, expected, request, rig
from tests.backends.test_sim import TestSimEngineConforms as Sim

ABILITIES = (
    SupportsAdapters,
    SupportsGrammars,
    SupportsMigration,
    SupportsModelCheck,
    SupportsModelTrial,
    SupportsPreload,
)


@virtual_time
async def test_a_controller_that_comes_later_finds_the_model_and_serves_on_without_a_swap() -> None:
    async with rig() as made:
        await made.engine.load(made.card, made.store)
        await made.links.opened[0][0].aclose()
        async with RemoteEngine("e0", made.links.open, epoch=2) as later:
            assert (later.status().state, later.status().model) == (InstanceState.SERVING, "a")
            async with later.stream(request()) as tokens:
                assert [token.id for token in await tokens.collect()] == expected(request(), made.card)
            await later.unload()


@virtual_time
async def test_a_newer_controller_ends_the_older_one_whose_requests_leave_the_host_first() -> None:
    async with rig() as made:
        await made.engine.load(made.card, made.store)
        reader = Reader(request(max_tokens=400))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reader.read, made.engine)
            await reader.began.wait()
            async with RemoteEngine("e0", made.links.open, epoch=2) as newer:
                made.assert_released()
                await reader.ended.wait()
                assert isinstance(reader.error, InstanceLost)
                assert made.engine.status().state is InstanceState.LOST
                assert "taken over by another controller" in made.engine.status().lost_because
                with pytest.raises(ControllerSuperseded, match="epoch 2"):
                    await made.engine.unload()
                assert newer.status().state is InstanceState.SERVING, "it is undisturbed"
                await newer.unload()


@virtual_time
async def test_a_controller_older_than_the_last_one_is_refused_although_that_has_left() -> None:
    async with rig() as made:
        async with RemoteEngine("e0", made.links.open, epoch=2):
            pass
        with pytest.raises(ControllerSuperseded):
            await made.engine.unload()
        made.engine.epoch = 3
        await made.engine.unload()


@virtual_time
async def test_of_two_controllers_the_one_that_was_made_later_is_the_newer() -> None:
    async with Sim().make_engine() as engine, MemoryLinks(EngineHost(engine, Sim().make_store())) as links:
        older, newer = RemoteEngine("e0", links.open), RemoteEngine("e0", links.open)
        async with newer:
            with pytest.raises(ControllerSuperseded):
                async with older:
                    pass


@virtual_time
async def test_a_remote_engine_has_the_abilities_of_the_engine_at_its_host_and_no_others() -> None:
    sim = Sim().make_engine()
    for behind in (sim, WrapperEngine(sim)):
        async with behind, MemoryLinks(EngineHost(behind, Sim().make_store())) as links:
            engine = RemoteEngine("e0", links.open)
            assert not any(isinstance(engine, ability) for ability in ABILITIES), "before it is known"
            async with engine:
                for ability in ABILITIES:
                    assert isinstance(engine, ability) == isinstance(behind, ability), ability
                assert type(engine).__name__ == "RemoteEngine"


@virtual_time
async def test_a_remote_engine_is_used_inside_of_its_block() -> None:
    async with rig() as made:
        engine = RemoteEngine("e1", made.links.open)
        for verb in (engine.unload, partial(engine.evict, deadline_s=1.0)):
            with pytest.raises(InstanceError, match="async with"):
                await verb()
        with pytest.raises(InstanceError, match="async with"):
            async with engine.stream(request()):
                pass


async def test_a_controller_without_the_secret_is_refused_and_the_host_serves_on() -> None:
    secret = LinkSecret(b"the secret of this host, long enough")
    async with Sim().make_engine() as behind, anyio.create_task_group() as tasks:
        host = EngineHost(behind, Sim().make_store())
        port = await tasks.start(partial(serve_tcp, secret=secret), host.serve, "127.0.0.1")
        for wrong in (None, LinkSecret(b"another secret that is long enough")):
            with pytest.raises(InstanceLost, match="secret"):
                async with RemoteEngine("e0", partial(connect_tcp, "127.0.0.1", port, secret=wrong)):
                    pass
        async with RemoteEngine("e0", partial(connect_tcp, "127.0.0.1", port, secret=secret)) as engine:
            assert engine.status().state is InstanceState.EMPTY
        tasks.cancel_scope.cancel()


class Strict(SimEngine):
    """Knows one grammar."""

    def check_grammar(self, field: str, grammar: str) -> None:
        if (field, grammar) != ("regex", "a+"):
            raise InvalidRequest(f"{field} is not a+.")


async def test_a_grammar_is_checked_at_the_host_from_any_thread() -> None:
    async with Strict("e0") as behind, anyio.create_task_group() as tasks:
        port = await tasks.start(serve_tcp, EngineHost(behind, Sim().make_store()).serve, "127.0.0.1")
        async with RemoteEngine("e0", partial(connect_tcp, "127.0.0.1", port)) as engine:
            assert isinstance(engine, SupportsGrammars)
            await to_thread.run_sync(engine.check_grammar, "regex", "a+")
            with pytest.raises(InvalidRequest, match="json_schema"):
                await to_thread.run_sync(engine.check_grammar, "json_schema", "{}")
        tasks.cancel_scope.cancel()


def test_wrong_arguments_are_refused_by_name() -> None:
    async def no_link() -> None: ...

    wrong = {"silence_s": 0, "start_s": -1, "epoch": -1, "id": 3, "node": None, "open_link": "10.0.0.7:7000"}
    for name, value in wrong.items():
        arguments = {"id": "e0", "open_link": no_link, name: value}
        with pytest.raises(ConfigError, match=name):
            RemoteEngine(**arguments)  # type: ignore[arg-type]  # wrong ones
