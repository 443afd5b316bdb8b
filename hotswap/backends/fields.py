"""Typed access to untrusted JSON, with errors that name the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

from hotswap.errors import ShardCorrupt

__all__ = ["CONVERT_AGAIN", "LARGEST", "Fields", "parse_object"]

CONVERT_AGAIN = "Convert the model again with `hotswap store add --replace`."
LARGEST: Final = 2**62  # every number must be under it


class Fields:
    """One JSON object of the file at `path`; a field of another type raises `ShardCorrupt`."""

    def __init__(self, raw: dict[str, Any], path: Path | str, remedy: str = CONVERT_AGAIN) -> None:
        self.raw = raw
        self._path = path
        self._remedy = remedy

    def wrong(self, what: str) -> ShardCorrupt:
        """Return the error for a file that cannot be used."""
        return ShardCorrupt(f"{str(self._path)!r} cannot be used: {what}. {self._remedy}")

    def get(self, name: str) -> object:
        """The value of a field of any type, `None` if it is missing."""
        return cast("object", self.raw.get(name))

    def text(self, name: str) -> str:
        """A string."""
        value = self._get(name)
        if not isinstance(value, str):
            raise self.wrong(f"the field {name!r} is not a text")
        return value

    def size(self, name: str, *, least: int = 0) -> int:
        """A whole number, `least` or more."""
        return self._whole(self._get(name), name, least)

    def number(self, name: str) -> float:
        """A number, 0 or more."""
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LARGEST:
            raise self.wrong(f"the field {name!r} is not a number of at least 0")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self._get(name)
        if not isinstance(value, bool):
            raise self.wrong(f"the field {name!r} is not true or false")
        return value

    def sizes(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers, 0 or more each."""
        return tuple(self._whole(value, name, 0) for value in self._list(name))

    def record(self, name: str) -> Fields:
        """An object."""
        return self._record(self._get(name), name)

    def records(self, name: str) -> Iterator[Fields]:
        """A list of objects."""
        return (self._record(value, name) for value in self._list(name))

    def _get(self, name: str) -> object:
        if name not in self.raw:
            raise self.wrong(f"the field {name!r} is missing")
        return cast("object", self.raw[name])

    def _list(self, name: str) -> list[object]:
        value = self._get(name)
        if not isinstance(value, list):
            raise self.wrong(f"the field {name!r} is not a list")
        return cast("list[object]", value)

    def _record(self, value: object, name: str) -> Fields:
        if not isinstance(value, dict):
            raise self.wrong(f"the field {name!r} is not an object")
        return Fields(cast("dict[str, Any]", value), self._path, self._remedy)

    def _whole(self, value: object, name: str, least: int) -> int:
        # `type`, because a bool is an int to `isinstance`.
        if type(value) is not int or not least <= value < LARGEST:
            raise self.wrong(f"the field {name!r} is not a whole number of at least {least}")
        return value


def parse_object(text: bytes, path: Path | str, *, remedy: str = CONVERT_AGAIN) -> Fields:
    """Parse a JSON object; `remedy` is the last sentence of its errors.

    Raises:
        ShardCorrupt: the text is not JSON, or not an object.
    """
    fields = Fields({}, path, remedy)
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise fields.wrong("it is not JSON") from exc
    if not isinstance(value, dict):
        raise fields.wrong("it is not a JSON object")
    return Fields(cast("dict[str, Any]", value), path, remedy)
