"""Every block of code of every page is held against the package, and those of policies and requests run."""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider

from hotswap import Adapter, Chat, Fleet, FleetStream, MigrationLimits, Model, Sampling, policies
from hotswap.abc import ModelCard
from hotswap.backends.kv_stores import HostKVStore
from hotswap.backends.sim import SimEngine, SimStore, sim_manifest
from hotswap.cli import _parser
from hotswap.config import read_config
from hotswap.door import ApiKey, Served, create_app
from hotswap.door.openapi import document
from hotswap.hardware import parse_bytes
from hotswap.offline.virtual_time import virtual_time
from hotswap.policies.by_name import router_named, scheduler_named
from hotswap.testing import KVStoreConformance
from tests.docs.calls import wrong_calls
from tests.docs.running import all_blocks, free_port, run, runnable
from tests.runtime.support import Idle, engine_of, sim_fleet


def test_every_block_of_python_calls_what_there_is() -> None:
    found = all_blocks("python")
    assert len(found) > 50
    assert [f"{page}: {said}" for page, code in found for said in wrong_calls(code, page)] == []


def test_a_wrong_call_is_found() -> None:
    wrong = "from hotswap.policies import Nothing\nawait fleet.swap('e0', into='a')\nfleet.models.put(1)"
    assert len(wrong_calls(wrong, "a test")) == 3
    assert wrong_calls("Sampling(json_shema={})", "a test") != []
    assert wrong_calls("await fleet.swap('e0', to='a', deadline_s=2.0)", "a test") == []


def test_every_command_of_hotswap_is_one() -> None:
    lines = [
        (page, line.partition(" #")[0].strip())
        for page, code in all_blocks("sh")
        for line in code.replace("\\\n", " ").splitlines()
        if line.startswith("hotswap ")
    ]
    assert len(lines) > 15
    for page, line in lines:
        _, *words = shlex.split(line.partition(" > ")[0])
        try:
            _parser().parse_args(words)
        except SystemExit:
            pytest.fail(f"{page}: {line} is no command")


def test_every_request_of_curl_is_one_of_the_endpoints() -> None:
    paths = document()["paths"]
    assert isinstance(paths, dict)
    asked = [(page, code) for page, code in all_blocks("sh") if "curl " in code and ":8000/" in code]
    assert len(asked) > 3
    for page, code in asked:
        for path in re.findall(r":8000(/[\w/]+)", code):
            assert path in paths or path.startswith(("/llm/", "/ask", "/busy")), f"{page}: {path}"
        for body in re.findall(r"-d '(.*?)'", code, re.DOTALL):
            assert isinstance(json.loads(body), dict), page


def test_every_file_of_toml_is_a_fleet(tmp_path: Path) -> None:
    found = all_blocks("toml")
    assert len(found) > 6
    for page, text in found:
        assert tomllib.loads(text), page
        (tmp_path / "fleet.toml").write_text(text)
        fleet = read_config(tmp_path / "fleet.toml")
        if fleet.policy.scheduler is not None:
            scheduler_named(fleet.policy.scheduler)
        if fleet.policy.router is not None:
            router_named(fleet.policy.router)


@pytest.mark.parametrize(
    "starts", ["router = Cons", "scheduler = Fore", "scheduler = Chain(W", "FreenessRouter()"]
)
async def test_the_policies_of_their_page_are_made(starts: str) -> None:
    names: dict[str, object] = {name: getattr(policies, name) for name in policies.__all__}
    await run(runnable("policies.md", starts), names)
    assert {"router", "scheduler"} & names.keys()


@virtual_time
async def test_samples_are_drawn_as_the_page_has_it() -> None:
    async with sim_fleet("llama") as fleet:
        await run(
            runnable("requests.md", "done.samples"),
            {"fleet": fleet, "prompt": [1, 2, 3], "Sampling": Sampling},
        )


@virtual_time
async def test_adapters_change_as_the_page_has_it() -> None:
    engines = [engine_of("e0", max_adapters=2)]
    kept = [Adapter("sql", "llama"), Adapter("law", "llama")]
    async with sim_fleet("llama", engines=engines, adapters=kept) as fleet:
        await run(runnable("adapters.md", "fleet.adapters.add"), {"fleet": fleet, "Adapter": Adapter})
        assert {adapter.id for adapter in fleet.adapters} == {"sql", "poems"}


@virtual_time
async def test_operations_empty_an_instance_as_the_page_has_it() -> None:
    engines = [engine_of("e0"), engine_of("e1")]
    async with sim_fleet("llama-8b", "llama-8b-v2", engines=engines, scheduler=Idle()) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to="llama-8b")
        await run(runnable("migration.md", "fleet.drain"), {"fleet": _Texts(fleet), "TorchEngine": engine_of})
        view = fleet.view()
    assert {instance.id: instance.model for instance in view.instances} == {
        "e1": "llama-8b-v2",
        "e2": "llama-8b-v2",
    }
    assert [record.method for record in fleet.migrations if record.outcome == "done"][:1] == ["kv"]


