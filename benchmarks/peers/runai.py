"""Run:ai Model Streamer: the tensors of a safetensors file, streamed into host memory with its defaults."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.timed_run import Peer, Source, TimedRun

DISTRIBUTIONS = ("runai-model-streamer", "torch")

_library: Any = import_module("runai_model_streamer")  # untyped, and installed in an environment of its own


class Contestant(Peer):
    """Options: `memory`."""

    def files(self, source: Source) -> list[Path]:
        return [source.safetensors]

    def load(self, source: Source, run: TimedRun) -> None:
        run.start()
        with _library.SafetensorsStreamer() as streamer:
            streamer.stream_file(str(source.safetensors))
            run.finish(streamer.get_tensors())  # one after the other, as they arrive
