"""How fast engines decode on this machine's CPU: this one, vLLM, and transformers.

    python -m benchmarks.engine                        32 tokens after 128, batches of 1, 8 and 32
    python -m benchmarks.engine --full                 128 tokens after 128, more rounds; about an hour
    python -m benchmarks.engine --hybrid               an LFM2 of 0.6 GB in place of the Llama
    python -m benchmarks.engine --json report.json

Every contestant serves the same random Llama (hidden 1024, 12 layers), or LFM2 (16 layers, six of them with
attention and ten with convolutions), and the same prompts in a process of its own; they take turns. Figures
are tokens per second of processor time. `README.md` in this folder explains the report.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.command import parser_of, save
from benchmarks.measure import Summary, machine, ratios, rounds
from benchmarks.models import hybrid_config
from benchmarks.process import Failed, Process
from benchmarks.table import show

__all__ = ["Settings", "main", "measure"]

_VLLM_PYTHON = Path(".cache/vllm-env/bin/python")
_WORK = Path(".cache/benchmarks/engine")
_NAMES = {"bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure, how often, and where.

    Attributes:
        contestants: Names of `contestants.CONTESTANTS`.
        batches: Requests at once.
        prompt: Tokens of each prompt.
        output: Tokens generated for each.
        repeats: Rounds.
        threads: Threads of every contestant.
        hybrid: Whether the model keeps states of convolutions beside keys and values.
        hidden: Width of the model; the rest of its shape follows.
        layers: Depth of the model.
        mixed: The run with long prompts, `None` leaves it out.
        vllm_python: The interpreter of the environment that has vLLM.
        directory: For the model, a few hundred megabytes.
        timeout_s: The longest that one run may take.
    """

    contestants: tuple[str, ...] = ("hotswap", "vllm_eager", "vllm_compiled", "hf_generate", "hf_continuous")
    dtypes: tuple[str, ...] = ("bf16", "fp32")
    batches: tuple[int, ...] = (1, 8, 32)
    prompt: int = 128
    output: int = 128
    repeats: int = 5
    threads: int = 1
    hybrid: bool = False
    hidden: int = 1024
    layers: int = 12
    mixed: Mapping[str, int] | None = None
    vllm_python: Path = _VLLM_PYTHON
    directory: Path = _WORK
    timeout_s: float = 1800.0


MIXED = {"streams": 8, "prompt": 32, "output": 400, "long_prompts": 6, "long_prompt": 512, "budget": 64}
QUICK = Settings(output=32, repeats=2, mixed={**MIXED, "long_prompts": 3})


class Contestant(Process):
    """The process of one contestant; see `benchmarks.contestants`."""

    def __init__(self, name: str, dtype: str, model: Path, settings: Settings) -> None:
        self.name = name
        python = settings.vllm_python if name.startswith("vllm") else Path(sys.executable)
        if not python.exists():
            raise Failed(f"there is no {python}; `make vllm-env` makes it")
        given = {
            "model": str((model / "checkpoint").resolve()),
            "store": str((model / "store").resolve()),
            "dtype": _NAMES[dtype],
            "threads": settings.threads,
        }
        super().__init__(
            [str(python.absolute()), "-m", "benchmarks.contestants", name, json.dumps(given)],
            environment={"OMP_NUM_THREADS": str(settings.threads)},
            timeout_s=settings.timeout_s,
        )


def measure(settings: Settings) -> dict[str, Any]:
    """Carry the benchmark out and return its report, whose keys `README.md` explains."""
    model = _model(settings)
    report: dict[str, Any] = {
        "machine": machine(settings.directory),
        "settings": {**asdict(settings), "directory": None, "vllm_python": None},
        "unavailable": {},
        "versions": {},
        "digests": {},
        "tokens_per_cpu_s": {},
        "tokens_per_wall_s": {},
    }
    for dtype in settings.dtypes:
        tokens, wall = _measure_dtype(settings, dtype, model, report)
        _choose_vllm(tokens)
        report["tokens_per_cpu_s"][dtype] = tokens
        report["tokens_per_wall_s"][dtype] = wall
    report["ratios"] = {dtype: _ratios(tokens) for dtype, tokens in report["tokens_per_cpu_s"].items()}
    if settings.mixed:
        report |= _measure_mixed(settings, settings.mixed, model)
    return report


