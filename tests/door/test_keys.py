"""Who may do what: keys of clients and operators, the machine itself, and the names of a server."""

from __future__ import annotations

from typing import Any

import anyio
import httpx
import pytest
from starlette.types import Message

from hotswap.door import ApiKey, create_app
from hotswap.door.app import app_of
from hotswap.door.generation import Door
from hotswap.door.settings import Settings
from hotswap.errors import ConfigError
from hotswap.offline.virtual_time import virtual_time
from tests.door.support import Caller, client_of
from tests.runtime.support import Idle, models, sim_fleet, store_of
from tests.runtime.test_text import WithTokenizer

CLIENT = ApiKey(secret="client-secret", models=("a",), priority=1, requests=1)
OPERATOR = ApiKey(secret="operator-secret", admin=True)
SAID = [{"role": "user", "content": "x"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [1], "max_tokens": 2},
    "/v1/chat/completions": {"messages": SAID},
    "/v1/responses": {"input": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}
PATHS = ("/v1/models", "/admin/view", "/metrics", "/admin/events?after=x")


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


@pytest.mark.parametrize(
    ("secret", "statuses"),
    [
        (None, [401, 401, 401, 401]),
        ("wrong-secret", [401, 401, 401, 401]),
        ("client-secret", [200, 403, 403, 403]),
        ("operator-secret", [200, 200, 404, 400]),
    ],
)
@virtual_time
async def test_what_a_key_opens(secret: str | None, statuses: list[int]) -> None:
    async with sim_fleet("a", "b", scheduler=Idle()) as fleet:
        app = create_app(fleet, keys=(CLIENT, OPERATOR))
        async with client_of(app) as client:
            for headers in (bearer(secret), {"x-api-key": secret}) if secret else ({},):
                found = [(await client.get(path, headers=headers)).status_code for path in PATHS]
                assert found == statuses
            for path in ("/live", "/health", "/ready"):
                assert (await client.get(path)).status_code == 200


@virtual_time
async def test_a_key_uses_what_it_may() -> None:
    async with sim_fleet("a", "b", scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        app = create_app(fleet, keys=(CLIENT,))
        async with client_of(app, headers=bearer("client-secret")) as client:
            assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]] == ["a"]

            async def ask(**fields: Any) -> int:
                body = {"model": "a", "prompt": [1], "temperature": 0, "max_tokens": 2, **fields}
                return (await client.post("/v1/completions", json=body)).status_code

            assert await ask(priority=1) == 200
            assert await ask(priority=2) == 403
            # Whether there is such a model, and which there are, is not told.
            for path, fields in ASKED.items():
                told = [
                    await client.post(path, json={"model": name, **fields}) for name in ("b", "zz", "b:x")
                ]
                assert {answer.status_code for answer in told} == {404}, path
                assert len({answer.text for answer in told}) == 1
            assert (await client.get("/v1/models/b")).text == (await client.get("/v1/models/zz")).text
            # One request at a time.
            found: list[int] = []

            async def note() -> None:
                found.append(await ask(max_tokens=50))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(note)
                tasks.start_soon(note)
            assert sorted(found) == [200, 429]
            assert await ask() == 200


@virtual_time
async def test_a_key_has_so_many_tokens_in_a_minute() -> None:
    key = ApiKey(secret="client-secret", tokens_per_minute=60)
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        app = create_app(fleet, keys=(key,))
        async with client_of(app, headers=bearer("client-secret")) as client:

            async def ask() -> httpx.Response:
                body = {"model": "a", "prompt": [1] * 10, "max_tokens": 65, "temperature": 0}
                return await client.post("/v1/completions", json={**body, "ignore_eos": True})

            assert (await ask()).status_code == 200
            refused = await ask()
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
            # 75 of 60 tokens are spent, and one is wanted: that is sixteen seconds.
            wait_s = int(refused.headers["retry-after-ms"]) / 1000
            assert wait_s == 16.0
            await anyio.sleep(wait_s / 2)
            assert (await ask()).status_code == 429
            await anyio.sleep(wait_s / 2)
            assert (await ask()).status_code == 200


@virtual_time
async def test_other_keys_hold_at_once_and_those_that_stay_keep_their_use() -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        door = Door(fleet, Settings(keys=(CLIENT,)))
        async with client_of(app_of(door), headers=bearer("client-secret")) as client:
            body = {"model": "a", "prompt": [1], "max_tokens": 200, "temperature": 0, "ignore_eos": True}
            found: list[int] = []

            async def ask() -> None:
                found.append((await client.post("/v1/completions", json=body)).status_code)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await anyio.sleep(0.05)
                door.use(Settings(keys=(CLIENT, OPERATOR)))
                await ask()  # it may have one at a time, and has it still
            assert sorted(found) == [200, 429]
            door.use(Settings(keys=(OPERATOR,), hosts=("other",)))
            assert (await client.get("/v1/models")).status_code == 421
            door.use(Settings(keys=(ApiKey(secret="another-secret"),)))
            assert (await client.get("/v1/models")).status_code == 401


@pytest.mark.parametrize(("address", "status"), [("127.0.0.1", 200), ("::1", 200), ("10.0.0.7", 403)])
@virtual_time
async def test_without_a_key_operators_are_on_this_machine(address: str, status: int) -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        app, sent = create_app(fleet), list[Message]()

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "GET",
            "path": "/admin/view",
            "query_string": b"",
            "headers": [],
            "client": (address, 5),
        }
        await app(scope, receive, send)
        assert sent[0]["status"] == status


@virtual_time
async def test_a_server_answers_to_its_names_alone() -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        app = create_app(fleet, hosts=("localhost", "::1"))
        async with client_of(app) as client:
            for host, status in (("localhost:8000", 200), ("[::1]:80", 200), ("evil.example", 421)):
                assert (await client.get("/v1/models", headers={"host": host})).status_code == status


