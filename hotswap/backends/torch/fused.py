"""Fused CPU kernels for RMSNorm and rotary embeddings in unmodified models.

Modules are recognized by their results, not by class names: a candidate is run on random input in every dtype
and fused only if the kernel computes the same values. A fused rotation has the bits of the model's own code;
a fused RMSNorm may differ by the order in which squares are summed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature, unwrap
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from hotswap.kernels.fused import DTYPES, Scaling, rms_norm, rotate

__all__ = ["Fused", "fuse"]

# The name of the function in every model's module of transformers.
_ROTARY_FUNCTION = "apply_rotary_pos_emb"
# The maximum relative difference of a float32 result, due to the order of the sum of squares.
_CLOSE = 1e-6
# The maximum share of bfloat16 results that differ by one rounding, for the same reason.
_ROUNDED_OTHERWISE = 0.02


@dataclass(frozen=True, slots=True)
class Fused:
    """A fused replacement of a module's `forward`; hooks of the module still run."""

    module: nn.Module
    forward: Callable[..., Any]

    def attach(self) -> None:
        """Replace the module's `forward`."""
        vars(self.module)["forward"] = self.forward

    def detach(self) -> None:
        """Restore the module's own `forward`."""
        vars(self.module).pop("forward", None)


def fuse(module: nn.Module) -> tuple[Fused, ...]:
    """Fuse the RMSNorms and rotary embeddings within a CPU module that a kernel computes equally.

    Returns the attached replacements. Takes some milliseconds per kind of operation, once per process.
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
_probe_lock = threading.Lock()


def _norm_of(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return the fused `forward` of a module that computes an RMSNorm; `None` for any other."""
    parameters = cast("dict[str, Tensor | None]", module._parameters)  # pyright: ignore[reportPrivateUsage]  # as in `modeling`
    weight = parameters.get("weight")
    if weight is None or len(parameters) != 1 or weight.dim() != 1 or any(True for _ in module.buffers()):
        return None
    if next(iter(module.children()), None) is not None or not _takes_one(module):
        return None
    settings = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    key = (type(module), len(weight), repr(sorted(settings.items())))
    with _probe_lock:
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


def _takes_one(module: nn.Module) -> bool:
    """Whether a module's `forward` has one parameter: a gated norm has a second, optional one."""
    return len(signature(type(module).forward).parameters) == 2


def _try_norm(module: nn.Module, settings: dict[str, Any], width: int) -> _Norm | None:
    """Return the epsilon and the scaling with which the kernel equals a module; `None` if none does."""
    for epsilon in {value for value in settings.values() if isinstance(value, float) and 0 < value < 1}:
        for scaling in Scaling:
            if all(_norms_alike(module, width, dtype, epsilon, scaling) for dtype in DTYPES):
                return epsilon, scaling
    return None


def _norms_alike(module: nn.Module, width: int, dtype: torch.dtype, epsilon: float, scaling: Scaling) -> bool:
    random = torch.Generator().manual_seed(width)
    weight = torch.randn(width, generator=random, dtype=torch.float32).to(dtype)
    twin = object.__new__(type(module))
    vars(twin).update(vars(module))
    vars(twin)["_parameters"] = {"weight": nn.Parameter(weight, requires_grad=False)}
    # The last rows are small enough for epsilon to matter.
    sizes = torch.tensor([1.0, 30.0, epsilon**0.5, epsilon**0.5 / 10], dtype=torch.float32).repeat_interleave(
        4
    )
    hidden = (torch.randn(1, 16, width, generator=random, dtype=torch.float32) * sizes[:, None]).to(dtype)
    try:
        with torch.inference_mode():
            theirs = type(module).forward(twin, hidden)
    except Exception:  # a module that is no norm may fail with any error
        return False
    if not isinstance(theirs, Tensor) or theirs.dtype is not dtype or theirs.shape != hidden.shape:
        return False
    mine = rms_norm(hidden, weight, epsilon=epsilon, scaling=scaling)
    if dtype is torch.float32:
        return bool(((mine - theirs).abs() <= _CLOSE * theirs.abs()).all())
    return float((mine != theirs).float().mean()) <= _ROUNDED_OTHERWISE


def _rotating(module: nn.Module) -> Callable[..., Any] | None:
    """Return the fused `forward` of a module that applies rotary embeddings; `None` for any other."""
    forward: object = unwrap(type(module).forward)
    if not isinstance(forward, FunctionType) or _ROTARY_FUNCTION not in forward.__code__.co_names:
        return None
    with _probe_lock:
        if forward not in _rotations:
            _rotations[forward] = _with_kernel(forward)
        found = _rotations[forward]
    return None if found is None else MethodType(found, module)


def _with_kernel(forward: FunctionType) -> FunctionType | None:
    """Return a copy of a `forward` that calls the kernel to rotate; `None` if the results would differ."""
    original: Any = forward.__globals__.get(_ROTARY_FUNCTION)
    if not callable(original) or not all(_rotate_alike(original, dtype) for dtype in DTYPES):
        return None

    def rotated(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any) -> Any:
        found = None if others or named else rotate(queries, keys, cos, sin)
        return original(queries, keys, cos, sin, *others, **named) if found is None else found

    made = FunctionType(
        forward.__code__,
        forward.__globals__ | {_ROTARY_FUNCTION: rotated},
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
    except Exception:  # a function of another kind may fail with any error
        return False
