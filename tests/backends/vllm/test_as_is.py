"""Checkpoints as they are: vLLM gives the same tokens from a store as from the directory itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from benchmarks.coverage import FACTS
from hotswap import Fleet, Model, ModelId, Request, RequestId, Sampling
from hotswap.abc import ModelCard, WeightStore, WrapperEngine
from hotswap.backends.stores import NvmeStore
from hotswap.backends.stores.convert import convert
from hotswap.backends.vllm import VllmEngine
from hotswap.backends.vllm.staging import stage
from hotswap.errors import SwapFailed, UnsupportedModel
from hotswap.policies import LeastLoadedRouter
from tests.backends.quantized.kinds import KINDS, write, write_experts
from tests.backends.stores.checkpoints import gguf_bytes, write_checkpoint
from tests.backends.vllm.as_it_is import PROMPT, TOKENS
from tests.backends.vllm.support import make_engine
from tests.runtime.support import Idle


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of every kind, another of one of them, and two whose experts vLLM fuses."""
    root = tmp_path_factory.mktemp("kinds")
    found = {kind: write(root / str(number), kind) for number, kind in enumerate(KINDS)}
    another = write(root / "another", "compressed-tensors int4", seed=1)
    experts = {
        "experts": write_experts(root / "experts"),
        "FP8 experts": write_experts(root / "fp8 experts", "compressed-tensors FP8"),
    }
    return {**found, "another": another, **experts}


@pytest.fixture(scope="module")
def expected(directories: dict[str, Path]) -> dict[str, list[int] | None]:
    """What vLLM alone says of each; `None` where it cannot serve it on this CPU."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.vllm.as_it_is", *map(str, directories.values())],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {kind: answer.get("tokens") for kind, answer in zip(directories, answers, strict=True)}


@asynccontextmanager
async def opened(directories: dict[str, Path], root: Path) -> AsyncGenerator[WeightStore]:
    for number, directory in enumerate(directories.values()):
        convert(directory, root, model_id=f"m{number}", layout="checkpoint")
    async with NvmeStore(root) as store:
        yield store


async def card_of(store: WeightStore, number: int) -> ModelCard:
    name = f"m{number}"
    return ModelCard.of(Model(name), await store.manifest(ModelId(name)))


async def load(engine: VllmEngine, store: WeightStore, number: int) -> None:
    await engine.load(await card_of(store, number), store)


async def generate(engine: VllmEngine, number: int) -> list[int]:
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    request = Request(id=RequestId("r"), model=ModelId(f"m{number}"), prompt=PROMPT, sampling=sampling)
    async with engine.stream(request) as tokens:
        return [token.id for token in await tokens.collect()]


async def test_every_kind_gives_the_tokens_of_its_directory_or_is_refused(
    directories: dict[str, Path], expected: dict[str, list[int] | None], tmp_path: Path
) -> None:
    """In one engine, one after another: what vLLM itself cannot serve is refused without a load."""
    assert expected["unquantised"], "vLLM serves nothing here"
    assert expected["experts"], "vLLM serves no experts here"
    async with opened(directories, tmp_path / "root") as store, make_engine() as engine:
        for number, (kind, tokens) in enumerate(expected.items()):
            if tokens is None:
                with pytest.raises(UnsupportedModel, match="on this machine"):
                    await engine.try_model(await card_of(store, number), store)
            else:
                await engine.try_model(await card_of(store, number), store)
                await load(engine, store, number)
                assert await generate(engine, number) == tokens, kind
                await engine.unload()


def test_the_table_of_the_docs_says_the_same(expected: dict[str, list[int] | None]) -> None:
    told = json.loads(FACTS.read_text())["kinds"]
    assert {kind: told[kind]["VllmEngine"] for kind in KINDS} == {
        kind: "refused before a swap" if expected[kind] is None else "served" for kind in KINDS
    }


async def test_experts_alone_that_lack_a_kernel_are_refused_before_a_load(
    directories: dict[str, Path], expected: dict[str, list[int] | None], tmp_path: Path
) -> None:
    """vLLM has kernels for the same quantization of other layers here."""
    if expected["compressed-tensors FP8"] is None or expected["FP8 experts"] is not None:
        pytest.skip("vLLM treats both kinds of layers alike here")
    async with opened(directories, tmp_path / "root") as store, make_engine() as engine:
        with pytest.raises(UnsupportedModel, match="MoE backend"):
            await engine.try_model(await card_of(store, list(directories).index("FP8 experts")), store)
        await engine.try_model(await card_of(store, list(KINDS).index("compressed-tensors FP8")), store)


async def test_a_core_is_told_what_side_files_say_of_quantization(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    """ModelOpt's first versions say it there alone, and vLLM would take the weights for plain ones."""
    convert(directories["ModelOpt FP8"], tmp_path / "root", model_id="m", layout="checkpoint")
    (tmp_path / "core").mkdir()
    async with NvmeStore(tmp_path / "root") as store:
        manifest = await store.manifest(ModelId("m"))
        staged = await stage(store, ModelCard.of(Model("m"), manifest), manifest)
        staged.copy_settings(tmp_path / "core")
        await staged.release()
    for name in ("config.json", "hf_quant_config.json"):
        assert (tmp_path / "core" / name).read_text() == (directories["ModelOpt FP8"] / name).read_text()


