"""A launch of a kernel as a value: it may be made, or looked at by who builds kernels ahead."""

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
    """One launch.

    Attributes:
        kernel: Its module, which imports triton, and its name there: `package.module:name`.
        grid: Programs along each axis.
        arguments: Tensors and numbers, the first a tensor on the device.
        constants: What the kernel is compiled for.
    """

    kernel: str
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]

    @property
    def function(self) -> Any:
        """What `triton.jit` made."""
        module, _, name = self.kernel.partition(":")
        return getattr(import_module(module), name)

    def launch(self) -> None:
        """Launch it on the device of its first argument, in the order of that device's stream."""
        device: torch.device = self.arguments[0].device
        # Triton takes the thread's own device, whatever it is given.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.function[self.grid](*self.arguments, **self.constants)
