"""The command line: serve, manage stores, check which models can be served, and simulate.

Results go to standard output, as a table or with `--json` as one object; progress and errors go to standard
error, progress on a terminal only. The exit status is 0 on success, 1 for a damaged model or one that cannot
be served, 2 after an error, 141 if the reader of the output leaves.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hotswap.commands.arguments import (
    ShowVersion,
    add_config_check,
    add_fit,
    add_least,
    add_nothing,
    add_plan,
    add_serve,
    add_simulate,
    add_top,
)
from hotswap.commands.outcome import finish, say
from hotswap.commands.progress import progress_bar
from hotswap.commands.table import table, to_size, to_time
from hotswap.commands.warm import add_warm, warm
from hotswap.errors import ConfigError, ShardMissing, StoreError, UnsupportedModel
from hotswap.hardware import parse_bytes
from hotswap.request import ModelId

if TYPE_CHECKING:
    from hotswap.backends.stores.disk_directory import DiskDirectory, StoredModel
    from hotswap.backends.stores.writer import Progress

__all__ = ["main"]

OK, DAMAGED, REFUSED = 0, 1, 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 0, 1 for damage or a refused model, or 2 after an error message."""

    def run() -> int:
        arguments = _parser().parse_args(argv)
        return cast("Callable[[argparse.Namespace], int]", arguments.command)(arguments)

    return finish(run)


# --------------------------------------------------------------------------------------------- arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hotswap", description="Serve many language models on few engines.")
    parser.add_argument("--version", action=ShowVersion)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    store = commands.add_parser("store", help="manage a store").add_subparsers(
        required=True, metavar="COMMAND"
    )
    _add_add(store.add_parser("add", help="import a checkpoint into a store"))
    listing = store.add_parser("ls", help="list the models, least recently used first")
    _add_common(listing, _ls)
    verify = store.add_parser("verify", help="check every byte against its checksum")
    _add_common(verify, _verify)
    verify.add_argument("model", nargs="?", help="one model; all if left out")
    remove = store.add_parser("rm", help="remove a model that is not in use")
    _add_common(remove, _rm)
    remove.add_argument("model", help="its id in the store")
    clear = store.add_parser("clear", help="remove unused models from shared host memory")
    _add_common(clear, _clear)
    _add_bench(store.add_parser("bench", help="compare loading with a plain direct read of the files"))
    models = commands.add_parser("models", help="ask about models").add_subparsers(
        required=True, metavar="COMMAND"
    )
    _add_check(models.add_parser("check", help="say whether a TorchEngine serves a model exactly"))
    config = commands.add_parser("config", help="ask about files that describe fleets").add_subparsers(
        required=True, metavar="COMMAND"
    )
    larger = (
        (commands, "serve", add_serve, _serve, "serve models over HTTP, by OpenAI's endpoints"),
        (commands, "top", add_top, _top, "watch the fleet of a server, in place"),
        (config, "check", add_config_check, _config_check, "say whether a file can be served"),
        (config, "schema", add_nothing, _config_schema, "print the JSON schema of such files, for editors"),
        (commands, "simulate", add_simulate, _simulate, "replay a trace on a simulated fleet"),
        (commands, "least", add_least, _least, "search for the fewest engines that meet a target"),
        (commands, "plan", add_plan, _plan, "repeat one decision of a scheduler, and explain it"),
        (commands, "fit", add_fit, _fit, "measure an engine, and write a profile for simulations of it"),
        (commands, "warm", add_warm, warm, "compile the kernels for this CPU, so that no load has to"),
    )
    for group, name, add_arguments, command, text in larger:
        made = group.add_parser(name, help=text)
        add_arguments(made)
        made.set_defaults(command=command)
    return parser


def _add_common(parser: argparse.ArgumentParser, command: Callable[[argparse.Namespace], int]) -> None:
    parser.add_argument("root", type=Path, help="the directory of the store")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for scripts")
    parser.set_defaults(command=command)


