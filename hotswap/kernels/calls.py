"""A Triton kernel launch as a value: it can be executed, or inspected to compile the kernel ahead of time."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

__all__ = ["Call"]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One kernel launch: kernel, grid and arguments.

    Attributes:
        kernel: Import path of the kernel, `package.module:name`; the module imports triton.
        grid: Number of programs along each axis.
        arguments: Run-time arguments, tensors and numbers. The first is a tensor on the device.
        constants: `constexpr` arguments and compile options such as `num_warps`.
    """

    kernel: str
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]

    @property
    def function(self) -> Any:
        """The `triton.jit` function."""
        module, _, name = self.kernel.partition(":")
        return getattr(import_module(module), name)

    def launch(self) -> None:
        """Launch the kernel on the device of its first argument, on that device's current stream."""
        device: torch.device = self.arguments[0].device
        # Triton launches on the thread's current device, whatever device the tensors are on.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.function[self.grid](*self.arguments, **self.constants)
