"""Linear layers on a CPU: our kernel beside oneDNN's inner product, which PyTorch offers, in one run.

    python -m benchmarks linear --json linear.json     1024 x 1024 and the layers of an MLP of 3072, a minute
    python -m benchmarks linear --threads 2

A figure is the median time of one product, from packed weights and from weights as stored, and beside it
how many times as long oneDNN takes, by round. Contestants take turns, and go through copies of the weight
that no cache holds, as a model's layers do. Packing is timed too.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import parser_of, save
from benchmarks.measure import Summary, machine, ratios, timed_rounds, versions
from benchmarks.table import show
from hotswap.backends.torch.buffers import host_bytes
from hotswap.kernels import packed_linear

SHAPES = ((1024, 1024), (3072, 1024), (1024, 3072))
ROWS = (4, 8, 16, 32, 128, 512)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
COPIES_BYTES = 192 << 20
FEW = 64  # rows up to which all copies are gone through in a round; a few will do beyond


def main(arguments: Sequence[str]) -> int:
    """Measure, print and perhaps write the report."""
    parser = parser_of("linear", __doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    report: dict[str, Any] = {
        "machine": machine(Path(tempfile.gettempdir())),
        "versions": versions("torch", "numba"),
        "settings": {"threads": chosen.threads, "repeats": chosen.repeats},
    }
    for name, dtype in DTYPES.items():
        if packed_linear.supported(dtype):
            report[name] = {f"{o}x{i}": _measure((o, i), dtype, chosen.repeats) for o, i in SHAPES}
            _show(name, report[name])
    save(report, chosen.json)
    return 0


def _measure(shape: tuple[int, int], dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    outputs, inputs = shape
    count = max(4, COPIES_BYTES // (outputs * inputs * dtype.itemsize))
    weights = [torch.randn(outputs, inputs).to(dtype) for _ in range(count)]
    onednn: Any = torch.ops.mkldnn
    found: dict[str, Any] = {}
    ours, theirs = list[Tensor](), list[Tensor]()
    found["pack"] = _compared(
        timed_rounds(
            {
                "ours": lambda: ours.append(_packed(weights[len(ours) % count])),
                "onednn": lambda: theirs.append(
                    onednn._reorder_linear_weight(weights[len(theirs) % count], 32)
                ),
            },
            max(repeats, count),
        )
    )
    for num_rows in ROWS:
        x, some = torch.randn(num_rows, inputs).to(dtype), slice(count if num_rows <= FEW else 4)
        by_onednn = partial(_by_onednn, x)
        packed = {
            "ours": partial(_through, ours[some], partial(_by_ours, x, shape)),
            "onednn": partial(_through, theirs[some], by_onednn),
        }
        stored = {
            "ours": partial(_through, weights[some], partial(packed_linear.linear, x)),
            "onednn": partial(_through, weights[some], by_onednn),
        }
        products = len(weights[some])
        found[str(num_rows)] = {
            "packed": _compared(timed_rounds(packed, repeats, per=products)),
            "not packed": _compared(timed_rounds(stored, repeats, per=products)),
        }
    return found


def _packed(weight: Tensor) -> Tensor:
    """In huge pages, as an engine has it."""
    outputs, inputs = weight.shape
    return packed_linear.pack(weight, host_bytes(packed_linear.packed_bytes(outputs, inputs, weight.dtype)))


def _by_ours(x: Tensor, shape: tuple[int, int], packed: Tensor) -> Tensor:
    return packed_linear.linear_packed(x, packed, shape)


def _by_onednn(x: Tensor, weight: Tensor) -> object:
    operators: Any = torch.ops.mkldnn
    return operators._linear_pointwise(x, weight, None, "none", [], "")


def _through(weights: Sequence[Tensor], multiply: Callable[[Tensor], object]) -> None:
    for weight in weights:
        multiply(weight)


def _compared(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Median, least and most of our time and of oneDNN's over it."""
    ours = Summary.of([1e6 * s for s in seconds["ours"]])
    return {"us": ours.figures(), "onednn": Summary.of(ratios(seconds["onednn"], seconds["ours"])).figures()}


def _show(name: str, found: dict[str, Any]) -> None:
    rows: list[list[str]] = []
    for shape, figures in found.items():
        for kind, measured in figures.items():
            parts = {"": measured} if kind == "pack" else measured
            for how, part in parts.items():
                ours, times = Summary(*part["us"]), Summary(*part["onednn"])
                what = "packing" if kind == "pack" else f"{kind} rows, {how}"
                rows.append([f"{shape}, {what}", ours.format(), times.format(2)])
    show(f"{name}: a linear layer", ("", "ours, us", "oneDNN, times as long"), rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
