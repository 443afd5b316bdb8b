"""`check_arguments`: has arguments of a class refused by name unless they are of the annotated kinds."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hotswap.checks import check_kind, shown
from hotswap.errors import ConfigError

__all__ = ["check_arguments"]

T = TypeVar("T")

_WORDS = {
    float: "a number",
    int: "a whole number",
    bool: "True or False",
    str: "a string",
    NoneType: "None",
}


def check_arguments(made: type[T]) -> type[T]:
    """Check the arguments of a class by their annotations, before its own checks compare them.

    Numbers are no text, no truth value and not NaN; whole numbers are `int`; objects have the type that is
    named, or all that it asks for. Other kinds, such as tuples of something, are left to the class.

    Raises:
        ConfigError: when an object is made, with the name of the argument and what to give.
    """
    init: Callable[..., None] = vars(made)["__init__"]
    signature = inspect.signature(init)
    kinds = functools.cache(lambda: get_type_hints(init))

    @functools.wraps(init)
    def checked(self: T, *arguments: Any, **named: Any) -> None:
        for name, value in signature.bind(self, *arguments, **named).arguments.items():
            if (kind := kinds().get(name)) is not None:
                _check(name, value, kind)
        init(self, *arguments, **named)

    changed: Any = made
    changed.__init__ = checked
    return made


def _check(name: str, value: object, kind: Any) -> None:
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if any(_fits(value, each) for each in kinds):
        return
    known = [each for each in kinds if each is not NoneType]
    if len(known) == 1 and isinstance(known[0], type) and known[0] not in _WORDS:
        check_kind(ConfigError, name, value, known[0])
    words = [word for each in kinds for word in _words(each)]
    wanted = " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
    raise ConfigError(f"{name} is {shown(value)}; give {wanted}.")


def _fits(value: object, kind: Any) -> bool:
    if kind in (float, int):
        is_number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        return is_number and not math.isnan(_to_float(value))
    origin = get_origin(kind)
    if origin is Literal:
        return isinstance(value, str | int | NoneType) and value in get_args(kind)
    if origin is not None or not isinstance(kind, type):
        return not isinstance(origin, type) or origin is tuple or isinstance(value, origin)
    try:
        check_kind(ConfigError, "", value, kind)
    except ConfigError:
        return False
    return True


def _to_float(value: Any) -> float:
    """Return a number as a float; NaN for one that is larger than any."""
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _words(kind: Any) -> tuple[str, ...]:
    origin = get_origin(kind)
    if origin is Literal:
        return tuple(map(repr, get_args(kind)))
    if kind in _WORDS:
        return (_WORDS[kind],)
    name = getattr(origin or kind, "__name__", kind)
    return ("a function" if name == "Callable" else f"an object of type {name}",)
