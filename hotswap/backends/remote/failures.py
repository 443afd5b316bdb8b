"""Errors as they cross a link: their type, text, attributes and causes.

Only errors of `hotswap.errors` cross as they are. Of another class, the nearest of its bases that is there is
used; an error of another library becomes an `InstanceError` with its type and text, or as a cause a
`HotswapError`.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

from hotswap import errors
from hotswap.backends.fields import Fields
from hotswap.errors import HotswapError, InstanceError

__all__ = ["error_of", "failure"]

_MAX_CAUSES = 8
_MAX_CHARACTERS = 8 << 10
_MOST = 1e15  # JSON has no infinity

_KINDS: Final[dict[str, type[HotswapError]]] = {name: getattr(errors, name) for name in errors.__all__}
# What their constructors take beside the text: its name and its type.
_ATTRIBUTES: Final[dict[str, dict[str, str]]] = {
    name: {
        parameter.name: str(parameter.annotation)
        for parameter in inspect.signature(kind.__init__).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    for name, kind in _KINDS.items()
}


def failure(error: BaseException) -> dict[str, object]:
    """Return an error and its causes as fields of a message."""
    told = _told(error, otherwise=InstanceError)
    within, cause = told, error.__cause__
    for _ in range(_MAX_CAUSES):
        if cause is None:
            break
        below = _told(cause, otherwise=HotswapError)
        within["cause"] = below
        within, cause = below, cause.__cause__
    return told


def _told(error: BaseException, *, otherwise: type[HotswapError]) -> dict[str, object]:
    kind = next((kind for kind in type(error).__mro__ if _KINDS.get(kind.__name__) is kind), otherwise)
    text = _text_of(error)
    if not isinstance(error, HotswapError):
        text = f"{type(error).__name__}: {text}"
    attributes = _ATTRIBUTES[kind.__name__]
    about = {name: _plain(getattr(error, name), of) for name, of in attributes.items()}
    return {"kind": kind.__name__, "text": _cut(text), "about": about}


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # of another library: it must not cost the link
        return "its text cannot be made"


def _plain(value: Any, of: str) -> str | float:
    return str(value) if of == "str" else min(max(float(value), 0.0), _MOST)


def _cut(text: str) -> str:
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[:_MAX_CHARACTERS]} [{len(text) - _MAX_CHARACTERS:,} more characters]"


def error_of(fields: Fields) -> HotswapError:
    """Return the error of a message.

    Raises:
        ShardCorrupt: the fields are not those of an error; see `wire.protocol_errors`.
    """
    top = within = _one(fields)
    for _ in range(_MAX_CAUSES):
        if fields.get("cause") is None:
            break
        fields = fields.record("cause")
        cause = _one(fields)
        within.__cause__, within = cause, cause
    return top


def _one(fields: Fields) -> HotswapError:
    name = fields.text("kind")
    kind = _KINDS.get(name)
    if kind is None:
        return InstanceError(f"{name[:80]}: {_cut(fields.text('text'))}")
    about = fields.record("about")
    given: dict[str, Any] = {each: _attribute(about, each, of) for each, of in _ATTRIBUTES[name].items()}
    return kind(_cut(fields.text("text")), **given)


def _attribute(about: Fields, name: str, of: str) -> str | float:
    value = about.get(name)
    if of == "str":
        return about.text(name)
    if of == "float" and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise about.wrong(f"the field {name!r} is {str(value)[:40]!r}, which is no {of}")