Series = dict[str, dict[str, list[float]]]


def _measure_dtype(
    settings: Settings, dtype: str, model: Path, report: dict[str, Any]
) -> tuple[Series, Series]:
    tokens: Series = {}
    wall: Series = {}
    with ExitStack() as stack:
        running: list[Contestant] = []
        for name in settings.contestants:
            try:
                contestant = stack.enter_context(Contestant(name, dtype, model, settings))
                report["versions"][name] = contestant.versions()
                running.append(contestant)
            except Failed as exc:
                report["unavailable"][f"{name} {dtype}"] = str(exc)
        for batch in settings.batches:
            for contestant in rounds(running, settings.repeats):
                if f"{contestant.name} {dtype}" in report["unavailable"]:
                    continue
                asked = {"batch": batch, "prompt": settings.prompt, "output": settings.output}
                try:
                    answer = contestant.ask(asked)
                except Failed as exc:
                    report["unavailable"][f"{contestant.name} {dtype}"] = str(exc)
                    continue
                for series, clock in ((tokens, "cpu_s"), (wall, "wall_s")):
                    figures = series.setdefault(contestant.name, {}).setdefault(str(batch), [])
                    figures.append(answer["num_tokens"] / answer[clock])
                report["digests"].setdefault(f"{dtype} {batch}", {})[contestant.name] = answer["digest"]
                print(f"{dtype} batch {batch}: {contestant.name} {figures[-1]:.1f} tokens/s", file=sys.stderr)
    return tokens, wall


def _choose_vllm(tokens: Series) -> None:
    """vLLM is the better of its two modes, batch by batch."""
    modes = [tokens[name] for name in ("vllm_eager", "vllm_compiled") if name in tokens]
    if modes:
        tokens["vllm"] = {
            batch: max((m[batch] for m in modes if batch in m), key=statistics.median)
            for batch in {batch: None for mode in modes for batch in mode}
        }


def _ratios(tokens: Series) -> dict[str, dict[str, list[float]]]:
    """This engine's figure over that of each other, round by round."""
    ours = tokens.get("hotswap", {})
    return {
        name: {
            batch: ratios(ours[batch], figures)
            for batch, figures in series.items()
            if len(ours.get(batch, ())) == len(figures)
        }
        for name, series in tokens.items()
        if name != "hotswap"
    }


def _measure_mixed(settings: Settings, mixed: Mapping[str, int], model: Path) -> dict[str, Any]:
    policies = ("splitfuse", "prefill_first")
    wall: dict[str, list[float]] = {policy: [] for policy in policies}
    cpu: dict[str, list[float]] = {policy: [] for policy in policies}
    with Contestant("hotswap", settings.dtypes[-1], model, settings) as contestant:
        contestant.versions()
        for policy in rounds(policies, settings.repeats):
            answer = contestant.ask({"policy": policy, **mixed})
            wall[policy].append(answer["itl_p99_s"])
            cpu[policy].append(answer["itl_p99_cpu_s"])
            print(f"mixed load: {policy} P99 {cpu[policy][-1]:.4f} s of processor time", file=sys.stderr)
    return {"itl_p99_s": wall, "itl_p99_cpu_s": cpu}


def _model(settings: Settings) -> Path:
    """Make the checkpoint and the store, if they are not there yet."""
    kind = "lfm2" if settings.hybrid else "llama"
    place = settings.directory / f"{kind}-{settings.hidden}x{settings.layers}"
    if not (place / "store" / "m").exists():
        import torch
        import transformers

        from hotswap.backends.stores.convert import convert

        torch.manual_seed(0)
        module: Any = transformers.AutoModelForCausalLM.from_config(_config(settings))
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0, 0.05)
        module.to(torch.bfloat16).save_pretrained(place / "checkpoint")
        convert(place / "checkpoint", place / "store", model_id="m")
    return place


