"""A file that is read again changes an open fleet as it says, or not at all."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from hotswap import Adapter, InstanceId, Sampling
from hotswap.config import Serving, build, read_config
from hotswap.config.reloading import FileSetup, with_overrides
from hotswap.errors import ConfigError, HotswapError
from hotswap.offline.virtual_time import virtual_time
from tests.door.support import client_of
from tests.runtime.support import engine_of

FILE = """
[[engines]]
kind = "sim"
id = "e{n}"
count = 2
options = { max_adapters = 2 }

[[stores]]
kind = "sim"

[[models]]
id = "a"
size = "1 MB"
aliases = ["one", "two"]

[[models]]
id = "b"
size = "1 MB"

[[adapters]]
id = "x"
model = "a"

[policy]
scheduler = "CostSwap()"

[door]
request_s = 60.0

[[door.keys]]
secret = "file:SECRET"
models = ["a"]
[[door.keys]]
secret = "file:OPERATOR"
admin = true
"""
MODEL_B = '[[models]]\nid = "b"\nsize = "1 MB"\n'
ADAPTER = '[[adapters]]\nid = "x"\nmodel = "a"\n'
NEW_MODEL = '[[models]]\nid = "two"\nsize = "1 MB"\n'
HEADERS = {"authorization": "Bearer operator-secret"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    for name in ("SECRET", "OPERATOR"):
        (tmp_path / name).write_text(f"{name.lower()}-secret")
    return write(tmp_path / "fleet.toml", FILE)


def write(file: Path, text: str) -> Path:
    for name in ("SECRET", "OPERATOR"):
        text = text.replace(f"file:{name}", f"file:{file.parent / name}")
    file.write_text(text)
    return file


@asynccontextmanager
async def serving(file: Path) -> AsyncGenerator[tuple[Serving, httpx.AsyncClient]]:
    config = with_overrides(read_config(file), {"port": 1})
    made = build(config)
    made.front.setup = FileSetup(file, {"port": 1}, config, made)
    async with made.fleet as fleet:
        for name, model in made.aliases:
            fleet.models.alias(name, model)
        async with client_of(made.app, headers=HEADERS) as client:
            yield made, client


def shown(made: Serving) -> tuple[Any, ...]:
    """All that a file may change."""
    fleet = made.fleet
    models = sorted(model.id for model in fleet.models)
    adapters = [(adapter.model, adapter.id, adapter.source) for adapter in fleet.adapters]
    engines = sorted(instance.id for instance in fleet.view().instances)
    policies = repr(made.scheduler), repr(made.router)
    return models, sorted(fleet.models.aliases.items()), adapters, engines, policies, made.front.settings


async def reload(client: httpx.AsyncClient) -> httpx.Response:
    return await client.post("/admin/reload", json={})


@virtual_time
async def changed(file: Path) -> None:
    async with serving(file) as (made, client):
        text = FILE.replace(MODEL_B, "").replace(ADAPTER, "").replace('"two"', '"three"')
        write(file, text.replace("60.0", "30.0").replace('models = ["a"]', "requests = 3"))
        answer = await reload(client)
        assert answer.json()["changes"] == [
            "door.keys: changed",
            "door.request_s: 60.0 -> 30.0",
            "model 'a': aliases changed",
            "model 'b': removed",
            "adapter a:x: removed",
        ]
        models, aliases, adapters, _, _, settings = shown(made)
        assert models == ["a"]
        assert aliases == [("one", "a"), ("three", "a")]
        assert adapters == []
        assert settings.limits.request_s == 30.0
        assert settings.keys[0].requests == 3
        # And back: what is new is there at once.
        write(file, FILE)
        assert len((await reload(client)).json()["changes"]) == 5
        body = {"model": "b", "prompt": [1], "max_tokens": 2}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert (await reload(client)).json() == {"changes": []}


def test_what_has_changed_holds_from_now_on(file: Path) -> None:
    changed(file)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("max_adapters = 2", "max_adapters = 3", "engine 'e0' is described otherwise; engine 'e1' is"),
        ("count = 2", "count = 3\nwhat = 1", "engines[0].what"),
        ("[[stores]]", '[[engines]]\nkind = "sim"\nid = "e1"\n[[stores]]', "engines[1] has a second 'e1'"),
        ("[[stores]]", '[[engines]]\nkind = "sim"\nid = "held"\n[[stores]]', "'held' already"),
        (  # of two new engines the second is refused, and the first goes again
            "[[stores]]",
            '[[engines]]\nkind = "sim"\nid = "n"\n[[engines]]\nkind = "sim"\nid = "held"\n[[stores]]',
            "'held' already",
        ),
        ("CostSwap()", "WhatSwap()", "policy: "),
        ("[policy]\n", "[policy]\nmax_waiting = 3\n", "policy.max_waiting: 1024 -> 3. That takes a restart"),
        ('kind = "sim"\n\n', 'kind = "sim"\noptions = { shared = true }\n\n', "stores has changed"),
        ('size = "1 MB"\naliases', 'size = "1 MB"\nmin_replicas = 1\naliases', "min_replicas of model 'a'"),
        (
            "[door]\n",
            '[door]\nhost = "0.0.0.0"\n',
            "door.host: '127.0.0.1' -> '0.0.0.0'. That takes a restart",
        ),
        ("[door]\n", "[door]\nvllm_metrics = true\n", "door.vllm_metrics: False -> True"),
        ("[door]", "[dor]", "dor: "),
        ("file:SECRET", "file:NOTHING", r"door.keys[0].secret"),
        ('"two"', '"b"', "models[0].aliases has 'b'"),
        ('id = "x"\nmodel = "a"', 'id = "x"\nmodel = "zz"', "adapters[0].model is 'zz'"),
        (MODEL_B, MODEL_B + '[[models]]\nid = "zz"\n', "zz"),
        (MODEL_B, MODEL_B + MODEL_B, "models[2] is a second 'b'"),
        (ADAPTER, ADAPTER + ADAPTER, "adapters[1] is a second 'a:x'"),
        ('aliases = ["one", "two"]\n', f'aliases = ["one"]\n{NEW_MODEL}', "models[1].id is 'two'"),
        (ADAPTER, ADAPTER + ADAPTER.replace('"x"', '"held"') + 'source = "/new"\n', "'held'"),
        ("60.0", "-1.0", "door: request_s is -1.0"),
    ],
)
def test_a_file_that_cannot_be_applied_changes_nothing(file: Path, old: str, new: str, says: str) -> None:
    @virtual_time
    async def refused() -> None:
        async with serving(file) as (made, client):
            made.fleet.adapters.add(Adapter("held", "a", "/old"))  # by an operator
            await made.fleet.add(engine_of("held"))
            before = shown(made)
            assert old in FILE
            # A change that could be made alone goes with the one that cannot.
            write(file, FILE.replace(old, new, 1).replace('"one"', '"other"'))
            answer = await reload(client)
            assert answer.status_code >= 400
            assert says in answer.json()["error"]["message"]
            assert shown(made) == before
            write(file, FILE)
            assert (await reload(client)).json() == {"changes": []}

    refused()


@virtual_time
async def removed_while_it_is_served(file: Path) -> None:
    async with serving(file) as (made, client), anyio.create_task_group() as tasks:
        found: list[int] = []

        async def ask() -> None:
            body = {"model": "b", "prompt": [1], "max_tokens": 200, "ignore_eos": True}
            found.append((await client.post("/v1/completions", json=body)).status_code)

        tasks.start_soon(ask)
        while not made.fleet.view().running:  # noqa: ASYNC110 - simulated time
            await anyio.sleep(0.01)
        write(file, FILE.replace(MODEL_B, ""))
        assert (await reload(client)).json() == {"changes": ["model 'b': removed"]}
        assert found == [200]  # its request has gone to its end


def test_a_model_goes_with_its_last_request(file: Path) -> None:
    removed_while_it_is_served(file)


MODEL_C = MODEL_B.replace('"b"', '"c"')
NOT_YET = "model 'b': not removed yet (Model 'a' was rolled to 'b', which serves its requests; keep it.)"


@virtual_time
async def left_over(file: Path) -> None:
    plain = FILE.replace(ADAPTER, "") + MODEL_C
    write(file, plain)
    async with serving(file) as (made, client):

        async def changes(text: str) -> list[str]:
            write(file, text)
            found: list[str] = (await reload(client)).json()["changes"]
            return found

        await made.fleet.swap("e0", to="a")
        await made.fleet.roll("a", to="b")
        gone = plain.replace(MODEL_B, "")
        assert await changes(gone) == ["model 'b': removed", NOT_YET]
        assert await changes(gone) == [NOT_YET], "it is tried again"
        # It is still there; a file that has it again, as it was, keeps it.
        assert await changes(plain) == ["model 'b': added"]
        assert await changes(plain) == []
        assert await changes(gone) == ["model 'b': removed", NOT_YET]
        # As another model it cannot be had before the one that is left has gone.
        before = shown(made)
        write(file, plain.replace(MODEL_B, MODEL_B + "min_replicas = 1\n").replace("60.0", "30.0"))
        refused = await reload(client)
        assert refused.status_code == 400
        assert "could not be removed yet" in refused.json()["error"]["message"]
        assert shown(made) == before
        await made.fleet.roll("a", to="c")
        assert await changes(gone) == ["model 'b': removed, which has failed before"]
        assert await changes(gone) == []
        assert sorted(model.id for model in made.fleet.models) == ["a", "c"]


def test_what_could_not_be_removed_is_told_and_tried_again(file: Path) -> None:
    left_over(file)


@virtual_time
async def left_adapter(file: Path) -> None:
    both = FILE + ADAPTER.replace('"a"', '"b"')
    write(file, both)
    async with serving(file) as (made, client):
        await made.fleet.swap("e0", to="a")
        await made.fleet.roll("a", to="b")
        write(file, both.replace(ADAPTER, "", 1))
        told = [(await reload(client)).json()["changes"] for _ in range(2)]
        assert told[0][0] == "adapter a:x: removed"
        assert all(one[-1].startswith("adapter a:x: not removed yet (") for one in told)
        write(file, both)
        assert (await reload(client)).json()["changes"] == ["adapter a:x: added"]
        assert (await reload(client)).json()["changes"] == []


def test_an_adapter_that_could_not_be_removed_is_tried_again(file: Path) -> None:
    left_adapter(file)


@virtual_time
async def replaced(file: Path) -> None:
    async with serving(file) as (made, client):
        await made.fleet.swap("e0", to="a")
        answer = await client.post("/admin/replace", json={"instance": "e0"})
        assert answer.json()["instance"] == "e0-2"
        view = made.fleet.view()
        assert sorted(instance.id for instance in view.instances) == ["e0-2", "e1"]
        assert [instance.model for instance in view.instances if instance.id == "e0-2"] == ["a"]
        again = await client.post("/admin/replace", json={"instance": "e0-2"})
        assert again.json()["instance"] == "e0-3"
        # Of no name that another engine has.
        await made.fleet.add(engine_of("e1-4"))
        assert (await client.post("/admin/replace", json={"instance": "e1"})).json()["instance"] == "e1-5"
        wrong = await client.post("/admin/replace", json={"instance": "zz"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "instance")


@virtual_time
async def more_and_fewer_engines(file: Path) -> None:
    async with serving(file) as (made, client):

        async def changes(count: int, *others: str) -> list[str]:
            text = FILE.replace("count = 2", f"count = {count}")
            write(file, text + "".join(f'\n[[engines]]\nkind = "sim"\nid = "{id}"\n' for id in others))
            found: list[str] = (await reload(client)).json()["changes"]
            return found

        async def instances() -> list[str]:
            return sorted(instance.id for instance in made.fleet.view().instances)

        assert await changes(3, "own") == ["engine 'e2': added", "engine 'own': added"]
        assert await instances() == ["e0", "e1", "e2", "own"]
        await made.fleet.swap("e2", to="b")
        assert await changes(3, "own") == []
        # What has replaced an engine goes in its place; its request moves, and loses no token.
        await made.fleet.swap("e1", to="a")
        await client.post("/admin/replace", json={"instance": "e1"})
        assert await instances() == ["e0", "e1-2", "e2", "own"]
        await made.fleet.swap("e0", to="a")
        await made.fleet.drain("e0")
        async with made.fleet.stream("a", [1, 2], Sampling(max_tokens=400, ignore_eos=True)) as stream:
            await anext(stream)
            made.fleet.reopen("e0")
            assert await changes(1) == [f"engine {id!r}: removed" for id in ("e1", "e2", "own")]
            assert len(await stream.collect()) == 399
        assert [hop.instance for hop in stream.hops] == ["e1-2", "e0"]
        assert await instances() == ["e0"]
        assert await changes(2) == ["engine 'e1': added"]
        assert await instances() == ["e0", "e1"]


def test_engines_come_and_go(file: Path) -> None:
    more_and_fewer_engines(file)


@virtual_time
async def engine_that_stays(file: Path) -> None:
    async with serving(file) as (made, client), anyio.create_task_group() as tasks:

        async def changes(text: str) -> httpx.Response:
            write(file, text)
            return await reload(client)

        await made.fleet.swap("e1", to="a")
        tasks.start_soon(partial(made.fleet.swap, "e1", to="b"))
        while not made.fleet.view().instance(InstanceId("e1")).swapping:  # noqa: ASYNC110 - simulated time
            await anyio.sleep(0.001)
        fewer = FILE.replace("count = 2", "count = 1")
        told = (await changes(fewer)).json()["changes"]
        assert told[0] == "engine 'e1': removed"
        assert told[1].startswith("engine 'e1': not removed yet (")
        # A file that describes it otherwise cannot have it yet; one that has it again keeps it.
        other = fewer + '\n[[engines]]\nkind = "sim"\nid = "e1"\n'
        refused = await changes(other)
        assert refused.status_code == 400
        assert "engine 'e1' is another one than before" in refused.json()["error"]["message"]
        assert (await changes(FILE)).json()["changes"] == ["engine 'e1': added"]
        assert len((await changes(fewer)).json()["changes"]) == 2
        while made.fleet.view().instance(InstanceId("e1")).swapping:  # noqa: ASYNC110 - simulated time
            await anyio.sleep(0.01)
        assert (await changes(fewer)).json()["changes"] == ["engine 'e1': removed, which has failed before"]
        assert [instance.id for instance in made.fleet.view().instances] == ["e0"]
        assert (await changes(other)).json()["changes"] == ["engine 'e1': added"]


def test_an_engine_that_a_swap_has_is_removed_the_next_time(file: Path) -> None:
    engine_that_stays(file)


@virtual_time
async def other_policy(file: Path) -> None:
    write(file, FILE.replace("CostSwap()", "KeepAsIs()"))
    async with serving(file) as (made, client):
        body = {"model": "b", "prompt": [1], "max_tokens": 2}
        with anyio.move_on_after(30.0):
            await client.post("/v1/completions", json=body)
        assert not made.fleet.swaps, "this policy swaps nothing"
        write(file, FILE.replace('"CostSwap()"', '"CostSwap()"\nrouter = "LeastLoadedRouter()"'))
        told = (await reload(client)).json()["changes"]
        assert told == [
            "policy.scheduler: 'KeepAsIs()' -> 'CostSwap()'",
            "policy.router: None -> 'LeastLoadedRouter()'",
        ]
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert (repr(made.scheduler)[:8], repr(made.router)[:11]) == ("CostSwap", "LeastLoaded")


def test_another_policy_decides_from_the_next_plan_on(file: Path) -> None:
    other_policy(file)


def test_an_engine_is_replaced_by_one_that_the_file_describes(file: Path) -> None:
    replaced(file)


def test_the_difference_is_told_before_it_is_applied(file: Path) -> None:
    config = read_config(file)
    setup = FileSetup(file, {}, config, build(config))
    assert setup.changes() == []
    write(file, FILE.replace("60.0", "30.0"))
    assert setup.changes() == ["door.request_s: 60.0 -> 30.0"]
    os.remove(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        setup.changes()
    assert issubclass(ConfigError, HotswapError)
