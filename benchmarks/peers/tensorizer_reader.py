"""tensorizer: a file of its own format into host memory, by the threads that it chooses itself."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.timed_run import Peer, Source, TimedRun

DISTRIBUTIONS = ("tensorizer", "torch")

_library: Any = import_module("tensorizer")  # installed in an environment of its own


class Contestant(Peer):
    """Options: `memory`."""

    def files(self, source: Source) -> list[Path]:
        refusal = _refusal(source.tensorizer)
        if refusal.exists():
            raise RuntimeError(refusal.read_text())
        return [source.tensorizer]

    def load(self, source: Source, run: TimedRun) -> None:
        run.start()
        with _library.TensorDeserializer(str(source.tensorizer), device="cpu") as file:
            run.finish({name: tensor.data for name, tensor in file.items()})


def convert(safetensors: Path, target: Path) -> None:
    """Write the file that the contestant reads."""
    tensors = load_file(safetensors)
    try:
        serializer = _library.TensorSerializer(str(target))
        serializer.write_state_dict(tensors)
        serializer.close()
    except Exception as exc:
        target.unlink(missing_ok=True)
        _refusal(target).write_text(f"its writer refuses {len(tensors)} tensors: {exc}")


def _refusal(target: Path) -> Path:
    return target.with_suffix(".refused")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
