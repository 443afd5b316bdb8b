"""`hotswap warm`: compiles the kernels for this CPU, so that the first load need not."""

from __future__ import annotations

import argparse
import json
from time import perf_counter

from hotswap.commands.outcome import say
from hotswap.commands.progress import progress_bar
from hotswap.errors import BackendMissing

__all__ = ["add_warm", "warm"]


def add_warm(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `hotswap warm`."""
    parser.add_argument(
        "--dtype",
        action="append",
        choices=("float32", "bfloat16", "float16"),
        help="compile for models of this dtype; may be repeated (default: float32 and bfloat16)",
    )
    parser.add_argument(
        "--processes", type=int, help="that compile at once (default: one per core, at most four)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for scripts")


def warm(arguments: argparse.Namespace) -> int:
    """Compile the kernels, with a progress bar, and print which are ready; return 0.

    Raises:
        BackendMissing: torch or numba is not installed.
    """
    ready: dict[str, float] = {}
    began_s = perf_counter()
    with progress_bar("Compiling kernels", unit="kernels") as show:  # from here on, since torch takes seconds
        try:
            from hotswap.kernels import warm as kernels
        except ModuleNotFoundError as exc:
            raise BackendMissing("The kernels need PyTorch; pip install 'hotswap[torch]'.") from exc
        chosen = kernels.kernels_for(arguments.dtype or kernels.DTYPES)
        show(0, len(chosen))
        for one in kernels.warm(chosen, processes=arguments.processes):
            ready[f"{one.kernel.package} {one.kernel.dtype}"] = round(one.seconds, 2)
            show(len(ready), len(chosen))
    dtypes = " and ".join(sorted({kernel.dtype for kernel in chosen}))
    text = f"{len(ready)} kernels for {dtypes} are ready, after {perf_counter() - began_s:.1f} s."
    told = json.dumps({"kernels": ready}, indent=2) if arguments.json else text
    say(told)
    return 0
