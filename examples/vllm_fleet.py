"""Serve three checkpoints on two engines of vLLM, which swap them in place while requests run.

    OMP_NUM_THREADS=1 python -m examples.vllm_fleet [CHECKPOINT ...]

Give checkpoint directories, or see it with three small models of random weights. It runs on a CPU and on a
GPU; for vLLM on a CPU see docs/vllm.md.
"""

import sys
import tempfile
from pathlib import Path

import anyio
import torch
import transformers

from hotswap import Fleet, Model, Sampling, SwapRecord
from hotswap.backends.stores import NvmeStore, SharedStore, TieredStore
from hotswap.backends.vllm import VllmEngine


def make_checkpoints(root: Path) -> list[Path]:
    """Make three models of one architecture, so that a running engine core can load each of them in place."""
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=2,
        max_position_embeddings=1024, eos_token_id=None, dtype="bfloat16",
    )  # fmt: skip
    for seed, name in enumerate(("ada", "bea", "cleo")):
        torch.manual_seed(seed)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
    return [root / name for name in ("ada", "bea", "cleo")]


Answers = dict[str, set[tuple[int, ...]]]


async def ask(fleet: Fleet, model: str, answers: Answers) -> None:
    sampling = Sampling(max_tokens=24, temperature=0.8, seed=1, ignore_eos=True)
    async with fleet.stream(model, (5, 6, 7), sampling) as tokens:
        answers.setdefault(model, set()).add(tuple([token.id async for token in tokens]))


def tell(record: SwapRecord) -> None:
    before = record.model_before or "nothing"
    print(f"{record.instance}: {before} -> {record.model} in {record.seconds:.2f} s")


async def main(checkpoints: list[Path], work: Path) -> Answers:
    """Send every model the same request eight times; return the different answers, one for each model."""
    models = [Model(path.name, path) for path in checkpoints]
    answers: Answers = {}
    async with (
        Fleet(
            engines=[VllmEngine(name, kv_bytes="64 MiB", max_requests=16) for name in ("e0", "e1")],
            store=TieredStore(SharedStore(work / "shared", "1 GiB"), NvmeStore(work / "store")),
            models=models,
            on_swap=tell,
        ) as fleet,
        anyio.create_task_group() as clients,
    ):
        for _ in range(8):
            for model in models:
                clients.start_soon(ask, fleet, model.id, answers)
    for name, seen in answers.items():
        print(f"{name}: {len(seen)} answer(s) to one question")
    return answers


if __name__ == "__main__":  # processes of vLLM import this file
    with tempfile.TemporaryDirectory() as made:
        given = [Path(name) for name in sys.argv[1:]]
        anyio.run(main, given or make_checkpoints(Path(made)), Path(made))
