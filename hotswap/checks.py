"""Checks of values that callers give.

Each error names its argument, shows a bounded part of the value, and says what fits.
"""

from __future__ import annotations

import math
import operator
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import SupportsFloat, SupportsIndex, TypeGuard, TypeVar, cast

from hotswap.errors import HotswapError, InvalidRequest

__all__ = [
    "check_callables",
    "check_choice",
    "check_counts",
    "check_kind",
    "check_no_messages",
    "check_paths",
    "check_positive",
    "check_positive_seconds",
    "check_priority",
    "check_required_seconds",
    "check_seconds",
    "check_strings",
    "check_unicode",
    "is_list",
    "is_set",
    "shown",
    "to_entries",
    "to_flag",
    "to_float",
    "to_int",
    "to_objects",
    "to_path",
    "to_token_ids",
]

T = TypeVar("T")

# More than any vocabulary has; ids of prompts are also compared with the model's own.
MAX_TOKEN_ID = 2**31 - 1
# More than any context has.
MAX_PROMPT_TOKENS = 1 << 26

_CONTEXT = frozenset({"__aenter__", "__aexit__"})


def check_seconds(error: type[HotswapError], **seconds: object) -> None:
    """Raise an error that names the argument unless each is `None`, or a number of seconds from 0 on."""
    for name, value in seconds.items():
        if value is not None and not (_is_number(value) and value >= 0):
            raise error(f"{name} is {shown(value)}; give seconds from 0 on, or None for no limit.")


def check_required_seconds(error: type[HotswapError], **seconds: object) -> None:
    """Raise an error that names the argument unless each is a number of seconds from 0 on."""
    for name, value in seconds.items():
        if not (_is_number(value) and value >= 0):
            raise error(f"{name} is {shown(value)}; give seconds from 0 on (inf is no limit).")


def check_positive_seconds(error: type[HotswapError], **seconds: object) -> None:
    """Raise an error that names the argument unless each is a number of seconds over 0."""
    for name, value in seconds.items():
        if not (_is_number(value) and value > 0):
            raise error(f"{name} is {shown(value)}; give seconds over 0 (inf is no limit).")


def check_positive(error: type[HotswapError], **numbers: object) -> None:
    """Raise an error that names the argument unless each is a finite number over 0."""
    for name, value in numbers.items():
        if not (_is_number(value) and 0 < value < math.inf):
            raise error(f"{name} is {shown(value)}; give a finite number over 0.")


def check_counts(error: type[HotswapError], least: int, **counts: object) -> None:
    """Raise an error that names the argument unless each is a whole number from `least` on."""
    for name, value in counts.items():
        if not (isinstance(value, int) and _is_number(value) and value >= least):
            raise error(f"{name} is {shown(value)}; give a whole number from {least} on.")


def check_priority(error: type[HotswapError], priority: object) -> None:
    """Raise an error unless a priority is a whole number between -1,000 and 1,000."""
    if not (isinstance(priority, int) and _is_number(priority) and -1000 <= priority <= 1000):
        raise error(f"priority is {shown(priority)}; give a whole number between -1000 and 1000.")


def check_strings(error: type[HotswapError], **strings: object) -> None:
    """Raise an error that names the argument unless each is a string."""
    for name, value in strings.items():
        if not isinstance(value, str):
            raise error(f"{name} is {shown(value)}; give a string.")


def check_callables(error: type[HotswapError], **functions: object) -> None:
    """Raise an error that names the argument unless each is `None`, or can be called."""
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise error(f"{name} is {shown(value)}; give a function, or None.")


def check_paths(error: type[HotswapError], **paths: object) -> None:
    """Raise an error that names the argument unless each is `None`, or a path as `to_path` takes it."""
    for name, value in paths.items():
        if value is not None:
            to_path(error, name, value)


def check_choice(error: type[HotswapError], choices: tuple[str | None, ...], **values: object) -> None:
    """Raise an error that names the argument and the choices unless each is one of these."""
    for name, value in values.items():
        if not (value is None or isinstance(value, str)) or value not in choices:
            raise error(f"{name} is {shown(value)}; give one of {', '.join(map(repr, choices))}.")


def check_kind(error: type[HotswapError], name: str, value: object, kind: type) -> None:
    """Raise an error that names the argument unless a value is of a type, or has all that the type asks for.

    An abstract type asks for its abstract methods, and for those of a context manager if it is one; any other
    for objects of its own.
    """
    if isinstance(value, kind):
        return
    wanted = {*getattr(kind, "__abstractmethods__", ()), *_CONTEXT.intersection(dir(kind))}
    lacking = sorted(method for method in wanted if not callable(getattr(value, method, None)))
    if wanted and not lacking and not isinstance(value, type):
        return
    lacks = f" It lacks {', '.join(lacking)}." if lacking else ""
    raise error(f"{name} is {shown(value)}; give an object of type {kind.__name__}.{lacks}")


def check_no_messages(prompt: object) -> None:
    """Raise `InvalidRequest` for messages where a prompt is wanted, and name what takes them."""
    messages = cast("Sequence[object]", prompt) if isinstance(prompt, list | tuple) else (prompt,)
    if messages and isinstance(messages[0], Mapping):
        message = cast("object", messages[0])
        raise InvalidRequest(
            f"prompt has messages of a chat, {shown(message)}; give Chat(messages) as the prompt, or call "
            "fleet.chat(model, messages)."
        )