def _add_add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        help="a directory with config.json and *.safetensors, a GGUF file, or org/name[@revision] of the "
        "Hugging Face Hub",
    )
    _add_common(parser, _add)
    parser.add_argument("--id", help="the model's id in the store; the source's name if left out")
    parser.add_argument(
        "--layout",
        choices=("modules", "checkpoint"),
        help="modules, as a TorchEngine runs them, or the checkpoint as it is (default: checkpoint for GGUF)",
    )
    parser.add_argument("--dtype", help="cast the weights, for instance to bfloat16")
    parser.add_argument(
        "--quantize",
        metavar="SCHEME",
        help="store linear layers in half the bytes: fp8-e4m3 (a scale for 128 weights) or fp8-e4m3-channel",
    )
    parser.add_argument(
        "--world-size", type=int, default=1, metavar="N", help="cut for N tensor-parallel ranks"
    )
    parser.add_argument(
        "--max-file-size", default="4 GiB", help="split data files at this size (default: %(default)s)"
    )
    parser.add_argument("--replace", action="store_true", help="replace the model if the store has it")


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=Path,
        help="a Hugging Face directory, of which only config.json is read, or a model's in a store",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for scripts")
    parser.set_defaults(command=_models_check)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, _bench)
    parser.add_argument("model", help="its id in the store")
    parser.add_argument("--chunk-size", default="4 MiB", help="bytes of one read (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=4, help="concurrent reads (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=8, help="chunks read ahead (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=5, help="reads by each method (default: %(default)s)")


# --------------------------------------------------------------------------------------------- commands


def _serve(arguments: argparse.Namespace) -> int:
    from hotswap.commands.serve import serve

    serve(arguments)
    return OK


def _top(arguments: argparse.Namespace) -> int:
    from hotswap.commands.top import top

    top(arguments)
    return OK


def _config_check(arguments: argparse.Namespace) -> int:
    from hotswap.config import build, read_config

    say(f"{arguments.file}: {build(read_config(arguments.file)).fleet!r}")
    return OK


def _config_schema(_: argparse.Namespace) -> int:
    from hotswap.config import schema

    say(json.dumps(schema(), indent=2))
    return OK


def _simulate(arguments: argparse.Namespace) -> int:
    from hotswap.commands.simulate import simulate_all

    if arguments.plots and arguments.out is None:
        raise ConfigError("--plots needs --out, the directory that pictures go to.")
    with ExitStack() as bars:
        report, text = simulate_all(
            arguments, lambda name: bars.enter_context(progress_bar(f"Simulating {name}", unit="requests"))
        )
    _tell(arguments, report, text)
    return OK


def _least(arguments: argparse.Namespace) -> int:
    from hotswap.commands.least import COLUMNS, least_of_all

    with progress_bar("Searching for the fewest engines", unit="schedulers") as show:
        report, rows = least_of_all(arguments, show)
    _tell(arguments, report, table(COLUMNS, rows))
    return OK


def _plan(arguments: argparse.Namespace) -> int:
    from hotswap.commands.plan import explained, plan

    explanation = plan(arguments.view, arguments.scheduler)
    _tell(arguments, explained(explanation), str(explanation))
    return OK


def _fit(arguments: argparse.Namespace) -> int:
    from hotswap.commands.fit import fit, fitted

    with progress_bar("Measuring steps", unit="kinds") as show:
        result = fit(arguments, show)
    _tell(arguments, fitted(result), f"{arguments.out}: {result.profile.error}; {result.num_steps} kinds")
    return OK


def _add(arguments: argparse.Namespace) -> int:
    from hotswap.backends.hub import name_of
    from hotswap.backends.stores.convert import convert
    from hotswap.backends.stores.layout import model_directory

    source: str = arguments.source
    model: str = arguments.id or name_of(source)
    with progress_bar(f"Adding {model}") as show:

        def tell(progress: Progress) -> None:
            show(progress.done_bytes, progress.total_bytes)

        manifest = convert(
            source,
            arguments.root,
            model_id=model,
            layout=arguments.layout,
            dtype=arguments.dtype,
            quantize=arguments.quantize,
            world_size=arguments.world_size,
            max_file_bytes=parse_bytes(arguments.max_file_size),
            replace_existing=arguments.replace,
            progress=tell,
        )
    files = len({shard.file for shard in manifest.shards})
    added = {
        "model": model,
        "bytes": manifest.weight_bytes,
        "files": files,
        "layout": manifest.layout,
        "world_size": manifest.world_size,
        "quantization": manifest.quantization,
    }
    place = model_directory(arguments.root, manifest.model)
    text = f"{model}: {to_size(manifest.weight_bytes)} in {files} files at {place}"
    if arguments.quantize:
        text += f", as {manifest.quantization}" if manifest.quantization else ", with nothing to quantize"
    _tell(arguments, {"root": str(arguments.root), **added}, text)
    return OK


def _ls(arguments: argparse.Namespace) -> int:
    directory = _directory(arguments.root)
    entries = directory.models()
    models = [_describe(directory, entry) for entry in entries]
    used_bytes = sum(entry.size_bytes for entry in entries)
    rows = [
        (
            str(model["model"]),
            to_size(entry.size_bytes),
            str(model["world_size"] or "-"),
            f"{to_time(entry.used_ns):%Y-%m-%d %H:%M}",
            "damaged" if model["error"] else "in use" if model["in_use"] else "idle",
            " ".join(str(model[key]) for key in ("architecture", "quantization") if model[key]) or "-",
        )
        for entry, model in zip(entries, models, strict=True)
    ]
    listed = table(("MODEL", "SIZE", "RANKS", "LAST USED (UTC)", "STATE", "ARCHITECTURE"), rows)
    text = f"{listed}\n{len(rows)} models, {to_size(used_bytes)}" if rows else "No models."
    _tell(arguments, {"root": str(arguments.root), "used_bytes": used_bytes, "models": models}, text)
    return _report_damaged(models)


def _describe(directory: DiskDirectory, entry: StoredModel) -> dict[str, object]:
    from hotswap.backends.stores.index import load_index

    described: dict[str, object] = {
        "model": entry.model,
        "bytes": entry.size_bytes,
        "last_used": to_time(entry.used_ns).isoformat(timespec="seconds"),
        "in_use": directory.in_use(entry.model),
        "files": None,
        "world_size": None,
        "architecture": None,
        "quantization": None,
        "error": None,
    }
    try:
        manifest = load_index(directory.root, entry.model)
    except StoreError as exc:
        return {**described, "error": str(exc)}
    files = len({shard.file for shard in manifest.shards})
    return {
        **described,
        "files": files,
        "world_size": manifest.world_size,
        "architecture": manifest.architecture,
        "quantization": manifest.quantization,
    }


def _verify(arguments: argparse.Namespace) -> int:
    directory = _directory(arguments.root)
    entries = [entry for entry in directory.models() if arguments.model in (None, entry.model)]
    if arguments.model and not entries:
        raise ShardMissing(f"The store at {str(arguments.root)!r} holds no model {arguments.model!r}.")
    models = [_check(arguments.root, entry) for entry in entries]
    rows = [
        (str(model["model"]), to_size(entry.size_bytes), "damaged" if model["error"] else "whole")
        for entry, model in zip(entries, models, strict=True)
    ]
    text = table(("MODEL", "SIZE", "STATE"), rows) if rows else "No models."
    _tell(arguments, {"root": str(arguments.root), "models": models}, text)
    return _report_damaged(models)


def _check(root: Path, entry: StoredModel) -> dict[str, object]:
    from hotswap.commands.store import verify

    error: str | None = None
    try:
        with progress_bar(f"Verifying {entry.model}") as show:
            verify(root, entry.model, progress=show)
    except StoreError as exc:
        error = str(exc)
    return {"model": entry.model, "bytes": entry.size_bytes, "whole": error is None, "error": error}


def _rm(arguments: argparse.Namespace) -> int:
    freed = _directory(arguments.root).remove(ModelId(arguments.model))
    removed = {"root": str(arguments.root), "model": arguments.model, "freed_bytes": freed}
    _tell(arguments, removed, f"{arguments.model}: removed, {to_size(freed)} freed")
    return OK


def _clear(arguments: argparse.Namespace) -> int:
    import anyio

    from hotswap.backends.stores.shared import clear

    if not arguments.root.is_dir():
        raise ShardMissing(f"There is no shared memory at {str(arguments.root)!r}.")
    freed, kept = anyio.run(clear, arguments.root)
    cleared = {"root": str(arguments.root), "freed_bytes": freed, "kept_bytes": kept}
    _tell(arguments, cleared, f"{to_size(freed)} freed, {to_size(kept)} in use")
    return OK


def _models_check(arguments: argparse.Namespace) -> int:
    config = _config_of(arguments.source)
    served, why = "refused", ""
    with progress_bar(f"Checking {arguments.source}", unit="models"):  # transformers takes seconds to import
        from hotswap.backends.torch.compatibility import Verdict, check_config

        try:
            served = str(check_config(config))
        except UnsupportedModel as exc:
            why = str(exc)
    descriptions = {
        Verdict.EXACT: "served exactly",
        Verdict.UNKNOWN: "not known; its load decides, by comparing the model with its own attention",
    }
    text = f"{arguments.source}: {descriptions[Verdict(served)] if not why else f'refused. {why}'}"
    _tell(arguments, {"source": str(arguments.source), "served": served, "why": why}, text)
    return REFUSED if why else OK


def _config_of(source: Path) -> str:
    """The config of a checkpoint's directory, or of a model's directory in a store."""
    from hotswap.backends.stores.index import load_index
    from hotswap.backends.stores.layout import model_in

    place = source.resolve()  # so that "." has a name
    try:
        if (place / "config.json").is_file():
            return (place / "config.json").read_text(encoding="utf-8")
        if (place / "index.json").is_file():
            return load_index(place.parent, model_in(place.name) or ModelId(place.name)).config
    except OSError as exc:
        raise ConfigError(f"{str(source)!r} cannot be read: {exc.strerror or exc}.") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{str(source / 'config.json')!r} is not UTF-8; download it again.") from exc
    raise ShardMissing(f"There is no model at {str(source)!r}: it has no config.json; give its directory.")


def _bench(arguments: argparse.Namespace) -> int:
    import anyio

    from hotswap.commands.store import bench, bench_text

    with progress_bar(f"Timing {arguments.model}") as show:
        result = anyio.run(
            partial(
                bench,
                _directory(arguments.root).root,
                ModelId(arguments.model),
                chunk_bytes=parse_bytes(arguments.chunk_size),
                threads=arguments.threads,
                depth=arguments.depth,
                repeat=arguments.repeat,
                progress=show,
            )
        )
    _tell(arguments, asdict(result), bench_text(result))
    return OK


# ------------------------------------------------------------------------------------------------ output


def _directory(root: Path) -> DiskDirectory:
    from hotswap.backends.stores.disk_directory import DiskDirectory

    if not root.is_dir():
        raise ShardMissing(f"There is no store at {str(root)!r}. Add a model with `hotswap store add`.")
    return DiskDirectory(root, None)


def _tell(arguments: argparse.Namespace, value: Mapping[str, object], text: str) -> None:
    say(json.dumps(value, indent=2) if arguments.json else text)


def _report_damaged(models: Sequence[Mapping[str, object]]) -> int:
    """Print the errors of the damaged models, and return the exit status."""
    damaged = [model for model in models if model["error"]]
    for model in damaged:
        print(f"hotswap: {model['error']}", file=sys.stderr)
    return DAMAGED if damaged else OK


if __name__ == "__main__":
    sys.exit(main())
