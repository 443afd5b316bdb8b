"""The command line: convert checkpoints into a store, list it, and verify it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, cast

from hotswap.errors import HotswapError, StoreError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 0, or 2 after a message on standard error if it failed."""
    arguments = _parser().parse_args(argv)
    command = cast("Callable[[argparse.Namespace], int]", arguments.command)
    try:
        return command(arguments)
    except HotswapError as exc:
        print(f"hotswap: {exc}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hotswap", description="Serve many language models on few engines.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_convert(commands.add_parser("convert", help="convert a Hugging Face directory into a store"))
    store = commands.add_parser("store", help="look after a store").add_subparsers(
        required=True, metavar="COMMAND"
    )
    verify = store.add_parser("verify", help="check every byte against its checksum")
    verify.add_argument("root", type=Path, help="the directory of the store")
    verify.add_argument("model", nargs="?", help="one model; all if left out")
    verify.set_defaults(command=_verify)
    listing = store.add_parser("list", help="list the models with their sizes")
    listing.add_argument("root", type=Path, help="the directory of the store")
    listing.set_defaults(command=_list)
    return parser


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="a directory with config.json and *.safetensors")
    parser.add_argument("root", type=Path, help="the directory of the store; made if missing")
    parser.add_argument("--id", help="the model's id in the store; the source's name if left out")
    parser.add_argument("--dtype", help="cast the weights, for instance to bfloat16")
    parser.add_argument(
        "--max-file-size", default="4 GiB", help="split data files at this size (default: %(default)s)"
    )
    parser.add_argument("--replace", action="store_true", help="replace the model if the store has it")
    parser.set_defaults(command=_convert)


def _convert(arguments: argparse.Namespace) -> int:
    from hotswap.backends.stores.convert import Progress, convert
    from hotswap.hardware import parse_bytes

    source: Path = arguments.source
    model: str = arguments.id or source.resolve().name
    with _bar(f"Converting {model}") as show:

        def tell(progress: Progress) -> None:
            show(progress.done_bytes, progress.total_bytes)

        manifest = convert(
            source,
            arguments.root,
            model_id=model,
            dtype=arguments.dtype,
            max_file_bytes=parse_bytes(arguments.max_file_size),
            replace_existing=arguments.replace,
            progress=tell,
        )
    print(
        f"{model}: {_size(manifest.weight_bytes)} in {len(manifest.shards)} files at {arguments.root / model}"
    )
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from hotswap.backends.stores.verify import models_in, verify
    from hotswap.request import ModelId

    models = [ModelId(arguments.model)] if arguments.model else models_in(arguments.root)
    failed = 0
    for model in models:
        try:
            with _bar(f"Verifying {model}") as show:
                manifest = verify(arguments.root, model, progress=show)
            print(f"{model}: {_size(manifest.weight_bytes)} whole")
        except StoreError as exc:
            failed = 2
            print(f"hotswap: {model}: {exc}", file=sys.stderr)
    return failed


def _list(arguments: argparse.Namespace) -> int:
    from hotswap.backends.stores.verify import load_index, models_in

    failed = 0
    for model in models_in(arguments.root):
        try:
            manifest = load_index(arguments.root, model)
        except StoreError as exc:
            failed = 2
            print(f"hotswap: {model}: {exc}", file=sys.stderr)
        else:
            print(f"{model}\t{_size(manifest.weight_bytes)}\t{manifest.architecture}")
    return failed


class _Show(Protocol):
    def __call__(self, done: int, total: int, /) -> None: ...


@contextmanager
def _bar(title: str) -> Generator[_Show]:
    """A progress bar in bytes on standard error; none where `rich` is missing or nobody watches."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
    except ImportError:
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total or None)

        yield show


def _size(size_bytes: int) -> str:
    """A size as people read it, in binary units."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
