"""A program that asks vLLM alone for the greedy tokens of models in directories, one after another."""

from __future__ import annotations

import gc
import json
import os
import sys
from importlib import import_module
from typing import Any

__all__ = ["PROMPT", "TOKENS"]

PROMPT = (5, 6, 7, 8, 9)
TOKENS = 12


def main(directories: list[str]) -> None:
    """Print a line of JSON for each: its tokens, or why there are none."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # another process for each takes most of the time
    for directory in directories:
        try:
            answer: dict[str, object] = {"tokens": _tokens(directory)}
        except Exception as exc:
            answer = {"error": f"{type(exc).__name__}: {exc}"[:500]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        gc.collect()


def _tokens(directory: str) -> list[int]:
    vllm: Any = import_module("vllm")  # which has no types
    llm = vllm.LLM(
        model=directory,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        kv_cache_memory_bytes=8 << 20,
        block_size=32,
    )
    given = vllm.SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    out = llm.generate({"prompt_token_ids": list(PROMPT)}, given, use_tqdm=False)
    return list(out[0].outputs[0].token_ids)


if __name__ == "__main__":
    main(sys.argv[1:])
