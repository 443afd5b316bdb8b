"""Models built by transformers without a change of the default dtype that other threads see.

PyTorch has one default dtype for a process. transformers sets it to a model's while it builds the model, and
puts back what it found: a step of another model meanwhile computes in that dtype wherever it names none, and
of two threads that do so at once the last may leave the other's dtype for good. Here a thread that builds has
a default of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import modeling_utils

__all__ = ["own_default_dtype"]

# The threads that build, while the context manager of transformers is replaced.
_threads: Final[set[int]] = set()
_lock: Final = threading.Lock()


class _DefaultDtype(TorchFunctionMode):
    """A default dtype for tensors that this thread makes without naming one.

    Args:
        dtype: The default.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        makes = _makers().get(func)
        if makes is not None and named.get("dtype") is None and makes(args, named):
            named["dtype"] = self._dtype
        made = func(*args, **named)
        is_named = named.get("dtype") is not None or func in _casts()
        return (
            made.to(self._dtype) if not is_named and _is_of_integers(made, (*args, *named.values())) else made
        )


@contextmanager
def own_default_dtype() -> Generator[None]:
    """Have transformers change the default dtype for this thread alone, while it builds models in the block.

    Thread-safe; blocks do not nest.
    """
    thread = threading.get_ident()
    with _lock:
        if not _threads:
            _replace()
        _threads.add(thread)
    try:
        yield
    finally:
        with _lock:
            _threads.remove(thread)
            if not _threads:
                modeling_utils.local_torch_dtype = _original


_original: Final[Callable[..., AbstractContextManager[None]]] = modeling_utils.local_torch_dtype


def _replace() -> None:
    def local(dtype: torch.dtype, *names: str | None) -> AbstractContextManager[Any]:
        is_own = threading.get_ident() in _threads and dtype.is_floating_point
        return _DefaultDtype(dtype) if is_own else _original(dtype, *names)

    modeling_utils.local_torch_dtype = local


@cache
def _makers() -> Mapping[Any, Callable[[tuple[Any, ...], Mapping[str, Any]], bool]]:
    """Return the functions that make tensors of the default dtype, and when they do so."""
    always: tuple[Any, ...] = (
        torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.eye, torch.linspace,
        torch.logspace, torch.empty_strided, torch.empty_permuted, torch.hann_window, torch.hamming_window,
        torch.blackman_window, torch.bartlett_window, torch.kaiser_window,
    )  # fmt: skip
    of_numbers: tuple[Any, ...] = (
        torch.arange,
        torch.full,
        torch.tensor,
        torch.as_tensor,
        torch.scalar_tensor,
    )
    return dict.fromkeys(always, _always) | dict.fromkeys(of_numbers, _has_float)


@cache
def _casts() -> frozenset[Any]:
    """Return the functions that name a dtype by themselves."""
    return frozenset(
        (Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16)
    )


def _is_of_integers(made: object, values: Iterable[object]) -> bool:
    """Return whether a float was made of integers, as their quotient is: it has the default dtype."""
    if not isinstance(made, Tensor) or not made.is_floating_point():
        return False
    kinds = {value.is_floating_point() for value in values if isinstance(value, Tensor)}
    return kinds == {False}


def _always(args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    return True


def _has_float(args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Return whether a number among arguments, or in lists of them, is a float."""
    values = [*args, *named.values()]
    while values:
        value = values.pop()
        if isinstance(value, float):
            return True
        if isinstance(value, list | tuple):
            values += value
    return False
