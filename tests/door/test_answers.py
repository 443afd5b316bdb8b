"""What a door answers: the same tokens as the fleet gives, in OpenAI's form, and errors by their place."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotswap import Adapter, Fleet, Sampling
from hotswap.door import Limits, create_app
from hotswap.offline.virtual_time import virtual_time
from tests.door.support import Caller, client_of, events_of
from tests.runtime.support import Idle, engine_of, idle, sim_fleet, store_of
from tests.runtime.test_text import WithTokenizer

PROMPT = "abcd"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@asynccontextmanager
async def door(**limits: Any) -> AsyncGenerator[tuple[Fleet, httpx.AsyncClient]]:
    """A fleet of texts that serves `a`, with a client of its door."""
    store, engines = WithTokenizer(store_of("a", "b")), [engine_of("e0", max_adapters=2), engine_of("e1")]
    async with sim_fleet("a", "b", engines=engines, store=store, scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        async with client_of(create_app(fleet, limits=Limits(**limits))) as client:
            yield fleet, client
        idle(fleet)


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "a", "prompt": PROMPT, "temperature": 0, "max_tokens": 20, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "a", "messages": [{"role": "user", "content": "x"}], **fields}


@virtual_time
async def test_an_answer_has_what_the_fleet_gives() -> None:
    async with door() as (fleet, client):
        whole = (await client.post(COMPLETIONS, json=asked())).json()
        right = await fleet.generate("a", PROMPT, Sampling(max_tokens=20))
        (choice,) = whole["choices"]
        assert (choice["text"], choice["finish_reason"]) == (right.text, right.finish_reason)
        assert whole["usage"]["prompt_tokens"] == right.usage.prompt_tokens
        assert whole["usage"]["completion_tokens"] == len(right.tokens)
        streamed = events_of((await client.post(COMPLETIONS, json=asked(stream=True))).text)
        assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == right.text
        assert [chunk["choices"][0]["finish_reason"] for chunk in streamed][-1] == right.finish_reason


@virtual_time
async def test_a_stream_tells_its_usage_if_it_is_asked_to() -> None:
    async with door() as (_, client):
        body = asked(stream=True, stream_options={"include_usage": True})
        *chunks, last = events_of((await client.post(COMPLETIONS, json=body)).text)
        assert all(chunk["usage"] is None for chunk in chunks)
        assert last["choices"] == []
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 20


@pytest.mark.parametrize("stream", [False, True])
@virtual_time
async def test_every_prompt_has_its_choices(stream: bool) -> None:
    async with door() as (fleet, client):
        body = asked(prompt=["ab", "cd"], n=2, temperature=1.0, seed=5, stream=stream)
        response = await client.post(COMPLETIONS, json=body)
        sampling = Sampling(n=2, temperature=1.0, seed=5, max_tokens=20)
        right = [s.text for p in ("ab", "cd") for s in (await fleet.generate("a", p, sampling)).samples]
        texts = [""] * 4
        for value in events_of(response.text) if stream else [response.json()]:
            for choice in value["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == right


@virtual_time
async def test_token_ids_are_prompts_too() -> None:
    async with door() as (fleet, client):
        for prompt in ([1, 2, 3], [[1, 2, 3]]):
            answer = (await client.post(COMPLETIONS, json=asked(prompt=prompt))).json()
            right = await fleet.generate("a", (1, 2, 3), Sampling(max_tokens=20))
            assert answer["choices"][0]["text"] == right.text


@pytest.mark.parametrize("stream", [False, True])
@virtual_time
async def test_log_probabilities_have_openais_form(stream: bool) -> None:
    async with door() as (fleet, client):
        response = await client.post(COMPLETIONS, json=asked(logprobs=2, stream=stream))
        told: dict[str, list[Any]] = {}
        for value in events_of(response.text) if stream else [response.json()]:
            for key, entries in value["choices"][0]["logprobs"].items():
                told.setdefault(key, []).extend(entries)
        right = await fleet.generate("a", PROMPT, Sampling(max_tokens=20, logprobs=2))
        assert told["tokens"] == [token.text for token in right.tokens]
        assert told["token_logprobs"] == [token.logprob for token in right.tokens]
        assert all(1 <= len(top) <= 2 for top in told["top_logprobs"])
        assert told["text_offset"] == [
            len("".join(token.text for token in right.tokens[:at])) for at in range(len(right.tokens))
        ]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (COMPLETIONS, asked(model="zz"), 404, "model"),
        (COMPLETIONS, asked(model="a:zz"), 404, "model"),
        (COMPLETIONS, asked(what=1), 400, "what"),
        (COMPLETIONS, asked(max_tokens=0), 400, "max_tokens"),
        (COMPLETIONS, asked(n=2), 400, "n"),
        (COMPLETIONS, asked(n=2, best_of=3, temperature=1), 400, "best_of"),
        (COMPLETIONS, asked(echo=True), 400, "echo"),
        (COMPLETIONS, asked(prompt=[]), 400, "prompt"),
        (COMPLETIONS, asked(prompt=[1] * 5000), 400, "prompt"),
        (COMPLETIONS, asked(prompt=["a"] * 129), 400, "n"),
        (COMPLETIONS, asked(priority=10**6), 400, "priority"),
        (COMPLETIONS, asked(logit_bias={"x": 1}), 400, None),
        (COMPLETIONS, asked(response_format={"type": "json_schema"}), 400, "response_format"),
        (CHATS, chat(messages=[]), 400, "messages"),
        (CHATS, chat(messages=[{"role": "user", "content": 5}]), 400, "messages[0].content"),
        (CHATS, chat(top_logprobs=2), 400, "top_logprobs"),
        (CHATS, chat(tool_choice="required"), 400, "tool_choice"),
        ("/v1/embeddings", {}, 400, None),
        ("/v1/what", {}, 404, None),
    ],
)
@virtual_time
async def test_what_is_wrong_is_named_and_makes_no_swap(
    path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    async with door() as (fleet, client):
        for stream in ({}, {"stream": True}) if path == COMPLETIONS else ({},):
            response = await client.post(path, json=body | stream)
            assert response.status_code == status, response.text
            error = response.json()["error"]
            assert error["message"]
            assert error["code"]
            assert param is None or error["param"] == param
        assert len(fleet.swaps) == 1


@virtual_time
async def test_bodies_are_json_and_bounded_in_size_and_time() -> None:
    async with door(body_bytes=100, body_s=5.0) as (_, client):
        text = await client.post(COMPLETIONS, content=b"{}", headers={"content-type": "text/plain"})
        assert text.status_code == 415
        assert (await client.post(COMPLETIONS, json=asked(user="x" * 100))).status_code == 413

        async def slowly() -> AsyncGenerator[bytes]:
            yield b"{"
            await anyio.sleep(10.0)

        headers = {"content-type": "application/json"}
        assert (await client.post(COMPLETIONS, content=slowly(), headers=headers)).status_code == 408


@virtual_time
async def test_a_request_has_a_deadline() -> None:
    async with door(request_s=5.0) as (_, client):
        for body in (asked(model="b", prompt=[1]), asked(model="b", prompt=[1], timeout_s=1.0)):
            response = await client.post(COMPLETIONS, json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")


@virtual_time
async def test_a_stream_that_waits_long_is_told_of_the_load_and_then_of_its_error() -> None:
    async with door(commit_after_s=1.0, request_s=30.0) as (fleet, client):
        app = create_app(fleet, limits=Limits(commit_after_s=0.05, request_s=30.0))
        caller = Caller(app, COMPLETIONS, asked(model="b", prompt=[1], stream=True))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(caller)
            await caller.until(lambda: ": waiting for b" in caller.text)
            await fleet.swap("e1", to="b")
            await caller.ended.wait()
        assert caller.text.endswith("data: [DONE]\n\n")
        assert caller.sent[0]["status"] == 200
        # An error behind the head is an event, and no [DONE] follows.
        await fleet.unload("e1")
        late = (await client.post(COMPLETIONS, json=asked(model="b", prompt=[1], stream=True))).text
        assert '"code":"deadline_exceeded"' in late
        assert "[DONE]" not in late


@virtual_time
async def test_all_tokens_of_an_interval_are_written_at_once() -> None:
    async with door() as (fleet, _):
        app = create_app(fleet, limits=Limits(stream_interval_s=0.2))
        joined, each = (
            Caller(a, COMPLETIONS, asked(max_tokens=100, stream=True, ignore_eos=True))
            for a in (app, create_app(fleet))
        )
        for caller in (joined, each):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(caller)
        texts = ["".join(c["choices"][0]["text"] for c in events_of(one.text)) for one in (joined, each)]
        assert texts[0] == texts[1]
        assert len(joined.sent) < len(each.sent) / 5


@virtual_time
async def test_models_are_listed_with_their_state() -> None:
    async with door() as (fleet, client):
        fleet.models.alias("org/other", "a")
        fleet.adapters.add(Adapter("x", "a"))
        listed = (await client.get("/v1/models")).json()["data"]
        found = {entry["id"]: (entry["root"], entry["parent"], entry["status"]["value"]) for entry in listed}
        assert found == {
            "a": ("a", None, "loaded"),
            "b": ("b", None, "unloaded"),
            "org/other": ("a", "a", "loaded"),
            "a:x": ("a", "a", "loaded"),
        }
        for entry in listed:
            assert (await client.get(f"/v1/models/{entry['id']}")).json() == entry
            if entry["id"] != "b":
                answer = await client.post(COMPLETIONS, json=asked(model=entry["id"], max_tokens=2))
                assert answer.status_code == 200
        assert (await client.get("/v1/models/zz")).status_code == 404
        assert (await client.get("/v1/models/a:zz")).status_code == 404


class Watching:
    """A middleware that keeps what passes."""

    def __init__(self, app: ASGIApp, seen: list[bytes]) -> None:
        self._app, self._seen = app, seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watch(message: Message) -> None:
            self._seen.append(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, watch)


@virtual_time
async def test_a_middleware_that_is_added_sees_all_writes_of_a_stream() -> None:
    async with door() as (fleet, _):
        app, seen = create_app(fleet), list[bytes]()
        app.add_middleware(Watching, seen=seen)
        outer = Starlette(routes=[Mount("/llm", app)])
        async with client_of(outer) as client:
            answer = await client.post(f"/llm{COMPLETIONS}", json=asked(stream=True))
        assert answer.content == b"".join(seen)
        assert len(seen) > 10
        assert len(events_of(answer.text)) > 10


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/v1/responses", "/v1/messages"])
@virtual_time
async def test_a_method_that_an_endpoint_does_not_take_is_refused(path: str) -> None:
    async with door() as (_, client):
        answer = await client.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, "unknown_url")
        assert answer.headers["allow"] == "POST"


@virtual_time
async def test_texts_are_tokenized() -> None:
    async with door() as (fleet, client):
        answer = (await client.post("/tokenize", json={"model": "a", "prompt": PROMPT})).json()
        assert answer["tokens"] == list(await fleet.models.encode("a", PROMPT))
        assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 4096)
        text = await client.post("/detokenize", json={"model": "a", "tokens": answer["tokens"]})
        assert text.json()["prompt"] == await fleet.models.decode("a", answer["tokens"])
        wrong = await client.post("/tokenize", json={"model": "a"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "prompt")


@virtual_time
async def test_a_stream_over_swaps_moves_and_losses_has_the_text_of_an_undisturbed_one() -> None:
    engines = [engine_of("e0"), engine_of("e1")]
    store = WithTokenizer(store_of("a", "b"))
    async with sim_fleet("a", "b", engines=engines, store=store, scheduler=Idle()) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to="a")
        long = asked(prompt=[1, 2, 3], max_tokens=400, ignore_eos=True, stream=True)
        caller = Caller(create_app(fleet), COMPLETIONS, long)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(caller)
            for disturb in ("move", "lose", "swap"):
                await anyio.sleep(0.5)
                (running,) = fleet.view().running
                here = running.instance
                other = "e1" if here == "e0" else "e0"
                if disturb == "move":
                    await fleet.migrate(running.id, to=other)
                elif disturb == "lose":
                    next(engine for engine in engines if engine.id == here).lose()
                else:
                    await fleet.swap(here, to="b")
                    await fleet.swap(other, to="a")
            await caller.ended.wait()
        text = "".join(chunk["choices"][0]["text"] for chunk in events_of(caller.text))
        right = await fleet.generate("a", (1, 2, 3), Sampling(max_tokens=400, ignore_eos=True))
        assert text == right.text
        assert len(right.tokens) == 400


@virtual_time
async def test_a_stream_in_which_one_choice_fails_does_not_end_as_if_none_had() -> None:
    # Between two writes one choice ends, and the other one fails.
    async with door(stream_interval_s=10.0) as (fleet, _):
        app = create_app(fleet, limits=Limits(stream_interval_s=10.0))
        body = asked(prompt=["ab", "cd"], max_tokens=100, ignore_eos=True, stream=True)
        caller = Caller(app, COMPLETIONS, body)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(caller)
            await caller.until(lambda: len(caller.sent) > 1)
            fleet.cancel(max(request.id for request in fleet.view().running))
            await caller.ended.wait()
        assert '"code":"request_cancelled"' in caller.text
        assert "[DONE]" not in caller.text
