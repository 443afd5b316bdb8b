"""What only a llama.cpp engine has: its server's process, GGUF files, tokens that are parts of characters."""

from __future__ import annotations

import json
import math
import os
import signal
import stat
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from hotswap import InstanceState, Model, ModelId
from hotswap.abc import Manifest, ModelCard
from hotswap.backends.llamacpp import LlamaCppEngine
from hotswap.backends.llamacpp.http import RefusedByServer, call
from hotswap.backends.llamacpp.server import Server
from hotswap.backends.llamacpp.settings import Settings
from hotswap.backends.stores import NvmeStore
from hotswap.errors import ConfigError, InstanceLost, InvalidRequest, ShardCorrupt, UnsupportedModel
from hotswap.testing.conformance.suite import until
from tests.backends.llamacpp.asking import answer, ask, ids
from tests.backends.llamacpp.gguf_files import CONTEXT, END, VOCABULARY, GgufStore, write_gguf

SETTINGS = Settings(
    kv_tokens=CONTEXT,
    max_requests=1,
    token_budget=None,
    invariant=True,
    prefix_reuse=True,
    threads=1,
    memory_bytes=None,
    arguments={},
)


def make_engine(name: str = "e0") -> LlamaCppEngine:
    return LlamaCppEngine(name, kv_tokens=2 * CONTEXT, max_requests=2, threads=1)


@pytest.fixture
def store(tmp_path: Path) -> GgufStore:
    kinds = {"a": "Q4_K", "b": "Q8_0", "c": "F16", "d": "F32"}
    return GgufStore(
        {
            name: write_gguf(tmp_path / f"{name}.gguf", seed=seed, kind=kind)
            for seed, (name, kind) in enumerate(kinds.items())
        }
    )


@pytest.mark.parametrize("model", ["a", "b", "c", "d"])
async def test_its_tokens_are_those_of_llama_cpps_own_server(store: GgufStore, model: str) -> None:
    request = ask([1, 70, 80, 90], model=model, max_tokens=60)
    async with make_engine() as engine:
        await engine.load(await store.card(model), store)
        tokens = await ids(engine, request)
    server = await Server.start(SETTINGS, [store.files[model]])
    try:
        asked = {"prompt": request.prompt, "n_predict": 60, "temperature": 0, "return_tokens": True}
        whole = await server.complete(json.dumps(asked).encode())
    finally:
        await server.stop()
    # That ends at the model's end token.
    assert tokens[: len(whole["tokens"])] == whole["tokens"]
    assert len(whole["tokens"]) == 60 or whole["tokens"][-1] == END


async def test_a_gguf_file_is_imported_as_it_is_and_served_from_the_disk(
    store: GgufStore, tmp_path: Path
) -> None:
    request = ask([1, 70, 80], max_tokens=12)
    async with NvmeStore(tmp_path / "store") as disk, make_engine() as engine:
        await engine.load(await store.card("a"), store)
        expected = await ids(engine, request)
        await engine.unload()
        model = Model("a", store.files["a"])
        await disk.import_model(model)
        card = ModelCard.of(model, await disk.manifest(ModelId("a")))
        assert (card.max_context_tokens, card.eos_token_ids, card.vocabulary) == (CONTEXT, (END,), VOCABULARY)
        await engine.load(card, disk)
        assert await ids(engine, request) == expected


async def test_each_token_of_a_character_comes_once(store: GgufStore) -> None:
    """A stream of llama.cpp's server leaves out tokens that end within a character."""
    async with make_engine() as engine:
        await engine.load(await store.card("b"), store)
        parts = dict.fromkeys(range(3, 63), 50.0)
        tokens = await answer(engine, ask([1, 70], model="b", logit_bias=parts, max_tokens=30))
        assert [token.index for token in tokens] == list(range(30))
        assert {token.id for token in tokens} <= set(parts)


