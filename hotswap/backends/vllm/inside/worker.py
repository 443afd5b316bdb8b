"""What hotswap brings into the processes of a vLLM core: its weights, and an end when their parent ends.

vLLM imports this module in each worker before it loads a model (`worker_extension_cls`).
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hotswap.backends.vllm.inside import resume
from hotswap.backends.vllm.inside.blocks import teach_cores
from hotswap.backends.vllm.inside.connector import HotswapConnector
from hotswap.backends.vllm.inside.pages import Pages
from hotswap.backends.vllm.names import named

__all__ = ["FAMILY", "LOAD_FORMAT", "WorkerExtension", "die_with_parent", "register", "tensors_of"]

LOAD_FORMAT = "hotswap"
FAMILY = "HOTSWAP_VLLM_FAMILY"
"""The environment variable that tells processes of a core whose they are, while they are made."""
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


class WorkerExtension:
    """Methods that every worker of a core gains, to be called by name."""

    model_runner: Any
    rank: int

    def hotswap_reload(self, index: str) -> None:
        """Replace the weights by others of the same architecture."""
        self.model_runner.reload_weights(weights_iterator=tensors_of(Path(index)))

    def hotswap_process(self) -> int:
        """Return the worker's process id."""
        return os.getpid()

    def hotswap_block_shape(self) -> list[Any]:
        """Return the bytes of a KV block here, and each layer's dtype and shape; empty if none can move."""
        pages = self._hotswap_pages()
        return [] if pages is None else [pages.block_bytes, pages.shapes]

    def hotswap_save(self, blocks: list[int], path: str, block_bytes: int, offsets: list[int]) -> None:
        """Write this rank's part of KV blocks to a file."""
        pages = self._hotswap_pages()
        assert pages is not None, "who has no shape is asked for no blocks"
        pages.save(blocks, Path(path), block_bytes, offsets[self.rank])

    def hotswap_restore(self, blocks: list[int], path: str, block_bytes: int, offsets: list[int]) -> None:
        """Fill this rank's part of KV blocks from a file."""
        pages = self._hotswap_pages()
        assert pages is not None, "who has no shape is given no blocks"
        pages.restore(blocks, Path(path), block_bytes, offsets[self.rank])

    def _hotswap_pages(self) -> Pages | None:
        connector = named("vllm.distributed.kv_transfer:get_kv_transfer_group")()
        return connector.pages if isinstance(connector, HotswapConnector) else None


def tensors_of(index: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a staged model holds, by name, in place: mapped, and read where it is looked at."""
    parsed: dict[str, Any] = json.loads(index.read_text())
    with Path(parsed["file"]).open("rb") as file:
        # Private, so that torch need not be told that it cannot write there.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for name, dtype, shape, stride, offset_bytes in parsed["tensors"]:
        kind: torch.dtype = getattr(torch, dtype)
        flat = torch.frombuffer(mapped, dtype=torch.uint8)
        reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
        size_bytes = reach * kind.itemsize if all(shape) else 0
        part = flat[offset_bytes : offset_bytes + size_bytes].view(kind)
        yield name, part.as_strided(shape, stride) if size_bytes else torch.empty(shape, dtype=kind)


def register() -> None:
    """Teach vLLM in this process what it does not know (see `inside`); again changes nothing."""
    loaders = named("vllm.model_executor.model_loader:_LOAD_FORMAT_TO_MODEL_LOADER")
    if LOAD_FORMAT not in loaders:
        named("vllm.model_executor.model_loader:register_model_loader")(LOAD_FORMAT)(_make_loader())
    resume.apply()
    teach_cores()


def _make_loader() -> type:
    base: Any = named("vllm.model_executor.model_loader.base_loader:BaseModelLoader")

    class HotswapLoader(base):  # type: ignore[misc]  # vLLM is untyped here
        """Loads what `staging` wrote; where it lies is told by `model_loader_extra_config`."""

        def download_model(self, model_config: Any) -> None:
            """Do nothing: it is here."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            model.load_weights(tensors_of(Path(self.load_config.model_loader_extra_config["index"])))

    return HotswapLoader


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process once the thread of `parent` that made it has ended."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, int(signal.SIGKILL))
    if os.getppid() != parent:  # it ended meanwhile
        os.kill(os.getpid(), signal.SIGKILL)


def _join_the_family() -> None:
    """In a process of a core that was not forked from ours, where `FAMILY` names ours."""
    founder = os.environ.get(FAMILY)
    if founder and founder != str(os.getpid()):
        die_with_parent(os.getppid())


register()
_join_the_family()
