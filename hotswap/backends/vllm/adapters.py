"""The adapters that one vLLM core holds, checked before it sees them: it ends with some that are wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from anyio.lowlevel import checkpoint

from hotswap.backends.vllm.core import Core
from hotswap.backends.vllm.names import named
from hotswap.errors import (
    InstanceError,
    OutOfMemory,
    ShardCorrupt,
    ShardMissing,
    UnknownAdapter,
    UnsafeFile,
    UnsupportedAdapter,
    UnsupportedModel,
)
from hotswap.model import Adapter
from hotswap.request import AdapterId, ModelId
from hotswap.view import InstanceId

__all__ = ["Adapters", "Held"]

# vLLM tells adapters apart by number, and their cached prefixes by name and path: one number, one adapter.
_numbers = count(1)


@dataclass(slots=True, eq=False)
class Held:
    """An adapter inside vLLM, and how many requests use it."""

    lora: Any
    num_users: int = 0


class Adapters:
    """What one engine holds beside its model; lives on the event loop.

    Args:
        engine: Its name, for errors.
        most: How many it may hold.
        max_rank: The largest that vLLM has room for.
    """

    def __init__(self, engine: InstanceId, *, most: int, max_rank: int) -> None:
        self._engine, self._most, self._max_rank = engine, most, max_rank
        self._core: Core | None = None
        self._model: ModelId | None = None
        self._held: dict[AdapterId, Held] = {}
        self._line = anyio.Lock()

    @property
    def names(self) -> tuple[AdapterId, ...]:
        """Those that are held."""
        return tuple(self._held)

    def serve(self, model: ModelId, core: Core) -> None:
        """Hold adapters of `model` from now on."""
        self._model, self._core = model, core

    async def forget(self) -> None:
        """Drop everything: the model goes. Cannot be interrupted."""
        core, held = self._core, list(self._held.values())
        self._core, self._model, self._held = None, None, {}
        with anyio.CancelScope(shield=True):
            for each in held:
                if core is not None and not core.is_dead:
                    await core.call(core.llm.remove_lora(each.lora.lora_int_id), "drop an adapter")

    async def load(self, adapter: Adapter) -> None:
        """Hold an adapter; see `SupportsAdapters.load_adapter`."""
        name = adapter.version
        async with self._line:
            core = self._core_of(adapter)
            if name in self._held:
                return
            if not self._most:
                raise UnsupportedAdapter(f"Engine {self._engine!r} holds no adapters; give it max_adapters.")
            if len(self._held) >= self._most:
                raise OutOfMemory(
                    f"Engine {self._engine!r} holds {len(self._held)} adapters, all it may; drop one."
                )
            if adapter.source is None:
                raise ShardMissing(f"Adapter {name!r} has no source; say in which directory it lies.")
            await anyio.to_thread.run_sync(_look, name, Path(adapter.source), self._max_rank)
            number = next(_numbers)
            lora = named("vllm.lora.request:LoRARequest")(
                lora_name=f"{name} {number}", lora_int_id=number, lora_path=str(adapter.source)
            )
            with anyio.CancelScope(shield=True):
                try:
                    await core.call(core.llm.add_lora(lora), f"take adapter {name!r}")
                except UnsupportedModel as exc:
                    raise UnsupportedAdapter(str(exc)) from exc
                if self._core is not core:
                    # The core waits for its next model: what it was given now would take a place there.
                    if not core.is_dead:
                        await core.call(core.llm.remove_lora(number), "drop an adapter")
                    raise InstanceError(
                        f"Engine {self._engine!r} unloaded the model of adapter {name!r} while that was "
                        "read; ask again."
                    )
                self._held[name] = Held(lora)

    async def drop(self, adapter: AdapterId) -> None:
        """Forget an adapter; see `SupportsAdapters.drop_adapter`."""
        await checkpoint()
        async with self._line:
            held = self._held.get(adapter)
            if held is None or self._core is None:
                return
            if held.num_users:
                raise InstanceError(
                    f"{held.num_users} requests of engine {self._engine!r} use adapter {adapter!r}; "
                    "let them end."
                )
            del self._held[adapter]
            with anyio.CancelScope(shield=True):
                await self._core.call(self._core.llm.remove_lora(held.lora.lora_int_id), "drop an adapter")

    def use(self, adapter: AdapterId | None) -> Held | None:
        """Count a user more, who counts itself out later.

        Raises:
            UnknownAdapter: it is not held.
        """
        if adapter is None:
            return None
        held = self._held.get(adapter)
        if held is None:
            raise UnknownAdapter(f"Engine {self._engine!r} holds no adapter {adapter!r}; load it first.")
        held.num_users += 1
        return held

    def _core_of(self, adapter: Adapter) -> Core:
        if self._core is None or self._model != adapter.model:
            raise InstanceError(
                f"Engine {self._engine!r} serves {self._model!r}, and adapter {adapter.id!r} is of "
                f"{adapter.model!r}; ask an engine that serves that."
            )
        return self._core


def _look(name: AdapterId, directory: Path, max_rank: int) -> None:
    """Refuse files that vLLM would fail on."""
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
        if (directory / "adapter_model.bin").exists():
            raise UnsafeFile(f"Adapter {name!r} is pickled, which may run code; save it as safetensors.")
        raise ShardMissing(f"Adapter {name!r} has no adapter_model.safetensors in {str(directory)!r}.")
    if rank > max_rank:
        raise UnsupportedAdapter(
            f"Adapter {name!r} has rank {rank}, and the engine room for {max_rank}; give it max_adapter_rank."
        )