@virtual_time
async def test_an_application_may_be_mounted_under_a_path() -> None:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    async with sim_fleet("a", scheduler=Idle()) as fleet:
        app = Starlette(routes=[Mount("/llm", create_app(fleet, keys=(CLIENT, OPERATOR)))])
        async with client_of(app) as client:
            assert (await client.get("/llm/live")).status_code == 200
            assert (await client.get("/llm/v1/models")).status_code == 401
            assert (await client.get("/llm/admin/view", headers=bearer("client-secret"))).status_code == 403


def test_a_secret_is_not_shown_and_not_short() -> None:
    assert "client-secret" not in repr(CLIENT)
    with pytest.raises(ConfigError, match="too short"):
        ApiKey(secret="abc")


@virtual_time
async def test_a_key_is_needed_to_generate() -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        app = create_app(fleet, keys=(CLIENT,))
        caller = Caller(app, "/v1/completions", {"model": "a", "prompt": [1]})
        await caller()
        assert caller.sent[0]["status"] == 401
        assert not fleet.view().waiting


@pytest.mark.parametrize("root", ["", "/", "/adm", "/admin", "/llm", "/llm/", "/v1", "/mod", "/live", "/l"])
@virtual_time
async def test_no_root_path_leads_past_the_keys(root: str) -> None:
    operators = ("/admin/view", "/admin/swaps", "/models/load", "/v1/load_lora_adapter", "/metrics")
    clients = ("/v1/models", "/v1/completions", "/tokenize")
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        app = create_app(fleet, keys=(CLIENT, OPERATOR))

        async def status(path: str, method: str, **headers: str) -> int:
            caller = Caller(app, path, {}, root_path=root, **headers)
            await (caller.get() if method == "GET" else caller)()
            return int(caller.sent[0]["status"])

        for method in ("GET", "POST"):
            for path in (*operators, *(root + path for path in operators)):
                assert await status(path, method, **bearer("client-secret")) in (403, 404, 405), path
            for path in (*operators, *clients, *(root + path for path in (*operators, *clients))):
                assert await status(path, method) in (401, 404), path


ENDPOINTS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/tokenize",
    "/detokenize",
)


@pytest.mark.parametrize("path", ENDPOINTS)
@virtual_time
async def test_a_key_is_held_to_its_limits_before_its_body_is_read(path: str) -> None:
    key = ApiKey(secret="client-secret", requests=1, tokens_per_minute=60)
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        app = create_app(fleet, keys=(key,))
        async with (
            client_of(app, headers=bearer("client-secret")) as client,
            anyio.create_task_group() as tasks,
        ):
            slow = Caller(app, path, None, **bearer("client-secret"))
            slow.withhold()
            tasks.start_soon(slow)
            await anyio.sleep(1.0)
            # It is wrong, which is not looked at.
            refused = await client.post(path, json={"what": 1})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after-ms"]) > 0
            assert (refused.json().get("type") == "error") is (path == "/v1/messages")
            slow.leave()
            await slow.ended.wait()
            assert (await client.post(path, json={"what": 1})).status_code == 400
            body = {"model": "a", "prompt": [1] * 100, "max_tokens": 1}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            assert (await client.post(path, json={"what": 1})).status_code == 429


@virtual_time
async def test_a_request_spends_the_tokens_of_its_prompts_however_it_ends() -> None:
    key = ApiKey(secret="client-secret", tokens_per_minute=60)
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        async with client_of(create_app(fleet, keys=(key,)), headers=bearer("client-secret")) as client:
            body = {"model": "a", "prompt": [[1] * 100, [1] * 10**6], "max_tokens": 1}
            assert (await client.post("/v1/completions", json=body)).status_code == 400
            assert (await client.post("/v1/completions", json=body)).status_code == 429


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
@virtual_time
async def test_the_tokenizer_spends_a_key_s_tokens(path: str) -> None:
    key = ApiKey(secret="client-secret", tokens_per_minute=60)
    async with sim_fleet("a", store=WithTokenizer(store_of("a")), scheduler=Idle()) as fleet:
        app = create_app(fleet, keys=(key,))
        async with client_of(app, headers=bearer("client-secret")) as client:
            body = {"model": "a"} | ({"prompt": "a" * 100} if path == "/tokenize" else {"tokens": [97] * 100})
            assert (await client.post(path, json=body)).status_code == 200
            refused = await client.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
            await anyio.sleep(int(refused.headers["retry-after"]))
            assert (await client.post(path, json=body)).status_code == 200


@virtual_time
async def test_without_a_key_no_model_is_named() -> None:
    wanted = models("a", "b", min_replicas=1)
    async with sim_fleet("a", "b", models=wanted, scheduler=Idle()) as fleet:
        async with client_of(create_app(fleet, keys=(CLIENT, OPERATOR))) as client:
            for path in ("/ready?model=a", "/ready?model=zz", "/ready?model="):
                assert (await client.get(path)).status_code == 401
            assert (await client.get("/ready")).json()["reasons"] == ["models with too few replicas: 2"]
            told = (await client.get("/ready", headers=bearer("client-secret"))).json()["reasons"]
            assert told == ["a has 0 of 1 replicas", "models with too few replicas: 1"]
            others = [
                await client.get(f"/ready?model={name}", headers=bearer("client-secret"))
                for name in ("b", "zz")
            ]
            assert {one.status_code for one in others} == {404}
            assert others[0].text == others[1].text
            assert (await client.get("/ready?model=b", headers=bearer("operator-secret"))).status_code == 503
        async with client_of(create_app(fleet)) as client:
            assert (await client.get("/ready?model=b")).status_code == 503