async def test_several_engines_of_one_program_serve_at_once(store: GgufStore) -> None:
    async with make_engine("e0") as one, make_engine("e1") as other:
        await one.load(await store.card("a"), store)
        await other.load(await store.card("b"), store)
        alone = [await ids(one, ask([5, 6])), await ids(other, ask([5, 6], model="b"))]
        together: dict[int, list[int]] = {}

        async def read(at: int, engine: LlamaCppEngine, model: str) -> None:
            together[at] = await ids(engine, ask([5, 6], model=model))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, 0, one, "a")
            tasks.start_soon(read, 1, other, "b")
        assert [together[0], together[1]] == alone
        assert alone[0] != alone[1]


async def test_unload_ends_the_process_that_has_the_memory(store: GgufStore) -> None:
    async with make_engine() as engine:
        await engine.load(await store.card("a"), store)
        pid = engine.server_pid
        assert pid is not None
        assert psutil.Process(pid).memory_info().rss > 0
        await engine.unload()
        assert not psutil.pid_exists(pid)
        assert engine.server_pid is None
        assert store.num_lent == 0


async def test_a_server_that_dies_loses_the_engine_and_unload_brings_it_back(store: GgufStore) -> None:
    request = ask([5, 6, 7], max_tokens=500)
    async with make_engine() as engine:
        await engine.load(await store.card("a"), store)
        expected = await ids(engine, ask([5, 6, 7]))
        async with engine.stream(request) as tokens:
            await anext(tokens)
            assert engine.server_pid is not None
            os.kill(engine.server_pid, signal.SIGKILL)
            with pytest.raises(InstanceLost, match="SIGKILL"):
                await tokens.collect()
        await until(lambda: engine.status().state is InstanceState.LOST)
        await engine.unload()
        await engine.load(await store.card("a"), store)
        assert await ids(engine, ask([5, 6, 7])) == expected


