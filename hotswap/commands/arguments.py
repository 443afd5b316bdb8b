"""What `hotswap serve` and the other larger commands are told, and nothing that takes time to load."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from hotswap.commands.outcome import say

__all__ = [
    "ShowVersion",
    "add_config_check",
    "add_fit",
    "add_least",
    "add_nothing",
    "add_plan",
    "add_serve",
    "add_simulate",
    "add_top",
]


class ShowVersion(argparse.Action):
    """Prints the version, which is read from the installed files, and ends."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print it."""
        say(f"hotswap {version('hotswap')}")
        parser.exit()


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `hotswap serve`."""
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="a file that describes a fleet, or models: directories, GGUF files, or org/name of the Hugging "
        "Face Hub (default: fleet.toml of the current directory)",
    )
    parser.add_argument("--host", help="the address to listen on (default: that of the file, or 127.0.0.1)")
    parser.add_argument("--port", type=int, help="the port (default: that of the file, or 8000)")
    parser.add_argument(
        "--engines", type=int, help="how many, of models alone (default: one for each GPU, or one)"
    )
    parser.add_argument("--store", type=Path, help="where converted models are kept, of models alone")
    parser.add_argument(
        "--host-memory",
        default="4 GiB",
        help="for weights, of models alone (default: %(default)s)",
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="what is logged to standard error, from this level on (default: %(default)s)",
    )


def add_top(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `hotswap top`."""
    parser.add_argument("url", help="where the server is, such as http://127.0.0.1:8000")
    parser.add_argument(
        "--key",
        help="the key of an operator, better as env:NAME or file:PATH (default: the variable HOTSWAP_KEY)",
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="between two looks at the server (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for scripts")


def add_config_check(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `hotswap config check`."""
    parser.add_argument("file", type=Path, help="a file that describes a fleet")


def add_nothing(_: argparse.ArgumentParser) -> None:
    """Give a parser no arguments."""


def add_simulate(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `hotswap simulate`."""
    _add_played(parser)
    parser.add_argument("--engines", type=int, default=4, help="how many (default: %(default)s)")
    parser.add_argument(
        "--nodes", type=int, default=0, help="nodes with a store each; 0 is one store (default: %(default)s)"
    )
    parser.add_argument(
        "--driver",
        choices=("events", "clients"),
        default="events",
        help="visit engines when their batch changes, or have a client for every request: the same outcome, "
        "later (default: %(default)s)",
    )
    parser.add_argument(
        "--lose", action="append", default=[], metavar="e0@30", help="lose an engine at a second"
    )
    parser.add_argument("--out", type=Path, help="a directory for everything, an outcome a file")
    parser.add_argument("--plots", action="store_true", help="and for pictures (needs matplotlib)")


def add_least(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `hotswap least`."""
    _add_played(parser)
    parser.add_argument(
        "--share", type=float, default=0.99, help="of requests that must be fine (default: %(default)s)"
    )
    parser.add_argument(
        "--warm",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="requests that arrive before are served and not counted (default: %(default)s)",
    )
    parser.add_argument(
        "--most", type=int, default=64, help="the most engines that are tried (default: %(default)s)"
    )
    parser.add_argument("--guess", type=int, default=4, help="is tried first (default: %(default)s)")


def _add_played(parser: argparse.ArgumentParser) -> None:
    """What is played, by which policies, and what is fine."""
    parser.add_argument(
        "trace",
        help="a CSV file with arrival_s, input_tokens and output_tokens, or a made one, like "
        "poisson:rate=5,seconds=600,models=8,zipf=1 or gamma:rate=5,cv=8",
    )
    parser.add_argument(
        "--scheduler",
        action="append",
        metavar="CALL",
        help="like 'WeightedLoadSwap(patience_s=2)', or mine.py:Mine(); several are put side by side; "
        "CostSwap() if left out",
    )
    parser.add_argument("--router", default="LeastTimeRouter()", metavar="CALL", help="default: %(default)s")
    parser.add_argument("--device", default="h100-llama-3.1-8b", help="a profile (default: %(default)s)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="one of `hotswap fit`, instead")
    parser.add_argument(
        "--host", metavar="SIZE", help="room of the host tier (of a node), like '200 GB'; all if left out"
    )
    parser.add_argument(
        "--token-budget", type=int, default=2048, help="tokens of a step (default: %(default)s)"
    )
    parser.add_argument(
        "--prefix-reuse",
        action="store_true",
        help="have engines compute what prompts begin with once, while they have room to keep it",
    )
    parser.add_argument("--rate", type=float, help="scale time so that so many requests arrive a second")
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--seed", type=int, default=0, help="of a made trace (default: %(default)s)")
    parser.add_argument(
        "--interval", type=float, default=1.0, help="seconds between plans (default: %(default)s)"
    )
    parser.add_argument(
        "--min-replicas", type=int, default=0, help="the least number of replicas of every model"
    )
    parser.add_argument("--ttft", type=float, default=10.0, help="seconds to the first token that are fine")
    parser.add_argument("--tpot", type=float, default=0.1, help="seconds for each other one that are fine")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for scripts")


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `hotswap plan`."""
    parser.add_argument("view", type=Path, help="a view as JSON, from hotswap.offline.dump_view")
    parser.add_argument("--scheduler", required=True, metavar="CALL", help="as of `hotswap simulate`")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for scripts")


def add_fit(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `hotswap fit`."""
    parser.add_argument("root", type=Path, help="the directory of the store")
    parser.add_argument("model", help="its id in the store")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the profile goes")
    parser.add_argument("--device", default="cpu", help="where it is served (default: %(default)s)")
    parser.add_argument("--name", default="", help="what the profile's device is called; by default --device")
    parser.add_argument(
        "--token-budget", type=int, default=256, help="tokens of a step (default: %(default)s)"
    )
    parser.add_argument(
        "--kv-tokens", type=int, default=16_384, help="of all KV blocks (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, help="of a CPU; all cores if left out")
    parser.add_argument("--host", default="4 GiB", help="room of the host tier (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer kinds of steps, each seen less often")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for scripts")
