"""The programs that launches compile: Triton's specialization of their arguments, without a device."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from hotswap.kernels.calls import Call
from tests.kernels.gate.build import Limits, Program

__all__ = ["program_of", "specialised"]


def specialised(call: Call) -> list[Any]:
    """Return Triton's cache key of a launch: the type and the specialization of each argument."""
    backend: Any = make_backend(GPUTarget("cuda", 90, 32))
    bind: Any = create_function_from_signature(call.function.signature, call.function.params, backend)
    _, found, _ = bind(*call.arguments, **call.constants)
    return list(found)


def program_of(name: str, call: Call, *, weights: float = 0.0, limits: Limits) -> Program:
    """Return the program of a launch."""
    found = dict(zip(call.function.arg_names, specialised(call), strict=True))
    types = {argument: kind for argument, (kind, _) in found.items() if kind != "constexpr"}
    fixed = {argument: known for argument, (kind, known) in found.items() if kind == "constexpr"}
    return Program(
        name=name,
        kernel=call.function,
        arguments=types,
        constants=fixed,
        aligned=frozenset(argument for argument in types if "D" in str(found[argument][1])),
        num_warps=call.constants["num_warps"],
        num_stages=call.constants.get("num_stages", 3),
        weights=weights,
        limits=limits,
    )
