"""torch.load of a state dict; mapped, a byte of every page is read or all is copied, for tensors are lazy."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.timed_run import Peer, Source, TimedRun

DISTRIBUTIONS = ("torch",)


class Contestant(Peer):
    """Options: `mmap`, `memory`."""

    def files(self, source: Source) -> list[Path]:
        return [source.pickle]

    def load(self, source: Source, run: TimedRun) -> None:
        run.start()
        mapped = bool(self.options["mmap"])
        tensors = torch.load(source.pickle, map_location="cpu", mmap=mapped, weights_only=True)
        run.finish(tensors, mapped=mapped)