async def test_quantized_weights_are_replaced_in_place_and_back(
    directories: dict[str, Path], expected: dict[str, list[int] | None], tmp_path: Path
) -> None:
    numbers = [list(directories).index(kind) for kind in ("compressed-tensors int4", "another")]
    assert expected["compressed-tensors int4"] != expected["another"]
    async with opened(directories, tmp_path / "root") as store, make_engine() as engine:
        for number in (*numbers, *numbers):
            await load(engine, store, number)
            assert await generate(engine, number) == list(expected.values())[number]
            await engine.unload()


async def test_a_kind_without_a_kernel_is_refused_while_the_old_model_serves(
    directories: dict[str, Path], expected: dict[str, list[int] | None], tmp_path: Path
) -> None:
    refused = next((number for number, tokens in enumerate(expected.values()) if tokens is None), None)
    if refused is None:
        pytest.skip("vLLM serves every kind here")
    old, new = "m0", f"m{refused}"
    sources = list(directories.values())
    async with Fleet(
        engines=[WrapperEngine(make_engine())],
        store=NvmeStore(tmp_path / "root"),
        models=[Model(name, sources[int(name[1:])], layout="checkpoint") for name in (old, new)],
        router=LeastLoadedRouter(),
        scheduler=Idle(),
    ) as fleet:
        await fleet.swap("e0", to=old)
        with pytest.raises(SwapFailed, match="on this machine") as caught:
            await fleet.swap("e0", to=new)
        assert caught.value.phase == "preflight"
        sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
        done = await fleet.generate(old, PROMPT, sampling)
        assert [token.id for token in done.tokens] == expected["unquantised"]
        with pytest.raises(UnsupportedModel, match="on this machine"):
            await fleet.generate(new, PROMPT, sampling)


@pytest.mark.parametrize("kind", ["gguf", "6 bits"])
async def test_what_vllm_cannot_read_is_refused_while_the_old_model_serves(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "m.gguf"
    if kind == "gguf":
        source.write_bytes(gguf_bytes())
    else:
        source = write_checkpoint(tmp_path / "source", {"w": ("F6_E2M3", (4, 4))})
    convert(source, tmp_path / "root", model_id="m", layout="checkpoint")
    store = NvmeStore(tmp_path / "root")
    async with Fleet(
        engines=[make_engine()],
        store=store,
        models=[Model("m")],
        router=LeastLoadedRouter(),
        scheduler=Idle(),
    ) as fleet:
        with pytest.raises(SwapFailed, match=r"float6|LlamaCppEngine"):
            await fleet.swap("e0", to="m")


@pytest.mark.parametrize(
    ("kind", "lacking"),
    [
        ("unquantised", "model.norm"),
        ("unquantised", "model.embed_tokens"),
        ("unquantised", "model.layers.1.mlp.down_proj"),
        ("unquantised", "model.layers.1.self_attn.q_proj"),
        ("compressed-tensors int4", "model.layers.1.mlp.down_proj"),
    ],
)
async def test_a_checkpoint_without_a_weight_is_refused(kind: str, lacking: str, tmp_path: Path) -> None:
    """vLLM would compute with what it has made in its place."""
    source = write(tmp_path / "source", kind)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.startswith(f"{lacking}.")]:
        del tensors[name]
    save_file(tensors, source / "model.safetensors")
    convert(source, tmp_path / "root", model_id="m", layout="checkpoint")
    async with NvmeStore(tmp_path / "root") as store, make_engine() as engine:
        with pytest.raises(UnsupportedModel, match="could not start with 'm'"):
            await engine.load(ModelCard.of(Model("m"), await store.manifest(ModelId("m"))), store)
