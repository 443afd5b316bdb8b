"""Attributes that an engine's view shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

__all__ = ["Shown"]

_T = TypeVar("_T")


class Shown(Generic[_T]):
    """An attribute that has a method of its owner called after it is set; the others stay as fast as any.

    Args:
        turned: The method.
    """

    def __init__(self, turned: Callable[[Any], None]) -> None:
        self._turned = turned

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    @overload
    def __get__(self, of: None, owner: type[Any]) -> Shown[_T]: ...

    @overload
    def __get__(self, of: object, owner: type[Any]) -> _T: ...

    def __get__(self, of: object | None, owner: type[Any]) -> _T | Shown[_T]:
        if of is None:
            return self
        try:
            value: _T = of.__dict__[self._name]
        except KeyError:
            raise AttributeError(f"{owner.__name__} has no {self._name} yet") from None
        return value

    def __set__(self, of: object, value: _T) -> None:
        of.__dict__[self._name] = value
        self._turned(of)
