"""Operators' tools for llama.cpp and vLLM load models and adapters, these from some directories alone."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from hotswap import ModelId
from hotswap.door import ApiKey, create_app
from hotswap.offline.virtual_time import virtual_time
from tests.door.support import Caller, client_of
from tests.runtime.support import Idle, engine_of, sim_fleet


@virtual_time
async def test_models_are_loaded_and_unloaded_as_llama_cpp_does() -> None:
    async with sim_fleet("a", "b", scheduler=Idle()) as fleet:
        app = create_app(fleet)
        told = Caller(app, "/models/sse", None, **{"last-event-id": "0"}).get()
        async with client_of(app) as client, anyio.create_task_group() as tasks:
            tasks.start_soon(told)

            async def ask(verb: str, model: str) -> tuple[int, Any]:
                answer = await client.post(f"/models/{verb}", json={"model": model})
                return answer.status_code, answer.json()

            assert await ask("load", "a") == (200, {"success": True})
            assert await ask("load", "a") == (200, {"success": True})
            assert await ask("load", "b") == (200, {"success": True})
            assert len(fleet.swaps) == 2, "the empty instance takes the second"
            listed = {
                one["id"]: one["status"]["value"] for one in (await client.get("/models")).json()["data"]
            }
            assert listed == {"a": "loaded", "b": "loaded"}
            assert await ask("unload", "a") == (200, {"success": True})
            assert (await ask("unload", "a"))[0] == 400
            assert (await ask("load", "zz"))[0] == 404
            await fleet.close_gracefully()
            await told.ended.wait()
        events = [json.loads(line[6:]) for line in told.text.splitlines() if line.startswith("data: ")]
        changes = [(one["model"], one["data"]["status"]) for one in events if one["event"] == "status_change"]
        loads = [("a", "loading"), ("a", "loaded"), ("b", "loading"), ("b", "loaded"), ("a", "unloaded")]
        assert changes == loads
        shares = [one["data"]["progress"] for one in events if one["event"] == "progress"]
        assert shares
        assert all(0.0 <= share <= 1.0 for share in shares)


@virtual_time
async def test_a_load_is_answered_once_the_model_is_served_whatever_began_it() -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet, client_of(create_app(fleet)) as client:
        answered = list[int]()

        async def load() -> None:
            answer = await client.post("/models/load", json={"model": "a"})
            assert fleet.view().serving(ModelId("a"))
            answered.append(answer.status_code)

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(load)
        assert answered == [200, 200, 200]
        assert len(fleet.swaps) == 1


@virtual_time
async def test_a_load_without_a_place_is_tried_again_only_if_a_swap_may_leave_one() -> None:
    engines = [engine_of("e0")]
    async with (
        sim_fleet("a", "b", engines=engines, scheduler=Idle()) as fleet,
        client_of(create_app(fleet)) as client,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(partial(fleet.swap, "e0", to="a"))
        while not fleet.view().instances[0].swapping:  # noqa: ASYNC110 - simulated time
            await anyio.sleep(0.001)
        soon = await client.post("/models/load", json={"model": "b"})
        assert (soon.status_code, soon.json()["error"]["code"]) == (409, "no_instance")
        assert soon.headers["retry-after"] == "1"
        while fleet.view().instances[0].swapping:  # noqa: ASYNC110 - simulated time
            await anyio.sleep(0.01)
        await fleet.drain("e0")
        never = await client.post("/models/load", json={"model": "b"})
        assert never.status_code == 409
        assert never.headers["x-should-retry"] == "false"
        assert "retry-after" not in never.headers


@virtual_time
async def loaded_adapters(root: Path) -> None:
    for name in ("roots/x", "roots/y", "elsewhere"):
        (root / name).mkdir(parents=True)
    (root / "roots/link").symlink_to(root / "elsewhere")
    engines = [engine_of("e0", max_adapters=2)]
    async with sim_fleet("a", engines=engines, scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        app = create_app(fleet, adapter_roots=[root / "roots"])
        async with client_of(app) as client:

            async def ask(verb: str, **body: Any) -> int:
                return (await client.post(f"/v1/{verb}_lora_adapter", json=body)).status_code

            for path in ("elsewhere", "roots/../elsewhere", "roots/link", "roots/nothing", "roots/\0"):
                assert await ask("load", lora_name="x", lora_path=str(root / path)) == 400, path
            assert not list(fleet.adapters)
            assert await ask("load", lora_name="x", lora_path=str(root / "roots/x")) == 200
            assert await ask("load", lora_name="x", lora_path=str(root / "roots/x")) == 400
            assert [(one.model, one.id) for one in fleet.adapters] == [("a", "x")]
            again = {"lora_name": "x", "lora_path": str(root / "roots/y"), "load_inplace": True}
            assert await ask("load", **again) == 200
            # vLLM's clients name an adapter alone.
            body = {"model": "x", "prompt": [1], "max_tokens": 2}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            assert await ask("unload", lora_name="x") == 200
            assert await ask("unload", lora_name="x") == 404
        async with client_of(create_app(fleet)) as client:
            body = {"lora_name": "x", "lora_path": str(root / "roots/x")}
            assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 403


def test_adapters_come_from_the_roots_alone(tmp_path: Path) -> None:
    loaded_adapters(tmp_path)


@pytest.mark.parametrize("path", ["/models/load", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
@virtual_time
async def test_they_are_for_operators(path: str) -> None:
    keys = [ApiKey(secret="client-secret"), ApiKey(secret="operator-secret", admin=True)]
    async with (
        sim_fleet("a", scheduler=Idle()) as fleet,
        client_of(create_app(fleet, keys=keys)) as client,
    ):
        headers = {"authorization": "Bearer client-secret"}
        assert (await client.post(path, json={}, headers=headers)).status_code == 403
        headers = {"authorization": "Bearer operator-secret"}
        assert (await client.post(path, json={}, headers=headers)).status_code == 400
