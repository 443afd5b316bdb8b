"""The page comes with a policy that fits it, and a summary gives each reader what has changed for it."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from typing import Any

import anyio
import httpx

from hotswap import Model, Sampling
from hotswap.backends.sim import SimEngine
from hotswap.door import ApiKey, create_app
from hotswap.door.summary import INTERVAL_S
from hotswap.offline.virtual_time import virtual_time
from tests.door.support import client_of
from tests.runtime.support import PROFILE, Idle, engine_of, sim_fleet, store_of

FOUR = Sampling(max_tokens=4, ignore_eos=True)


class Reader:
    """Puts together what it is given, as a page does."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.version = ""
        self.instances: dict[str, Any] = {}
        self.models: dict[str, Any] = {}
        self.last: dict[str, Any] = {}

    async def look(self) -> None:
        await anyio.sleep(INTERVAL_S)
        response = await self._client.get("/admin/summary", params={"since": self.version})
        self.last = found = response.json()
        self.version = found["version"]
        for rows, kind in ((self.instances, "instances"), (self.models, "models")):
            if found["whole"]:
                rows.clear()
            for gone in found[f"gone_{kind}"]:
                rows.pop(gone, None)
            rows.update({row["id"]: row for row in found[kind]})


@virtual_time
async def test_a_reader_that_is_given_changes_knows_what_one_that_is_given_everything_knows() -> None:
    store = store_of("a", "b", "c")
    async with (
        sim_fleet("a", "b", scheduler=Idle(), store=store) as fleet,
        client_of(create_app(fleet)) as client,
    ):
        reader = Reader(client)
        await reader.look()
        assert reader.last["whole"]

        async def same() -> None:
            await reader.look()
            new = Reader(client)
            await new.look()
            assert (reader.instances, reader.models) == (new.instances, new.models)
            assert not reader.last["whole"]

        await fleet.swap("e0", to="a")
        await same()
        assert [row["id"] for row in reader.last["instances"]] == ["e0"]  # e1 is as it was
        assert reader.instances["e0"]["model"] == "a"
        await fleet.generate("a", [1], FOUR)
        await same()
        assert (reader.models["a"]["num_tokens"], reader.last["num_tokens"]) == (4, 4)
        await fleet.models.add(Model("c"))
        await fleet.add(engine_of("e2"))
        await same()
        assert set(reader.models) == {"a", "b", "c"}
        await fleet.models.remove("c")
        await fleet.remove("e2")
        await same()
        assert set(reader.instances) == {"e0", "e1"}
        await reader.look()
        assert (reader.last["instances"], reader.last["models"]) == ([], [])


@virtual_time
async def test_a_reader_of_another_server_is_given_everything() -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet, client_of(create_app(fleet)) as client:
        for since in ("", "x", "0000.1", "0000.-1", "." * 99, "1e9.1"):
            found = (await client.get("/admin/summary", params={"since": since})).json()
            assert found["whole"]
            assert len(found["instances"]) == 2


@virtual_time
async def test_a_summary_tells_of_a_swap_while_it_happens_and_who_waits_since_when() -> None:
    slow = SimEngine("e0", replace(PROFILE, load_bytes_per_s=(1 << 20) / 4), kv_blocks=512)
    async with (
        sim_fleet("a", engines=[slow], scheduler=Idle()) as fleet,
        client_of(create_app(fleet)) as client,
        anyio.create_task_group() as tasks,
    ):
        reader = Reader(client)
        tasks.start_soon(fleet.generate, "a", [1], FOUR)
        await anyio.sleep(1.0)
        await reader.look()
        row = reader.models["a"]
        assert row["num_waiting"] == 1
        assert 1.0 <= reader.last["now_s"] - row["oldest_waiting_s"] < 2.0
        tasks.start_soon(lambda: fleet.swap("e0", to="a"))
        await anyio.sleep(2.0)
        await reader.look()
        row = reader.instances["e0"]
        assert (row["swapping"], row["target"], row["phase"]["name"]) == (True, "a", "load")
        assert row["phase"]["total_bytes"] == 1 << 20


@virtual_time
async def test_a_page_may_run_what_it_holds_and_load_nothing() -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        key = ApiKey(secret="operator-secret", admin=True)
        async with client_of(create_app(fleet, keys=[key])) as client:
            page = await client.get("/ui")  # without a key, which it asks for
    policy = page.headers["content-security-policy"]
    assert page.headers["content-type"].startswith("text/html")
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'")
    outside = re.findall(r"(?:https?:)?//[\w.-]+\.\w+", page.text.replace("http://www.w3.org/2000/svg", ""))
    assert outside == []


@virtual_time
async def test_as_many_records_come_as_are_asked_for_and_the_last_ones() -> None:
    async with sim_fleet("a", "b", scheduler=Idle()) as fleet, client_of(create_app(fleet)) as client:
        for model in ("a", "b", "a"):
            await fleet.swap("e0", to=model)

        async def ask(last: str) -> Any:
            return (await client.get(f"/admin/swaps{last}")).json()

        assert [record["model"] for record in (await ask("?last=2"))["data"]] == ["b", "a"]
        assert len((await ask(""))["data"]) == len((await ask("?last=99999"))["data"]) == 3
        for wrong in ("0", "-1", "x", "", "9" * 99):
            assert (await ask(f"?last={wrong}"))["error"]["param"] == "last"