def check_unicode(name: str, text: str) -> None:
    """Raise `InvalidRequest` for a text that has a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidRequest(
            f"{name} has a lone surrogate at character {exc.start}, which is no text; give valid Unicode."
        ) from exc


def to_int(name: str, value: object, least: int, most: int) -> int:
    """Return a whole number between `least` and `most`; integers of NumPy and the like are converted.

    Raises:
        InvalidRequest: it is no whole number (a float or a bool is none), or out of range.
    """
    if type(value) is int or (not isinstance(value, bool) and isinstance(value, SupportsIndex)):
        number = _index(value)
        if number is not None and least <= number <= most:
            return number
    raise InvalidRequest(f"{name} is {shown(value)}; give a whole number from {least} to {most}.")


def to_float(name: str, value: object, least: float, most: float, *, above: bool = False) -> float:
    """Return a number between `least` and `most` as a float; with `above`, `least` itself is out of range.

    Raises:
        InvalidRequest: it is no number, not finite, or out of range.
    """
    if type(value) is float or (
        not isinstance(value, bool | str | bytes) and isinstance(value, SupportsFloat | SupportsIndex)
    ):
        try:
            number = float(value)
        except Exception:  # an int of too many digits, an array of several, a fault of the value's own
            number = math.nan
        if least <= number <= most and not (above and number == least):
            return number
    begin = f"over {least:g}" if above else f"from {least:g}"
    raise InvalidRequest(f"{name} is {shown(value)}; give a finite number {begin} to {most:g}.")


def to_flag(name: str, value: object, default: bool) -> bool:
    """Return true or false, and the default for `None`.

    Raises:
        InvalidRequest: it is anything else.
    """
    if value is None:
        return default
    if isinstance(value, bool):
        return value
    raise InvalidRequest(f"{name} is {shown(value)}; give true or false.")


def to_token_ids(
    name: str, value: object, *, most: int = MAX_PROMPT_TOKENS, ordered: bool = True
) -> tuple[int, ...]:
    """Return token ids, given as a flat sequence of whole numbers (a NumPy array or a tensor is one).

    A set is refused if they are `ordered`.

    Raises:
        InvalidRequest: it is none, or longer than `most`.
    """
    what = "a flat list of token ids"
    if ordered and is_set(value):
        raise InvalidRequest(f"{name} is {shown(value)}; give {what}.")
    ids = to_entries(name, value, what, most)
    if all(type(id) is int for id in ids) and (not ids or _in_range(cast("tuple[int, ...]", ids))):
        return cast("tuple[int, ...]", ids)  # checked in C: prompts are long
    return tuple(to_int(f"{name}[{at}]", id, 0, MAX_TOKEN_ID) for at, id in enumerate(ids))


def to_objects(error: type[HotswapError], name: str, value: Iterable[T], kind: type) -> tuple[T, ...]:
    """Return objects of a type that are given as a list, or raise an error that names the one that is not."""
    if not is_list(cast("object", value)):
        raise error(f"{name} is {shown(value)}; give a list of objects of type {kind.__name__}.")
    objects = tuple(value)
    for at, one in enumerate(objects):
        check_kind(error, f"{name}[{at}]", one, kind)
    return objects


def to_path(error: type[HotswapError], name: str, value: object) -> Path:
    """Return a string or a `Path` as a `Path`; an error that names the argument for all else.

    Names with a NUL, or with letters that the system cannot encode, are no paths: its calls raise a bare
    `ValueError` for them.
    """
    with suppress(UnicodeEncodeError):
        if isinstance(value, str | Path) and b"\0" not in os.fsencode(value):
            return Path(value)
    raise error(f"{name} is {shown(value)}; give a path, as a string or a Path.")


def to_entries(name: str, value: object, what: str, most: int) -> tuple[object, ...]:
    """Return the entries of a list, which is `what` a caller is told to give, unread if it is too long.

    Raises:
        InvalidRequest: it is no list, longer than `most`, or cannot be read.
    """
    if not is_list(value) or not isinstance(value, Collection):
        raise InvalidRequest(f"{name} is {shown(value)}; give {what}.")
    try:
        size = len(value)
        entries = _read(value) if size <= most else ()
    except Exception as exc:  # an array of no dimension, a range that is too long, a fault of the value's own
        raise InvalidRequest(f"{name} is {shown(value)}, which cannot be read; give {what}.") from exc
    if size > most:
        raise InvalidRequest(f"{name} has {size:,} entries; give at most {most:,}.")
    return entries


def is_list(value: object) -> TypeGuard[Iterable[object]]:
    """Whether a value has entries, and is neither text nor bytes nor a mapping."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        return False
    return isinstance(value, Iterable)


def is_set(value: object) -> bool:
    """Whether a value has entries in no order of the caller's."""
    return isinstance(value, Set)


def shown(value: object) -> str:
    """Return a value as an error shows it: at most about 80 characters, whatever it is."""
    if isinstance(value, str | bytes | bytearray) and len(value) > 80:
        return f"{value[:80]!r}... ({len(value):,} long)"
    try:
        text = repr(value)
    except Exception:  # an int of too many digits, or a fault of the value's own
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 80 else f"{text[:80]}..."


def _read(value: Iterable[object]) -> tuple[object, ...]:
    """The entries of a list; those of an array of one dimension at once, as Python's own numbers.

    One by one, those of a long prompt would hold the event loop for half a second.
    """
    tolist = getattr(value, "tolist", None) if getattr(value, "ndim", None) == 1 else None
    return tuple(cast("Iterable[object]", tolist()) if callable(tolist) else value)


def _index(value: SupportsIndex) -> int | None:
    try:
        return operator.index(value)
    except Exception:  # a tensor or an array of several numbers, or of floats; a fault of the value's own
        return None


def _in_range(ids: tuple[int, ...]) -> bool:
    return 0 <= min(ids) <= max(ids) <= MAX_TOKEN_ID


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max or value == math.inf
