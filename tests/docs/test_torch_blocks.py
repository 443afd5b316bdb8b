"""Blocks of the pages over engines that compute run as they are written, on a small model of a script."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

import hotswap
from hotswap import Adapter, Chat, Fleet, Model, Sampling
from hotswap.backends.remote import EngineHost
from hotswap.backends.stores import NvmeStore
from hotswap.backends.torch import TorchEngine
from hotswap.backends.transports import LinkSecret, connect_tcp, serve_tcp
from hotswap.errors import HotswapError, QueueFull, RequestError
from hotswap.policies import AffinityRouter
from tests.backends.transports.certificates import contexts
from tests.docs.running import free_port, run, runnable, until_open
from tests.runtime import alphabet
from tests.runtime.test_torch_chat import adapter

SECRET = b"the content of a file that all nodes have"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return alphabet.checkpoint(tmp_path_factory.mktemp("alphabet"))


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_bytes(SECRET)
    return tmp_path / "secret"


@asynccontextmanager
async def serving(source: Path, tmp_path: Path) -> AsyncGenerator[Fleet]:
    models = [Model("llama", source)]
    async with Fleet(engines=[TorchEngine("e0")], store=NvmeStore(tmp_path), models=models) as fleet:
        yield fleet


async def test_a_request_names_an_adapter(source: Path, tmp_path: Path) -> None:
    places = {
        "/models/llama": source,
        "/adapters/sql": adapter(tmp_path / "sql").source,
        "/adapters/law": adapter(tmp_path / "law").source,
        "        ...": "        said = [token.text async for token in tokens]",
    }
    names: dict[str, Any] = {
        "Adapter": Adapter,
        "AffinityRouter": AffinityRouter,
        "Fleet": Fleet,
        "Model": Model,
        "TorchEngine": TorchEngine,
        "store": NvmeStore(tmp_path / "store"),
    }
    await run(runnable("adapters.md", "async with Fleet(", places), names)
    assert set(names["said"]) == {"."}  # each token is followed by itself, but letters


async def test_a_chat_is_answered_streamed_and_continued(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"Chat": Chat, "Sampling": Sampling, "tools": []}
    async with serving(source, tmp_path) as names["fleet"]:
        await run(runnable("chat.md", "stream("), names)
        await run(runnable("chat.md", "draft"), names)
    assert "Usage(" in capsys.readouterr().out
    assert names["done"].text == "fghijklmnopqrstuvwxyz"  # after the "Because" that it goes on from


async def test_an_answer_is_json_of_the_schema(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"Sampling": Sampling}
    async with serving(source, tmp_path) as names["fleet"]:
        await run(runnable("json.md", "COLORS"), names)
    assert names["done"].finish_reason == "stop"
    assert json.loads(names["done"].text).keys() == {"noon", "evening"}
    assert capsys.readouterr().out.strip() in {"blue", "red"}


async def test_errors_are_told_apart(source: Path, tmp_path: Path) -> None:
    class BadQuestion(Exception): ...

    names: dict[str, Any] = {
        "anyio": anyio,
        "BadQuestion": BadQuestion,
        "HotswapError": HotswapError,
        "QueueFull": QueueFull,
        "RequestError": RequestError,
    }
    async with serving(source, tmp_path) as names["fleet"]:
        await run(runnable("errors.md", "try:"), names | {"prompt": "a"})
        with pytest.raises(BadQuestion, match="context"):
            await run(runnable("errors.md", "try:"), names | {"prompt": "a" * 600})


async def test_kv_blocks_are_kept_in_host_memory(source: Path, tmp_path: Path) -> None:
    names: dict[str, Any] = {
        "hotswap": hotswap,
        "models": [Model("a", source), Model("b", source)],
        "store": NvmeStore(tmp_path),
        "TorchEngine": TorchEngine,
    }
    asked = """    first = await fleet.generate("a", "b" * 100, hotswap.Sampling(max_tokens=2))
    again = await fleet.generate("a", "b" * 100, hotswap.Sampling(max_tokens=2))"""
    places = {'"64 GiB"': '"4 MiB"', "    ...": asked}
    await run(runnable("kv.md", "HostKVStore", places), names)
    assert names["again"].text == names["first"].text == "cd"


async def test_engines_share_the_memory_of_a_device(source: Path, tmp_path: Path) -> None:
    names: dict[str, Any] = {
        "models": [Model("a", source), Model("b", source)],
        "store": NvmeStore(tmp_path),
    }
    asked = """    first = await fleet.generate("a", "b" * 100, Sampling(max_tokens=2))
    other = await fleet.generate("b", "b" * 100, Sampling(max_tokens=2))"""
    places = {'"40 GiB"': '"40 MiB"', '"18 GiB"': '"18 MiB"', "    ...": asked}
    names["Sampling"] = Sampling
    await run(runnable("device-memory.md", "Fleet(", places), names)
    assert names["first"].text == names["other"].text == "cd"
    assert names["budget"].held_bytes == 0, "closed engines hold nothing"


async def test_gguf_files_are_served_by_llama_cpp(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    from tests.backends.llamacpp.gguf_files import write_gguf

    places = {
        "/var/cache/hotswap": tmp_path / "store",
        "/models/qwen3-8b-q4_k_m.gguf": write_gguf(tmp_path / "qwen.gguf", seed=0),
    }
    names: dict[str, Any] = {"Fleet": Fleet, "Model": Model, "NvmeStore": NvmeStore}
    await run(runnable("llamacpp.md", "LlamaCppEngine", places), names)
    async with names["fleet"] as fleet:
        done = await fleet.generate("qwen", [5, 6, 7], Sampling(max_tokens=3, ignore_eos=True))
    assert len(done.tokens) == 3


async def test_an_engine_is_served_on_one_machine_and_used_on_another(
    source: Path, tmp_path: Path, secret_file: Path
) -> None:
    port = free_port()
    here = {"10.0.0.7": "127.0.0.1", "7000": port}
    served = {**here, "/run/secrets/links": secret_file, "cuda:0": "cpu"}
    far: dict[str, Any] = {
        "anyio": anyio,
        "partial": partial,
        "Path": Path,
        "TieredStore": lambda _: NvmeStore(tmp_path),
        "TorchEngine": TorchEngine,
    }
    near: dict[str, Any] = {
        "Fleet": Fleet,
        "models": [Model("a", source)],
        "partial": partial,
        "secret": LinkSecret(SECRET),
        "store": NvmeStore(tmp_path),
    }
    asked = '    done = await fleet.generate("a", "abc", Sampling(max_tokens=3))'
    used = {**here, "[engine, ...]": "[engine]", "    ...": asked}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, runnable("remote.md", "host.peers", served), far)
        await until_open(port)
        await run(runnable("remote.md", "RemoteEngine(", used), near | {"Sampling": Sampling})
        tasks.cancel_scope.cancel()
    assert "peers" in dir(far["host"])


async def test_links_are_encrypted(tmp_path: Path, secret_file: Path) -> None:
    server, client = contexts()
    places = {"10.0.0.7": "127.0.0.1", "7000": free_port(), "/run/secrets/links": secret_file}
    names: dict[str, Any] = {
        "client": client,
        "connect_tcp": connect_tcp,
        "engine": TorchEngine("e0"),
        "EngineHost": EngineHost,
        "LinkSecret": LinkSecret,
        "partial": partial,
        "Path": Path,
        "serve_tcp": serve_tcp,
        "server": server,
        "store": NvmeStore(tmp_path),
    }
    async with names["store"], names["engine"], anyio.create_task_group() as tasks:
        names["tasks"] = tasks
        await run(runnable("migration.md", "LinkSecret", places), names)
        await names["channel"].aclose()
        tasks.cancel_scope.cancel()


async def test_the_stages_of_a_model_are_on_another_node(tmp_path: Path, secret_file: Path) -> None:
    """The host is served and answers; an engine of sixteen GPUs is only made, without a GPU."""
    port = free_port()
    here = {"10.0.0.7": "127.0.0.1", "7000": port}
    places = {**here, "/run/secrets/links": secret_file, "/mnt/nvme/models": tmp_path}
    names: dict[str, Any] = {"NvmeStore": NvmeStore, "Path": Path}
    made: dict[str, Any] = {"partial": partial, "secret": LinkSecret(SECRET), "TorchEngine": TorchEngine}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, runnable("parallel.md", "StageHost", places), names)
        await until_open(port)
        await run(runnable("parallel.md", "LinkedNode", here | {"cuda:0": "cpu"}), made)
        await (await made["node"].open_link()).aclose()
        tasks.cancel_scope.cancel()
    await run(runnable("parallel.md", "pp=2, stage_nodes=[node])  # eight", {"cuda:0": "cpu"}), made)
    assert made["engine"].id == "e0"


async def test_engines_of_processes_are_made(tmp_path: Path) -> None:
    names: dict[str, Any] = {"TorchEngine": TorchEngine}
    await run(runnable("remote.md", "ProcessEngine(", {"range(4)": "range(1)"}), names)
    assert names["engine"].id == "e0"
    await run(runnable("remote.md", "partition("), names)
    assert [engine.id for engine in names["engines"]] == ["chat", "code"]


async def test_engines_of_processes_share_the_memory_of_a_device() -> None:
    names: dict[str, Any] = {"TorchEngine": TorchEngine}
    await run(runnable("device-memory.md", "SharedDeviceBudget("), names)
    assert [engine.id for engine in names["engines"]] == ["chat", "code"]
    assert names["budget"].size_bytes == 40 << 30


async def test_nodes_share_their_stores(tmp_path: Path) -> None:
    port = free_port()
    far = tmp_path / "far"
    far.mkdir()
    places = {
        "10.0.0.1": "127.0.0.1",
        "7000": port,
        "/dev/shm/hotswap": tmp_path / "shared",
        "/var/cache/hotswap": tmp_path / "near",
        "s3://weights": f"file://{far}",
    }
    served: dict[str, Any] = {"__name__": "n0"}
    used: dict[str, Any] = {}
    await run(runnable("nodes.md", "PeerStore(", places), served)
    await run(runnable("nodes.md", "LinkedStore(", {"7000": port}), used)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(served["node"], "n0")
        await until_open(port)
        async with used["stores"]({"n0": "127.0.0.1"}) as stores:
            assert {tier.node for tier in stores.view().tiers} >= {"n0"}
        tasks.cancel_scope.cancel()
