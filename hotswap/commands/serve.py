"""`hotswap serve`: a fleet and its door, from a file or from models, until a signal ends it in order."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import anyio

from hotswap.config import FleetConfig, Serving, build, read_config
from hotswap.config.reloading import FileSetup, with_overrides
from hotswap.config.schema import DoorConfig, EngineConfig, ModelConfig, StoreConfig
from hotswap.door import listen
from hotswap.errors import ConfigError

__all__ = ["serve"]

# What is served if nothing is named.
HERE = "fleet.toml"
# On which the file is read again; Windows has none.
RELOADS = (signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()


def serve(arguments: argparse.Namespace) -> None:
    """Serve what arguments name, until SIGTERM or SIGINT.

    Raises:
        ConfigError: they name nothing that can be served.
    """
    sources: list[str] = arguments.sources or _file_here()
    files = [source for source in sources if source.endswith(".toml")]
    if files and len(sources) > 1:
        raise ConfigError(f"{files[0]} describes a whole fleet; give it alone.")
    door = {name: value for name in ("host", "port") if (value := getattr(arguments, name)) is not None}
    path = Path(files[0]) if files else None
    _log_from(arguments.log_level)
    if sys.stderr.isatty():
        _tell("Starting, which takes seconds; the address follows.")
    config = with_overrides(_of_models(arguments) if path is None else read_config(path), door)
    serving = build(config)
    if path is not None:
        serving.front.setup = FileSetup(path, door, config, serving)
    options = {"use_uvloop": find_spec("uvloop") is not None}
    anyio.run(_run, serving, backend_options=options)
    if serving.tracer_provider is not None:
        serving.tracer_provider.shutdown()  # sends what is left
    if serving.metrics is not None:
        serving.metrics.shutdown()


def _file_here() -> list[str]:
    """Return the file of the current directory.

    Raises:
        ConfigError: there is none.
    """
    if not Path(HERE).is_file():
        raise ConfigError(
            f"There is nothing to serve: no SOURCE was given, and this directory has no {HERE}. Give models, "
            "as in `hotswap serve /models/llama` or `hotswap serve Qwen/Qwen3-0.6B`, or a file of a fleet."
        )
    return [HERE]


def _of_models(arguments: argparse.Namespace) -> FleetConfig:
    """Return a fleet of torch engines that serves models by their names."""
    from hotswap.backends.hub import name_of

    num_gpus = _num_gpus()
    device = "cuda:{n}" if num_gpus else "cpu"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return FleetConfig(
        engines=[
            EngineConfig(kind="torch", count=arguments.engines or num_gpus or 1, options={"device": device})
        ],
        stores=[
            StoreConfig(kind="pinned", budget=arguments.host_memory),
            StoreConfig(kind="nvme", directory=str(arguments.store or cache / "hotswap")),
        ],
        models=[ModelConfig(id=name_of(source), source=source) for source in arguments.sources],
        door=DoorConfig(),
    )


def _num_gpus() -> int:
    if find_spec("torch") is None:
        raise ConfigError(
            "Models are served by PyTorch, which is not installed: pip install 'hotswap[torch]'."
        )
    from importlib import import_module

    return int(import_module("torch").cuda.device_count())


async def _run(serving: Serving) -> None:
    """Serve until a signal; then admit no more, let requests end, close, and stop; a second ends all."""
    door, fleet = serving.door, serving.fleet
    receiver = anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, *RELOADS)
    with receiver as signals, anyio.CancelScope() as scope:
        async with fleet:
            for name, model in serving.aliases:
                fleet.models.alias(name, model)
            gc.collect()
            gc.freeze()  # what is loaded by now is not looked at by every collection
            async with listen(serving.app, host=door.host, port=door.port) as port:
                _tell(_greeting(door, port, [model.id for model in fleet.models]))
                async with anyio.create_task_group() as tasks:
                    async for number in signals:
                        if number not in RELOADS:
                            break
                        tasks.start_soon(_reload, serving)
                    tasks.cancel_scope.cancel()
                grace_s = _grace_s(serving)
                _tell(f"Closing: requests under way have {grace_s:g} s.")
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_close, serving, grace_s, tasks.cancel_scope)
                    while await anext(signals) in RELOADS:
                        pass
                    tasks.cancel_scope.cancel()
            if fleet.is_open:  # the second signal: what is left is not saved either
                scope.cancel()


async def _reload(serving: Serving) -> None:
    """Read the file again, and say what was applied; its changes are logged before."""
    setup = serving.front.setup
    if not isinstance(setup, FileSetup):
        return _tell("There is no file to read again.")
    try:
        done = await setup.reload()
    except Exception as exc:  # what is wrong with a file ends no request
        _tell(f"Not applied: {exc}")
    else:
        _tell(f"Applied: {'; '.join(done) or 'nothing has changed'}.")


def _grace_s(serving: Serving) -> float:
    setup = serving.front.setup
    return setup.config.door.grace_s if isinstance(setup, FileSetup) else serving.door.grace_s


async def _close(serving: Serving, grace_s: float, all_tasks: anyio.CancelScope) -> None:
    left = await serving.fleet.close_gracefully(grace_s)
    _tell(f"Closed; {left} requests had not finished." if left else "Closed.")
    all_tasks.cancel()


def _greeting(door: DoorConfig, port: int, models: Sequence[str]) -> str:
    url = f"http://{f'[{door.host}]' if ':' in door.host else door.host}:{port}"
    return (
        f"hotswap serves {', '.join(models)} at {url}/v1, and shows the fleet at {url}/ui\n"
        f"  curl {url}/v1/completions -H 'content-type: application/json' \\\n"
        f"""    -d '{{"model": "{models[0]}", "prompt": "Once upon a time", "max_tokens": 40}}'"""
    )


def _log_from(level: str) -> None:
    """Log to standard error: what hotswap says from a level on, and warnings of libraries."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("hotswap").setLevel(level.upper())


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
