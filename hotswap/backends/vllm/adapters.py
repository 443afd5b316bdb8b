"""The adapters of a vLLM core. Files are checked before vLLM reads them: some that are wrong end the core."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

from hotswap.backends.adapter_accounting import AdapterAccounting, Held
from hotswap.backends.notifier import StatusNotifier
from hotswap.backends.stores.checkpoint import check_no_pickles
from hotswap.backends.vllm.core import Core
from hotswap.backends.vllm.names import named
from hotswap.errors import (
    ShardCorrupt,
    ShardMissing,
    UnsupportedAdapter,
    UnsupportedModel,
)
from hotswap.model import Adapter
from hotswap.request import AdapterId, ModelId
from hotswap.view import InstanceId
from hotswap.worker_threads import run_in_thread

__all__ = ["Adapters"]

# vLLM tells adapters apart by number, and their cached prefixes by name and path. No number is used twice.
_numbers = count(1)


class Adapters:
    """The adapters that an engine holds; belongs to the event loop.

    Args:
        engine: Its name, for errors.
        most: How many it may hold.
        max_rank: The largest rank that the core takes.
        notifier: Told when an adapter comes or goes.
    """

    def __init__(self, engine: InstanceId, *, most: int, max_rank: int, notifier: StatusNotifier) -> None:
        self._max_rank = max_rank
        self._core: Core | None = None
        self._accounting = AdapterAccounting[Any](engine, most=most, notifier=notifier)
        self._lock = anyio.Lock()

    @property
    def names(self) -> tuple[AdapterId, ...]:
        """The adapters that are held."""
        return self._accounting.names

    @property
    def inside_names(self) -> dict[str, AdapterId]:
        """The adapters that are held, by vLLM's names of them."""
        return {lora.lora_name: name for name, lora in self._accounting.places.items()}

    def serve(self, model: ModelId, core: Core) -> None:
        """Hold adapters of `model` from now on."""
        self._accounting.serve(model)
        self._core = core

    async def forget(self) -> None:
        """Drop all adapters, before the model is unloaded. Cannot be interrupted."""
        core, self._core = self._core, None
        with anyio.CancelScope(shield=True):
            for lora in self._accounting.clear():
                await _remove(core, lora)

    async def load(self, adapter: Adapter) -> None:
        """Hold an adapter; see `SupportsAdapters.load_adapter`."""
        name = adapter.version
        async with self._lock:
            directory, core = self._accounting.directory_of(adapter), self._core
            if directory is None or core is None:
                return
            await run_in_thread(_check_files, name, directory, self._max_rank)
            number = next(_numbers)
            lora = named("vllm.lora.request:LoRARequest")(
                lora_name=f"{name} {number}", lora_int_id=number, lora_path=str(directory)
            )
            with anyio.CancelScope(shield=True):
                try:
                    await core.call(core.llm.add_lora(lora), f"take adapter {name!r}")
                except UnsupportedModel as exc:
                    raise UnsupportedAdapter(str(exc)) from exc
                if self._core is not core:
                    # The core was given back meanwhile: the adapter would take a place of its next model.
                    await _remove(core, lora)
                    raise self._accounting.unloaded(name)
                self._accounting.add(name, lora)

    async def drop(self, adapter: AdapterId) -> None:
        """Forget an adapter; see `SupportsAdapters.drop_adapter`."""
        await checkpoint()
        async with self._lock:
            lora = self._accounting.remove(adapter)
            if lora is not None:
                with anyio.CancelScope(shield=True):
                    await _remove(self._core, lora)

    def use(self, adapter: AdapterId | None) -> Held[Any] | None:
        """Count one more user of an adapter, as `AdapterAccounting.use`; its place is vLLM's `LoRARequest`.

        Raises:
            UnknownAdapter: it is not held.
        """
        return self._accounting.use(adapter)


async def _remove(core: Core | None, lora: Any) -> None:
    if core is not None and not core.is_dead:
        await core.call(core.llm.remove_lora(lora.lora_int_id), "drop an adapter")


def _check_files(name: AdapterId, directory: Path, max_rank: int) -> None:
    """Check the files of an adapter, which would end the core if they were wrong."""
    try:
        config: Any = json.loads((directory / "adapter_config.json").read_text())
        rank = int(config["r"])
    except FileNotFoundError as exc:
        raise ShardMissing(f"Adapter {name!r} has no {exc.filename!r}; give PEFT's directory.") from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise ShardCorrupt(
            f"The config of adapter {name!r} in {str(directory)!r} is not PEFT's: {exc}."
        ) from exc
    if not (directory / "adapter_model.safetensors").is_file():
        check_no_pickles(directory, ("adapter_model.bin",))
        raise ShardMissing(f"Adapter {name!r} has no adapter_model.safetensors in {str(directory)!r}.")
    if rank > max_rank:
        raise UnsupportedAdapter(
            f"Adapter {name!r} has rank {rank}, and the engine takes {max_rank}; raise max_adapter_rank."
        )
