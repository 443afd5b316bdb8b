"""FP8 weights on a CPU: a linear layer that dequantizes them beside the same with bfloat16 weights.

    python -m benchmarks kernels --json kernels.json     2048 x 2048, seconds
    python -m benchmarks kernels --full                  and 8192 x 4096

A figure is the median time of a product with bfloat16 weights as stored, and beside it how many times as long
the product with FP8 weights takes, by round. Contestants take turns; one thread, or as many as
`--threads` says. On a GPU nothing is measured here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import parser_of, save
from benchmarks.measure import Summary, machine, ratios, timed_rounds, versions
from benchmarks.table import show
from hotswap.backends.torch.linear import invariant_linear
from hotswap.kernels.fp8_gemm import Fp8Weight, Workspace, dequantize_rows, fp8_linear

ROWS = (1, 4, 16, 128, 512)
GROUPS = {"fp8-e4m3": 128, "fp8-e4m3-channel": None}
TARGET_ROWS, TARGET = 128, 1.6


def main(arguments: Sequence[str]) -> int:
    """Measure, print and perhaps write the report."""
    parser = parser_of("kernels", __doc__, full="measure 8192 x 4096 too")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    report: dict[str, Any] = {
        "machine": machine(Path(tempfile.gettempdir())),
        "versions": versions("torch"),
        "settings": {"threads": chosen.threads, "repeats": chosen.repeats, "dtype": "bfloat16"},
    }
    for shape in [(2048, 2048), *([(8192, 4096)] if chosen.full else [])]:
        name = f"{shape[0]}x{shape[1]}"
        report[name] = {scheme: _measure(shape, group, chosen.repeats) for scheme, group in GROUPS.items()}
        _show(name, report[name])
    save(report, chosen.json)
    return 0


def _measure(shape: tuple[int, int], group: int | None, repeats: int) -> dict[str, Any]:
    weight = _weight(shape, group)
    dequantized, space = dequantize_rows(weight, slice(None), torch.bfloat16), Workspace(torch.device("cpu"))
    found: dict[str, Any] = {}
    for num_rows in ROWS:
        x = torch.randn(num_rows, shape[1]).bfloat16()
        seconds = timed_rounds(
            {
                "bfloat16": lambda x=x: invariant_linear(x, dequantized),  # type: ignore[misc]
                "fp8": lambda x=x: fp8_linear(  # type: ignore[misc]
                    x, weight, workspace=space, multiply=invariant_linear
                ),
            },
            repeats,
        )
        found[str(num_rows)] = {
            "bfloat16_ms": Summary.of([1e3 * s for s in seconds["bfloat16"]]).figures(),
            "times_as_long": Summary.of(ratios(seconds["fp8"], seconds["bfloat16"])).figures(),
        }
    return found


def _weight(shape: tuple[int, int], group: int | None) -> Fp8Weight:
    quantized = torch.randint(0, 127, shape, dtype=torch.uint8) + 128 * torch.randint(0, 2, shape).to(
        torch.uint8
    )
    scales = torch.rand(shape[0], 1 if group is None else shape[1] // group) + 0.5
    return Fp8Weight(quantized.view(torch.float8_e4m3fn), scales, shape[1], group, torch.bfloat16)


def _show(name: str, found: dict[str, Any]) -> None:
    rows: list[list[str]] = []
    for scheme, by_rows in found.items():
        for num_rows, figures in by_rows.items():
            plain, times = Summary(*figures["bfloat16_ms"]), Summary(*figures["times_as_long"])
            is_target = int(num_rows) == TARGET_ROWS
            limit = f"{'met' if times.median <= TARGET else 'missed'}: {TARGET}" if is_target else ""
            rows.append([f"{scheme}, M = {num_rows}", plain.format(), times.format(2), limit])
    show(f"{name}: a linear layer", ("", "bfloat16, ms", "fp8, times as long", "target"), rows)


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
