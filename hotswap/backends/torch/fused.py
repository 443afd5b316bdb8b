"""Small operations of unmodified models, computed by kernels that take one pass for many operators.

Nothing goes by the name of a class: a module is tried out with random numbers, in every dtype, and what does
not compute what the kernel does is left as it is. So what is fused gives the bits of the model's own code, or
for an RMSNorm those of another order of the sum of squares.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from hotswap.kernels.fused import DTYPES, Scaling, rms_norm, rotate

__all__ = ["Fused", "fuse"]

# What transformers' models call it, each in a module of its own.
_ROTATES = "apply_rotary_pos_emb"
# Largest difference of a float32 result, as a share: sums of squares of another order.
_CLOSE = 1e-6
# Share of bfloat16 results that such a sum may round to a neighbour.
_ROUNDED_OTHERWISE = 0.02


@dataclass(frozen=True, slots=True)
class Fused:
    """What computes a module in place of its `forward`; hooks of the module run as ever."""

    module: nn.Module
    forward: Callable[..., Any]

    def attach(self) -> None:
        """Compute the module so."""
        vars(self.module)["forward"] = self.forward

    def detach(self) -> None:
        """Leave it to compute itself."""
        vars(self.module).pop("forward", None)


def fuse(module: nn.Module) -> tuple[Fused, ...]:
    """Have small operations within a module on the CPU fused where that is found to compute the same.

    Returns what was attached. Takes some milliseconds for each kind of operation, once in a process.
    """
    made: list[Fused] = []
    for part in module.modules():
        if "forward" in vars(part):
            continue
        forward = _norm_of(part) or _rotating(part)
        if forward is not None:
            made.append(Fused(part, forward))
            made[-1].attach()
    return tuple(made)


_Norm = tuple[float, Scaling]
_norms: dict[object, _Norm | None] = {}
_rotations: dict[FunctionType, FunctionType | None] = {}
_trying = threading.Lock()


def _norm_of(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """What computes a module that is an RMSNorm; `None` for any other."""
    parameters = cast("dict[str, Tensor | None]", module._parameters)  # pyright: ignore[reportPrivateUsage]
    weight = parameters.get("weight")
    if weight is None or len(parameters) != 1 or weight.dim() != 1 or any(True for _ in module.buffers()):
        return None
    if next(iter(module.children()), None) is not None:
        return None
    settings = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    key = (type(module), len(weight), repr(sorted(settings.items())))
    with _trying:
        if key not in _norms:
            _norms[key] = _try_norm(module, settings, len(weight))
        found = _norms[key]
    if found is None:
        return None
    epsilon, scaling = found
    original: Callable[[Tensor], Tensor] = MethodType(type(module).forward, module)

    def norm(hidden: Tensor) -> Tensor:
        weight = parameters["weight"]
        if weight is None or hidden.dtype is not weight.dtype or hidden.dtype not in DTYPES:
            return original(hidden)
        return rms_norm(hidden, weight, epsilon=epsilon, scaling=scaling)

    return norm


def _try_norm(module: nn.Module, settings: dict[str, Any], width: int) -> _Norm | None:
    """The epsilon and the scaling with which the kernel computes what a module does."""
    for epsilon in {value for value in settings.values() if isinstance(value, float) and 0 < value < 1}:
        for scaling in Scaling:
            if all(_norms_alike(module, width, dtype, epsilon, scaling) for dtype in DTYPES):
                return epsilon, scaling
    return None


def _norms_alike(module: nn.Module, width: int, dtype: torch.dtype, epsilon: float, scaling: Scaling) -> bool:
    random = torch.Generator().manual_seed(width)
    weight = torch.randn(width, generator=random).to(dtype)
    twin = object.__new__(type(module))
    vars(twin).update(vars(module))
    vars(twin)["_parameters"] = {"weight": nn.Parameter(weight, requires_grad=False)}
    # The last rows are small enough for epsilon to matter.
    sizes = torch.tensor([1.0, 30.0, epsilon**0.5, epsilon**0.5 / 10]).repeat_interleave(4)
    hidden = (torch.randn(1, 16, width, generator=random) * sizes[:, None]).to(dtype)
    try:
        with torch.inference_mode():
            theirs = type(module).forward(twin, hidden)
    except Exception:  # whatever a module that is no norm trips over
        return False
    if not isinstance(theirs, Tensor) or theirs.dtype is not dtype or theirs.shape != hidden.shape:
        return False
    mine = rms_norm(hidden, weight, epsilon=epsilon, scaling=scaling)
    if dtype is torch.float32:
        return bool(((mine - theirs).abs() <= _CLOSE * theirs.abs()).all())
    return float((mine != theirs).float().mean()) <= _ROUNDED_OTHERWISE


def _rotating(module: nn.Module) -> Callable[..., Any] | None:
    """The `forward` of a module that turns queries and keys, by the kernel; `None` for any other."""
    forward: object = type(module).forward
    if not isinstance(forward, FunctionType) or _ROTATES not in forward.__code__.co_names:
        return None
    with _trying:
        if forward not in _rotations:
            _rotations[forward] = _with_kernel(forward)
        found = _rotations[forward]
    return None if found is None else MethodType(found, module)


def _with_kernel(forward: FunctionType) -> FunctionType | None:
    """The same function, for which the name of the rotation stands for the kernel, if that does the same."""
    original: Any = forward.__globals__.get(_ROTATES)
    if not callable(original) or not all(_rotate_alike(original, dtype) for dtype in DTYPES):
        return None

    def turned(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any) -> Any:
        found = None if others or named else rotate(queries, keys, cos, sin)
        return original(queries, keys, cos, sin, *others, **named) if found is None else found

    made = FunctionType(
        forward.__code__,
        forward.__globals__ | {_ROTATES: turned},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _rotate_alike(original: Callable[..., Any], dtype: torch.dtype) -> bool:
    random = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    queries, keys = some(1, 5, 4, 16).transpose(1, 2), some(1, 5, 2, 16).transpose(1, 2)
    cosines, sines = some(1, 5, 16), some(1, 5, 16)
    mine = rotate(queries, keys, cosines, sines)
    try:
        with torch.inference_mode():
            theirs = original(queries, keys, cosines, sines)
            return mine is not None and all(
                torch.equal(one, other) for one, other in zip(mine, theirs, strict=True)
            )
    except Exception:  # whatever a function of another kind trips over
        return False
