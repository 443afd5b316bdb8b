"""safetensors: every tensor of `safe_open`, which maps them: a byte of every page is read, or all copied."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open

from benchmarks.timed_run import Peer, Source, TimedRun

DISTRIBUTIONS = ("safetensors", "torch")


class Contestant(Peer):
    """Options: `memory`."""

    def files(self, source: Source) -> list[Path]:
        return [source.safetensors]

    def load(self, source: Source, run: TimedRun) -> None:
        run.start()
        with safe_open(source.safetensors, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
            run.finish(tensors, mapped=True)
