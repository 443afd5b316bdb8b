"""Lets the kernels be imported on a machine that has PyTorch and Triton and nothing else of hotswap's."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

__all__ = ["lacking", "prepare"]

_NEEDED = ("anyio", "opentelemetry", "pydantic")


def lacking() -> list[str]:
    """What `import hotswap` needs and this machine has not."""
    return [name for name in _NEEDED if find_spec(name) is None]


def prepare() -> None:
    """Have `hotswap.kernels` found without `hotswap` itself, where that cannot be imported."""
    if lacking() and "hotswap" not in sys.modules:
        package = ModuleType("hotswap")
        package.__path__ = [str(Path(__file__).parents[2] / "hotswap")]
        sys.modules["hotswap"] = package
