"""torch.load of a state dict; mapped, it reads a byte of every page, since the tensors are lazy."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.race import Peer, Race, Source, touch

DISTRIBUTIONS = ("torch",)


class Contestant(Peer):
    """Options: `mmap`."""

    def files(self, source: Source) -> list[Path]:
        return [source.pickle]

    def load(self, source: Source, race: Race) -> None:
        race.start()
        mapped = bool(self.options["mmap"])
        tensors = torch.load(source.pickle, map_location="cpu", mmap=mapped, weights_only=True)
        race.finish(touch(tensors) if mapped else tensors)
