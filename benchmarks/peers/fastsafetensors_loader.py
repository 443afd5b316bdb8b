"""fastsafetensors without GPUDirect Storage: a safetensors file into one buffer on the CPU."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.timed_run import Peer, Source, TimedRun

DISTRIBUTIONS = ("fastsafetensors", "torch")

_library: Any = import_module("fastsafetensors")  # installed in an environment of its own


class Contestant(Peer):
    """Options: `memory`."""

    def files(self, source: Source) -> list[Path]:
        return [source.safetensors]

    def load(self, source: Source, run: TimedRun) -> None:
        run.start()
        loader = _library.SafeTensorsFileLoader(_library.SingleGroup(), device="cpu", nogds=True)
        loader.add_filenames({0: [str(source.safetensors)]})
        buffers = loader.copy_files_to_device()
        run.finish({name: buffers.get_tensor(name) for name in loader.get_keys()})
        buffers.close()
        loader.close()
