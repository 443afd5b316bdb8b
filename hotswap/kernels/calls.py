"""A Triton kernel launch as a value: executed, repeated, or inspected to compile the kernel ahead of time."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

__all__ = ["Call", "Relaunch"]


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

    def launch(self) -> Any:
        """Launch the kernel on the device of its first argument, on that device's current stream.

        Returns:
            Triton's compiled program, for `Relaunch`; `None` in the interpreter.
        """
        device: torch.device = self.arguments[0].device
        # Triton launches on the thread's current device, whatever device the tensors are on.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return self.function[self.grid](*self.arguments, **self.constants)


class Relaunch:
    """Launches the program of a call again, with the same grid and numbers, and with other tensors.

    Triton's own launch looks up the type, the alignment and the program of all arguments each time, which
    takes the host several times as long. Tensors must have the dtypes of those in the call, and addresses
    that are multiples of 16 if those had. The current device must be that of the call.

    Args:
        call: The call; its tensors come before its numbers.
        program: The result of its `launch`.
        num_tensors: The number of its tensors, which each launch gives anew.
    """

    __slots__ = ("_rest", "_run")

    def __init__(self, call: Call, program: Any, num_tensors: int) -> None:
        constants = call.function.arg_names[len(call.arguments) :]
        self._rest = (*call.arguments[num_tensors:], *(call.constants[name] for name in constants))
        self._run = program[(*call.grid, 1, 1)[:3]]

    def launch(self, *tensors: Tensor) -> None:
        """Launch the program on the current stream of its device."""
        self._run(*tensors, *self._rest)
