"""What operators do and see over HTTP is what the fleet does and shows."""

from __future__ import annotations

import json
from typing import Any

import anyio
from opentelemetry.metrics import MeterProvider

from hotswap.door import PrometheusMetrics, create_app
from hotswap.offline.replay import load_view
from hotswap.offline.virtual_time import virtual_time
from tests.door.support import Caller, client_of
from tests.runtime.support import Idle, models, sim_fleet


@virtual_time
async def test_verbs_do_what_the_fleet_does() -> None:
    async with sim_fleet("a", "b", scheduler=Idle()) as fleet, client_of(create_app(fleet)) as client:

        async def ask(verb: str, **body: Any) -> tuple[int, Any]:
            response = await client.post(f"/admin/{verb}", json=body)
            return response.status_code, response.json()

        status, record = await ask("swap", instance="e0", model="a")
        assert (status, record["outcome"], record["model_after"]) == (200, "done", "a")
        assert (await ask("swap", instance="e0", model="a"))[0] == 409
        assert (await ask("swap", instance="e9", model="a"))[0] == 400
        assert (await ask("swap", instance="e0", model="zz"))[0] == 404
        assert (await ask("swap", instance="e0", what=1))[1]["error"]["param"] == "what"
        assert (await ask("drain", instance="e0"))[0] == 200
        assert (await ask("drain", instance="e0"))[0] == 409
        assert (await ask("reopen", instance="e0")) == (200, {})
        assert (await ask("roll", model="a", to="b")) == (200, {"instances": ["e0"]})
        assert (await ask("swap", instance="e0"))[1]["model_after"] is None
        assert (await ask("cancel", request="x"))[0] == 400
        assert (await ask("migrate", request="x", to="e1"))[0] == 400
        shown = (await client.get("/admin/view")).json()
        assert [instance["id"] for instance in shown["instances"]] == ["e0", "e1"]
        swaps = (await client.get("/admin/swaps")).json()["data"]
        assert [swap["model"] for swap in swaps] == ["a", "b", None]
        assert (await client.get("/admin/migrations")).json()["data"] == []


@virtual_time
async def test_a_scheduler_can_plan_again_from_the_view_that_is_shown() -> None:
    async with sim_fleet("a", "b", scheduler=Idle()) as fleet, client_of(create_app(fleet)) as client:
        await fleet.swap("e0", to="a")
        assert load_view((await client.get("/admin/view")).text) == fleet.view()


@virtual_time
async def test_a_request_is_cancelled_by_the_id_that_its_client_sees() -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet, client_of(create_app(fleet)) as client:
        caller = Caller(create_app(fleet), "/v1/completions", {"model": "a", "prompt": [1]})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(caller)
            await caller.until(lambda: bool(fleet.view().waiting))
            (waiting,) = fleet.view().waiting
            assert (await client.post("/admin/cancel", json={"request": waiting.id})).status_code == 200
            await caller.ended.wait()
        assert caller.sent[0]["status"] == 409
        assert '"code":"request_cancelled"' in caller.text


@virtual_time
async def test_events_go_on_where_a_reader_was_cut_off_and_end_with_the_fleet() -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        app = create_app(fleet)
        await fleet.swap("e0", to="a")
        every = Caller(app, "/admin/events", None, **{"last-event-id": "0"}).get()
        later = Caller(app, "/admin/events", None, **{"last-event-id": "2"}).get()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(every)
            tasks.start_soon(later)
            await anyio.sleep(20.0)
            await fleet.unload("e0")
            await fleet.close_gracefully()
            await every.ended.wait()
            await later.ended.wait()
        blocks = [block for block in every.text.split("\n\n") if block.startswith("id: ")]
        ids = [int(block.split("\n")[0].removeprefix("id: ")) for block in blocks]
        assert ids == list(range(1, len(ids) + 1))
        assert later.text.split("id: ", 1)[1].startswith("3\n")
        told = json.loads(blocks[0].rpartition("data: ")[2])
        assert (told["kind"], told["instance"], told["model"]) == ("swap_started", "e0", "a")
        assert ": quiet" in every.text


@virtual_time
async def test_a_reader_of_events_that_leaves_is_let_go() -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        reader = Caller(create_app(fleet), "/admin/events", None).get()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reader)
            await reader.until(lambda: bool(reader.sent))
            reader.leave()
            with anyio.fail_after(1.0):
                await reader.ended.wait()


@virtual_time
async def test_a_server_is_ready_once_every_model_has_its_replicas_and_until_it_closes() -> None:
    wanted = models("a", min_replicas=1)
    async with (
        sim_fleet("a", models=wanted, scheduler=Idle()) as fleet,
        client_of(create_app(fleet)) as client,
    ):
        unready = await client.get("/ready")
        assert (unready.status_code, unready.json()["reasons"]) == (503, ["a has 0 of 1 replicas"])
        await fleet.swap("e0", to="a")
        assert (await client.get("/ready")).status_code == 200
        assert (await client.get("/ready?model=a")).status_code == 200
        assert (await client.get("/ready?model=zz")).status_code == 404
        await fleet.close_gracefully()
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
    async with client_of(create_app(fleet)) as client:
        assert (await client.get("/live")).status_code == 200


@virtual_time
async def test_metrics_are_those_of_the_fleet() -> None:
    metrics = PrometheusMetrics()
    provider: MeterProvider = metrics.meter_provider
    async with sim_fleet("a", scheduler=Idle(), meter_provider=provider) as fleet:
        await fleet.swap("e0", to="a")
        async with client_of(create_app(fleet, metrics=metrics)) as client:
            await client.post("/v1/completions", json={"model": "a", "prompt": [1], "max_tokens": 2})
            text = (await client.get("/metrics")).text
    assert "hotswap_swaps_total{" in text
    assert "gen_ai_server_time_to_first_token_seconds_bucket" in text