class _Texts:
    """A fleet whose requests are texts, for models without a tokenizer; a stream is lent once it runs."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def __getattr__(self, name: str) -> object:
        return getattr(self._fleet, name)

    @asynccontextmanager
    async def stream(self, model: str, text: str) -> AsyncGenerator[FleetStream]:
        sampling = Sampling(max_tokens=400, ignore_eos=True)
        async with self._fleet.stream(model, [len(text)], sampling) as stream:
            await anext(stream)
            yield stream


def test_the_conversation_of_its_page_is_one() -> None:
    code = next(code for of, code in all_blocks("python") if of == "docs/chat.md").partition("done =")[0]
    names: dict[str, object] = {}
    exec(compile(code, "chat.md", "exec"), names)
    messages = names["messages"]
    assert isinstance(messages, list)
    assert Chat(messages).messages


@virtual_time
async def test_the_door_opens_with_keys_as_the_page_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CLIENT_KEY", "OPERATOR_KEY"):
        monkeypatch.setenv(name, f"{name} of a test")
    async with sim_fleet("llama") as fleet:
        names: dict[str, object] = {"fleet": fleet, "os": os, "ApiKey": ApiKey, "create_app": create_app}
        await run(runnable("door.md", "ApiKey("), names)
        assert names["app"] is not None


def fleet_of(*_: object, **options: Any) -> Fleet:
    """In place of the `Fleet(..., more=)` of a page: a simulated fleet has what the page leaves out."""
    return sim_fleet("llama", **options)


async def test_a_server_listens_as_the_page_has_it() -> None:
    port = free_port()
    said: list[int] = []

    async def ask() -> None:
        async with httpx.AsyncClient() as client:
            said.append((await client.get(f"http://127.0.0.1:{port}/v1/models")).status_code)

    names = {"Fleet": fleet_of, "anyio": SimpleNamespace(sleep_forever=ask)}
    await run(runnable("door.md", "listen(", {"8000": port}), names)
    assert said == [200]


@virtual_time
async def test_a_fleet_has_the_parts_that_pages_give_it() -> None:
    names: dict[str, Any] = {name: getattr(policies, name) for name in policies.__all__}
    names |= {"Fleet": fleet_of, "MigrationLimits": MigrationLimits}
    names["Sampling"] = Sampling
    asked = ' as fleet:\n    done = await fleet.generate("llama", [1], Sampling(max_tokens=2))'
    await run(runnable("policies.md", "on_migration=", {" as fleet:\n    ...": asked}), names)
    assert len(names["done"].tokens) == 2
    providers = {"tracer_provider": TracerProvider(), "meter_provider": MeterProvider()}
    await run(runnable("telemetry.md", "tracer_provider"), names | providers)


async def test_values_are_made_as_pages_have_them() -> None:
    names: dict[str, Any] = {name: getattr(policies, name) for name in policies.__all__}
    names |= {"Model": Model, "ModelCard": ModelCard, "Served": Served, "parse_bytes": parse_bytes}
    await run(runnable("checkpoints.md", "for a LlamaCppEngine"), names)
    await run(runnable("door.md", "Served("), names)
    await run(runnable("policies.md", "PrePlacement("), names)
    await run(runnable("policies.md", "ElasticMemory("), names)
    names |= {"model": Model("a"), "manifest": sim_manifest("a", 1 << 30)}
    await run(runnable("policies.md", "SharingAdvisor(", {"            ...,\n": ""}), names)


@virtual_time
async def test_an_engine_is_measured_as_the_page_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {
        "engine": SimEngine("e0", kv_blocks=4096),
        "Model": Model,
        "ModelCard": ModelCard,
        "store": SimStore([sim_manifest("llama", 1 << 30)]),
    }
    await run(runnable("simulation.md", "measure_engine"), names)
    mean, _ = map(float, capsys.readouterr().out.split())
    assert mean < 0.05


async def test_two_stores_of_a_directory_are_shared_as_the_page_has_them(tmp_path: Path) -> None:
    places = {"/dev/shm/chats": str(tmp_path / "chats"), "64 GiB": "4 MiB"}
    names: dict[str, Any] = {}
    for _ in range(2):
        await run(runnable("kv-blocks.md", "SharedKVStore", places), names)
        async with names["kv_store"] as store:
            assert store.view().capacity_bytes == 4 << 20
    names["kv_store"].unlink()
    assert not (tmp_path / "chats").exists()


async def test_a_store_on_the_machines_of_engines_is_made_as_the_page_has_it() -> None:
    names: dict[str, Any] = {}
    await run(runnable("kv-blocks.md", "NodeKVStore", {"64 GiB": "4 MiB", "16 GiB": "1 MiB"}), names)
    async with names["kv_store"] as store:
        assert store.view().capacity_bytes == 1 << 20, "that of no engine elsewhere yet"


def test_a_store_of_ones_own_is_checked_by_its_suite() -> None:
    names: dict[str, Any] = {"KVStoreConformance": KVStoreConformance, "MyStore": HostKVStore}
    exec(runnable("kv-blocks.md", "KVStoreConformance"), names)
    assert names["TestMyStore"]().make_store(1 << 20) is not None
