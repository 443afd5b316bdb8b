"""Every block of code of every page is held against the package, and those of policies and requests run."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import tomllib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from inspect import isawaitable
from pathlib import Path
from types import CodeType

import pytest

from hotswap import Adapter, Chat, Fleet, FleetStream, Sampling, policies
from hotswap.cli import _parser
from hotswap.config import read_config
from hotswap.door import ApiKey, create_app
from hotswap.door.openapi import document
from hotswap.offline.virtual_time import virtual_time
from hotswap.policies.by_name import router_named, scheduler_named
from tests.docs.calls import wrong_calls
from tests.docs.pages import DOCS
from tests.house.tree import ROOT
from tests.runtime.support import Idle, engine_of, sim_fleet

PAGES = [ROOT / "README.md", *(page for page in sorted(DOCS.rglob("*.md")) if "decisions" not in page.parts)]
_BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    """All blocks of a language, by page and without the indentation of a list."""
    return [
        (
            page.relative_to(ROOT).as_posix(),
            "\n".join(line.removeprefix(indent) for line in code.splitlines()),
        )
        for page in PAGES
        for indent, of, code in _BLOCK.findall(page.read_text("utf-8"))
        if of == language
    ]


def runnable(page: str, contains: str) -> CodeType:
    """The only block of a page that contains a text, compiled; it may await."""
    (code,) = (code for of, code in blocks("python") if of == f"docs/{page}" and contains in code)
    compiled = compile(code, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(compiled, CodeType)
    return compiled


async def run(code: CodeType, names: dict[str, object]) -> None:
    if isawaitable(done := eval(code, names)):
        await done


def test_every_block_of_python_calls_what_there_is() -> None:
    found = blocks("python")
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
        for page, code in blocks("sh")
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
    asked = [(page, code) for page, code in blocks("sh") if "curl " in code and ":8000/" in code]
    assert len(asked) > 3
    for page, code in asked:
        for path in re.findall(r":8000(/[\w/]+)", code):
            assert path in paths or path.startswith(("/llm/", "/ask", "/busy")), f"{page}: {path}"
        for body in re.findall(r"-d '(.*?)'", code, re.DOTALL):
            assert isinstance(json.loads(body), dict), page


def test_every_file_of_toml_is_a_fleet(tmp_path: Path) -> None:
    found = blocks("toml")
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
    code = next(code for of, code in blocks("python") if of == "docs/chat.md").partition("done =")[0]
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
