"""Measure what kernels, moves and swaps do on this machine's GPU, in one run.

    benchmarks/gpu/run.sh                              under ten minutes; results in benchmarks/results/
    benchmarks/gpu/run.sh --phases lora kv --out out   some of it, results elsewhere
    benchmarks/gpu/run.sh --dry --out out              all of it on a CPU, in small; figures mean nothing

Nothing is taken from a network. What lacks a library that only it needs is left out, and the report says so.
Times are of captured graphs, replayed, with weights in turns that no cache holds, medians with their spread;
moves and swaps are of the wall clock. Ends with status 1 if a result was wrong.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.gpu import bare
from benchmarks.gpu.session import Session
from benchmarks.measure import versions, write_json

_RESULTS = Path(__file__).parent.parent / "results"
PHASES = ("ceilings", "check", "attention", "lora", "kv", "swap", "tokens", "fp8")
# Not run by default: the figures of `fp8` for the tiles of the shipped table, without a sweep.
_MORE_PHASES = ("paths",)
_SHAPES = ("8B", "70B/8", "405B/8", "70B")


def main(arguments: Sequence[str]) -> int:
    """Run the phases, print as it goes, and write the report."""
    chosen = _parser().parse_args(arguments)
    if not chosen.dry and not torch.cuda.is_available():
        print("There is no GPU that PyTorch sees. --dry runs all of this on the CPU.", file=sys.stderr)
        return 2
    if chosen.dry and os.environ.get("TRITON_INTERPRET") != "1":
        print("A dry run wants TRITON_INTERPRET=1, as run.sh sets it.", file=sys.stderr)
        return 2
    bare.prepare()
    session = _session(chosen)
    torch.manual_seed(0)  # the same numbers in every run
    if chosen.dry:
        print("A dry run: every line runs, on the CPU, and no figure means anything.")
    chosen.out.mkdir(parents=True, exist_ok=True)
    name = "dry" if chosen.dry else re.sub(r"\W+", "-", torch.cuda.get_device_name()).strip("-").lower()
    try:
        for phase in (*PHASES, *_MORE_PHASES):
            if phase in chosen.phases:
                _run(phase, session, chosen)
                write_json(chosen.out / f"gpu-{name}.json", session.report)  # so far, if the rest is cut off
    finally:
        session.report["seconds"] = chosen.minutes * 60 - session.remaining_s
        write_json(chosen.out / f"gpu-{name}.json", session.report)
    for line in (*session.report.get("left_out", ()), *session.report.get("faults", ())):
        print(line)
    return 1 if session.report.get("faults") else 0


def _run(phase: str, session: Session, chosen: argparse.Namespace) -> None:
    """Run a phase, unless what it needs is missing or there is no time; a fault of it is no other's."""
    needs = {
        "attention": [*bare.lacking(), *_missing("transformers", "numpy")],
        "swap": [*bare.lacking(), *_missing("numpy")],
        "tokens": [*bare.lacking(), *_missing("transformers", "safetensors", "numpy")],
    }
    if missing := needs.get(phase, []) + _missing("triton"):
        session.report.setdefault("left_out", []).append(f"{phase}: there is no {', '.join(missing)}")
        return
    if session.remaining_s < 20:
        session.report.setdefault("left_out", []).append(f"{phase}: there was no time")
        return
    began_s = time.perf_counter()
    try:
        _phase(phase, chosen)(session)
    except Exception as exc:
        session.report.setdefault("faults", []).append(f"{phase} ended: {type(exc).__name__}: {exc}")
        if session.is_dry:
            raise
    session.report.setdefault("phases_s", {})[phase] = time.perf_counter() - began_s
    session.free()


def _phase(phase: str, chosen: argparse.Namespace) -> Callable[[Session], None]:
    """Modules are imported once their phase begins: what one needs another can do without."""
    if phase == "ceilings":
        from benchmarks.gpu import ceilings

        return ceilings.run
    if phase == "attention":
        from benchmarks.gpu import attention

        return attention.run
    if phase == "kv":
        from benchmarks.gpu import blocks

        return blocks.run
    if phase == "swap":
        from benchmarks.gpu import swap

        return swap.run
    if phase == "tokens":
        from benchmarks.gpu import tokens

        return tokens.run
    from benchmarks.gpu import fp8, lora

    if phase == "lora":
        return lambda session: lora.compare(session, chosen.out)
    if phase == "fp8":
        return lambda session: fp8.compare(session, chosen.models, chosen.out)
    if phase == "paths":
        return lambda session: fp8.compare_paths(session, chosen.models, chosen.out)

    def check(session: Session) -> None:
        fp8.check(session)
        lora.check(session)

    return check


def _session(chosen: argparse.Namespace) -> Session:
    ends_at = time.perf_counter() + 60 * chosen.minutes
    dtype = getattr(torch, chosen.dtype)
    about = {
        "dry": chosen.dry,
        "dtype": chosen.dtype,
        "versions": {"torch": torch.__version__, **versions("triton", "hotswap")},
    }
    if chosen.dry:
        return Session(
            torch.device("cpu"), True, ends_at, dtype, report={"device": "none: a dry run", **about}
        )
    device = torch.device("cuda", torch.cuda.current_device())
    found = torch.cuda.get_device_properties(device)
    report = {
        "device": str(found.name),
        "memory_bytes": int(found.total_memory),
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        **about,
    }
    return Session(
        device,
        False,
        ends_at,
        dtype,
        l2_bytes=int(found.L2_cache_size),
        num_units=int(found.multi_processor_count),
        report=report,
    )


def _driver() -> str | None:
    """The version of NVIDIA's driver; `None` without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def _missing(*names: str) -> list[str]:
    return [name for name in names if find_spec(name) is None]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("benchmarks/gpu/run.sh", description=__doc__.partition("\n")[0])
    parser.add_argument("--dry", action="store_true", help="on the CPU, in small")
    parser.add_argument("--minutes", type=float, default=9.0, help="nothing begins afterwards")
    parser.add_argument("--phases", nargs="+", choices=(*PHASES, *_MORE_PHASES), default=list(PHASES))
    parser.add_argument(
        "--models", nargs="+", choices=_SHAPES, default=list(_SHAPES), help="whose layers fp8 has"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--out", type=Path, default=_RESULTS)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