PROGRAM = """
import anyio, sys
from pathlib import Path
from typing import Any
from hotswap.backends.llamacpp import LlamaCppEngine
from tests.backends.llamacpp.gguf_files import GgufStore

async def main():
    store = GgufStore({"a": Path(sys.argv[1])})
    async with LlamaCppEngine("e0", kv_tokens=512, max_requests=1) as engine:
        await engine.load(await store.card("a"), store)
        print(engine.server_pid, flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


async def test_a_server_ends_with_the_program_even_if_that_is_killed(store: GgufStore) -> None:
    command = [sys.executable, "-c", PROGRAM, str(store.files["a"])]
    async with await anyio.open_process(command, stderr=None) as program:
        assert program.stdout is not None
        pid = int(await program.stdout.receive())
        program.kill()
        with anyio.fail_after(60):
            await until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")


async def test_a_server_answers_those_alone_who_have_its_key(store: GgufStore) -> None:
    server = await Server.start(SETTINGS, [store.files["a"]])
    try:
        assert stat.S_IMODE(server.directory.stat().st_mode) == 0o700
        body = json.dumps({"prompt": [1], "n_predict": 1}).encode()
        with pytest.raises(RefusedByServer, match="Invalid API Key"):
            await call(server.directory / "server.sock", "guessed", "/completion", body)
        await server.complete(body)
        connections = psutil.Process(server.pid).net_connections(kind="inet")
        assert connections == [], "no port is open"
    finally:
        await server.stop()
    assert not server.directory.exists()


async def test_a_file_cut_short_is_corrupt(store: GgufStore) -> None:
    data = store.files["a"].read_bytes()
    store.files["a"].write_bytes(data[: len(data) // 2])
    async with make_engine() as engine:
        with pytest.raises(ShardCorrupt, match="corrupted or incomplete"):
            await engine.load(await store.card("a"), store)
        assert engine.status().state is InstanceState.EMPTY
        await engine.load(await store.card("b"), store)


@pytest.mark.parametrize(
    ("before", "after", "kind", "why"),
    [
        (b"blk.1.ffn_up", b"blk.9.ffn_up", ShardCorrupt, "'blk.1.ffn_up.weight' not found"),
        (b"blk.1.ffn_up", b"blk.1.ffn_no", ShardCorrupt, "'blk.1.ffn_up.weight' not found"),
        (b"llama.block_count", b"llama.block_other", UnsupportedModel, "error loading model"),
    ],
)
async def test_a_file_that_lacks_a_part_is_refused_by_what_it_lacks(
    store: GgufStore, before: bytes, after: bytes, kind: type[Exception], why: str
) -> None:
    data = store.files["a"].read_bytes()
    store.files["a"].write_bytes(data.replace(before, after, 1))
    async with make_engine() as engine:
        with pytest.raises(kind, match=why):
            await engine.load(await store.card("a"), store)
        assert engine.status().state is InstanceState.EMPTY


@pytest.mark.parametrize("number", [math.nan, math.inf])
async def test_weights_that_are_no_numbers_are_refused(
    store: GgufStore, tmp_path: Path, number: float
) -> None:
    """llama.cpp itself answers with one token again and again."""
    data = write_gguf(tmp_path / "plain.gguf", seed=1, kind="F32").read_bytes()
    store.files["a"].write_bytes(data[:-4] + struct.pack("<f", number))
    async with make_engine() as engine:
        with pytest.raises(ShardCorrupt, match=r"computes no numbers.*--replace"):
            await engine.load(await store.card("a"), store)
        await engine.load(await store.card("b"), store)


async def test_an_architecture_that_llama_cpp_does_not_know_is_unsupported(store: GgufStore) -> None:
    data = store.files["a"].read_bytes()
    name = len("llama").to_bytes(8, "little") + b"llama"
    store.files["a"].write_bytes(data.replace(name, name.replace(b"llama", b"lemma"), 1))
    async with make_engine() as engine:
        with pytest.raises(UnsupportedModel, match="lemma"):
            await engine.load(await store.card("a"), store)


async def test_a_model_in_another_layout_is_refused_before_a_process_starts(store: GgufStore) -> None:
    class Modules(GgufStore):
        async def manifest(self, model: ModelId) -> Manifest:
            return replace(await super().manifest(model), layout="modules")

    modules = Modules(store.files)
    async with make_engine() as engine:
        with pytest.raises(UnsupportedModel, match="import a GGUF file"):
            await engine.load(await modules.card("a"), modules)


async def test_a_prefix_that_a_slot_has_is_not_computed_again(store: GgufStore) -> None:
    prompt = [3 + at % 100 for at in range(300)]
    async with make_engine() as engine:
        await engine.load(await store.card("a"), store)
        async with engine.stream(ask(prompt)) as tokens:
            first = await tokens.collect()
            assert tokens.num_reused_tokens == 0
        async with engine.stream(ask(prompt)) as tokens:
            assert await tokens.collect() == first
            assert tokens.num_reused_tokens == len(prompt) - 1


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("prompt_logprobs", {"prompt_logprobs": 1}),
        ("logprobs_of", {"logprobs": 1, "logprobs_of": "sampled"}),
        ("grammar", {"regex": "a+"}),
        ("presence_penalty", {"presence_penalty": 1.0, "repetition_penalty": 1.1}),
        ("frequency_penalty", {"frequency_penalty": 1.0, "repetition_penalty": 1.1}),
    ],
)
async def test_what_it_has_not_is_refused_by_its_field(
    store: GgufStore, field: str, given: dict[str, Any]
) -> None:
    async with make_engine() as engine:
        await engine.load(await store.card("a"), store)
        with pytest.raises(InvalidRequest, match=field):
            await answer(engine, ask([5], **given))


@pytest.mark.parametrize("name", ["n_parallel", "sampling.seed", "api_keys"])
def test_what_the_engine_decides_is_no_argument(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        LlamaCppEngine("e0", arguments={name: 1})


async def test_llama_cpps_own_parameters_are_passed_on(store: GgufStore) -> None:
    given = {"cache_type_k": "GGML_TYPE_Q8_0", "warmup": False}
    async with LlamaCppEngine("e0", kv_tokens=CONTEXT, max_requests=1, arguments=given) as engine:
        await engine.load(await store.card("a"), store)
        tokens = await ids(engine, ask([5]))
        assert len(tokens) == 24
        assert max(tokens) < VOCABULARY
