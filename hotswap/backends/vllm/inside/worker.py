"""hotswap's part of each worker of a vLLM core: it loads weights, and ends the process with its parent.

vLLM imports this module in each worker before it loads a model (`worker_extension_cls`).
"""

from __future__ import annotations

import ctypes
import functools
import json
import mmap
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hotswap.backends.memory import can_pin, pin, unpin
from hotswap.backends.vllm.inside import grammar, resume, sampling
from hotswap.backends.vllm.inside.blocks import patch_cores
from hotswap.backends.vllm.inside.connector import HotswapConnector
from hotswap.backends.vllm.inside.filled import check_filled, mark_unfilled
from hotswap.backends.vllm.inside.pages import Pages
from hotswap.backends.vllm.names import named

__all__ = ["LOAD_FORMAT", "OWNER", "WorkerExtension", "die_with_parent", "register", "staged_tensors"]

LOAD_FORMAT = "hotswap"
OWNER = "HOTSWAP_VLLM_OWNER"
"""The environment variable with the id of the process that starts a core, set while it starts."""
_NUMBAS = "llvmlite.binding.ffi"
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


class WorkerExtension:
    """Methods that are added to every worker of a core, and called by name."""

    model_runner: Any
    rank: int

    def hotswap_reload(self, index: str) -> None:
        """Replace the weights by others of the same architecture."""
        with staged_tensors(Path(index)) as tensors:
            self.model_runner.reload_weights(weights_iterator=tensors)

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
        assert pages is not None, "only blocks with a shape are read"
        pages.save(blocks, Path(path), block_bytes, offsets[self.rank])

    def hotswap_restore(self, blocks: list[int], path: str, block_bytes: int, offsets: list[int]) -> None:
        """Fill this rank's part of KV blocks from a file."""
        pages = self._hotswap_pages()
        assert pages is not None, "only blocks with a shape are written"
        pages.restore(blocks, Path(path), block_bytes, offsets[self.rank])

    def _hotswap_pages(self) -> Pages | None:
        connector = named("vllm.distributed.kv_transfer:get_kv_transfer_group")()
        return connector.pages if isinstance(connector, HotswapConnector) else None


@contextmanager
def staged_tensors(index: Path) -> Generator[Iterator[tuple[str, torch.Tensor]]]:
    """Map a staged model, and yield its tensors by name as views; for a GPU they are pinned meanwhile."""
    parsed: dict[str, Any] = json.loads(index.read_text())
    pins = can_pin()
    with Path(parsed["file"]).open("r+b" if pins else "rb") as file:
        # Pinning a private mapping would copy its pages. Else it is private, since torch warns of memory that
        # is read-only.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if pins else mmap.ACCESS_COPY)
    whole = memoryview(mapped)
    is_pinned = pins and pin(whole)
    try:
        yield _tensors(mapped, parsed["tensors"])
    finally:
        if is_pinned:
            torch.cuda.synchronize()
            unpin(whole)


def _tensors(mapped: mmap.mmap, index: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, dtype, shape, stride, offset_bytes in index:
        kind: torch.dtype = getattr(torch, dtype)
        flat = torch.frombuffer(mapped, dtype=torch.uint8)
        reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
        size_bytes = reach * kind.itemsize if all(shape) else 0
        part = flat[offset_bytes : offset_bytes + size_bytes].view(kind)
        yield name, part.as_strided(shape, stride) if size_bytes else torch.empty(shape, dtype=kind)


def register() -> None:
    """Patch vLLM in this process (see `inside`); does nothing if called again."""
    loaders = named("vllm.model_executor.model_loader:_LOAD_FORMAT_TO_MODEL_LOADER")
    if LOAD_FORMAT not in loaders:
        named("vllm.model_executor.model_loader:register_model_loader")(LOAD_FORMAT)(_make_loader())
    _patch_rebinding()
    resume.apply()
    grammar.apply()
    sampling.apply()
    patch_cores()


def _patch_rebinding() -> None:
    """Have vLLM's search for kernels in all modules pass over one of numba's, which ends it by an error.

    A process that has computed with a `TorchEngine` on a CPU has numba, and so has a core that it forks.
    """
    dispatcher: Any = named("vllm.triton_utils.dispatcher")
    rebind = dispatcher._rebind_kernels
    if getattr(rebind, "__wrapped__", None) is not None:
        return

    @functools.wraps(rebind)
    def rebind_kernels(overrides: Any) -> None:
        hidden = sys.modules.pop(_NUMBAS, None)
        try:
            rebind(overrides)
        finally:
            if hidden is not None:
                sys.modules[_NUMBAS] = hidden

    dispatcher._rebind_kernels = rebind_kernels


def _make_loader() -> type:
    base: Any = named("vllm.model_executor.model_loader.base_loader:BaseModelLoader")
    check: Any = named(
        "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.track_weights_loading"
    )

    class HotswapLoader(base):  # type: ignore[misc]  # vLLM is untyped here
        """Loads staged weights; `model_loader_extra_config` has the path of their index.

        A parameter that none of them has filled is an error, as by vLLM's own loader.
        """

        def download_model(self, model_config: Any) -> None:
            """Do nothing: the weights are here."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            index = Path(self.load_config.model_loader_extra_config["index"])
            mark_unfilled(model)
            with staged_tensors(index) as tensors:
                loaded = model.load_weights(tensors)
            if loaded is not None:  # some models of vLLM do not tell
                check(self, model, set(loaded))
            check_filled(model, loaded)

    return HotswapLoader


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process once the thread of `parent` that started it has ended."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, int(signal.SIGKILL))
    if os.getppid() != parent:  # the parent has ended meanwhile
        os.kill(os.getpid(), signal.SIGKILL)


def _end_with_parent() -> None:
    """Have a spawned process of a core end with its parent; forked ones are told by `core`."""
    owner = os.environ.get(OWNER)
    if owner and owner != str(os.getpid()):
        die_with_parent(os.getppid())


register()
_end_with_parent()