def _config(settings: Settings) -> Any:
    if settings.hybrid:
        return hybrid_config(settings.hidden, settings.layers, max_tokens=4096, vocabulary=512)
    import transformers

    return transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=settings.hidden,
        intermediate_size=3 * settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden // 64,
        num_key_value_heads=max(1, settings.hidden // 128),
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print tables, write the report; 1 if this engine failed."""
    options = _parse(arguments)
    settings = _settings(options)
    report = measure(settings)
    _print(settings, report)
    save(report, options.json)
    return 1 if any(name.startswith("hotswap") for name in report["unavailable"]) else 0


def _print(settings: Settings, report: Mapping[str, Any]) -> None:
    for dtype in settings.dtypes:
        tokens = report["tokens_per_cpu_s"][dtype]
        rows = []
        for name, series in tokens.items():
            ratio = report["ratios"][dtype].get(name, {})
            cells = [
                Summary.of(series[str(b)]).format(1) if str(b) in series else "-" for b in settings.batches
            ]
            times = [
                f"{statistics.median(ratio[str(b)]):.2f}" if ratio.get(str(b)) else ""
                for b in settings.batches
            ]
            rows.append([name, *cells, *times])
        head = ["", *(f"batch {b}" for b in settings.batches), *(f"ours/it, {b}" for b in settings.batches)]
        show(f"{dtype}: tokens per second of processor time, {settings.threads} thread(s)", head, rows)
    if "itl_p99_s" in report:
        rows = [
            [policy, Summary.of(wall).format(4), Summary.of(report["itl_p99_cpu_s"][policy]).format(4)]
            for policy, wall in report["itl_p99_s"].items()
        ]
        show("inter-token latency beside long prompts, P99", ["", "s", "s of processor time"], rows)
    for name, reason in report["unavailable"].items():
        print(f"not measured: {name}: {reason}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("engine", __doc__, full="128 tokens and five rounds")
    parser.add_argument("--batches", type=int, nargs="+", help="requests at once")
    parser.add_argument("--output", type=int, help="tokens to generate")
    parser.add_argument("--repeats", type=int, help="rounds")
    parser.add_argument("--threads", type=int, help="threads of every contestant")
    parser.add_argument("--dtypes", nargs="+", choices=sorted(_NAMES))
    parser.add_argument("--contestants", nargs="+", choices=Settings().contestants)
    parser.add_argument("--hybrid", action="store_true", help="a model with states of convolutions")
    parser.add_argument("--no-mixed", action="store_true", help="leave the load with long prompts out")
    parser.add_argument("--vllm-python", type=Path, help="the interpreter that has vLLM")
    parser.add_argument("--dir", type=Path, help="where the model is made")
    return parser.parse_args(arguments)


def _settings(options: argparse.Namespace) -> Settings:
    settings = Settings(mixed=MIXED) if options.full else QUICK
    named = {
        "batches": tuple(options.batches or ()),
        "output": options.output,
        "repeats": options.repeats,
        "threads": options.threads,
        "dtypes": tuple(options.dtypes or ()),
        "contestants": tuple(options.contestants or ()),
        "vllm_python": options.vllm_python,
        "directory": options.dir,
    }
    changes: dict[str, Any] = {name: value for name, value in named.items() if value}
    if options.hybrid:  # what serves no such model is left out, and no policy differs by it
        changes |= {"hybrid": True, "layers": 16, "mixed": None}
        changes.setdefault("contestants", tuple(n for n in settings.contestants if n != "hf_continuous"))
    if options.no_mixed:
        changes["mixed"] = None
    return replace(settings, **changes)


if __name__ == "__main__":
    sys.exit(main())
