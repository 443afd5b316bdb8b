"""Programs as a launch would have them built: what Triton makes of its arguments, without a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from tests.kernels.gate.build import Limits, Program

__all__ = ["program_of", "specialised"]

_OPTIONS = ("num_warps", "num_stages")


def specialised(kernel: Any, arguments: tuple[Any, ...], constants: Mapping[str, Any]) -> list[Any]:
    """Return what Triton keeps a compiled kernel by, of each argument: its type, and what is known of it."""
    backend: Any = make_backend(GPUTarget("cuda", 90, 32))
    bind: Any = create_function_from_signature(kernel.signature, kernel.params, backend)
    _, found, _ = bind(*arguments, **constants)
    return list(found)


def program_of(
    name: str,
    kernel: Any,
    arguments: tuple[Any, ...],
    constants: Mapping[str, Any],
    *,
    weights: float = 0.0,
    limits: Limits,
) -> Program:
    """Return the program that a launch with these arguments runs."""
    found = dict(zip(kernel.arg_names, specialised(kernel, arguments, constants), strict=True))
    types = {argument: kind for argument, (kind, _) in found.items() if kind != "constexpr"}
    fixed = {argument: known for argument, (kind, known) in found.items() if kind == "constexpr"}
    return Program(
        name=name,
        kernel=kernel,
        arguments=types,
        constants=fixed,
        aligned=frozenset(argument for argument in types if "D" in str(found[argument][1])),
        num_warps=constants["num_warps"],
        num_stages=constants.get("num_stages", 3),
        weights=weights,
        limits=limits,
    )
