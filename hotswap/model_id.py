"""Model ids as names of directories and objects, so that every store can hold every model."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["MAX_NAME_LENGTH", "directory_name", "model_id_of"]

MAX_NAME_LENGTH: Final = 200

_ESCAPED = re.compile(r"^[.-]|[^A-Za-z0-9._-]")
_NAME = re.compile(r"(?:~[0-9A-F]{2}|[A-Za-z0-9_])(?:~[0-9A-F]{2}|[A-Za-z0-9._-])*")


def directory_name(model: str) -> str:
    """Return the name that stores give to a model: its id, with other characters as `~` and two hex digits.

    Letters and digits of ASCII, `_`, and `.` and `-` but at the beginning stay as they are; of others each
    byte in UTF-8 is written as three characters: `llama3:8b` is `llama3~3A8b`. No two ids have one name.

    Raises:
        ValueError: the id is empty or too long, or has a backslash or characters that cannot be shown; the
            message is the end of a sentence.
    """
    if not _is_text(model) or "\\" in model or model in ("", ".", ".."):
        raise ValueError("is no name; give text without '\\'")
    if not model.isprintable():
        raise ValueError("has characters that cannot be shown, such as a line break; leave them out")
    name = _ESCAPED.sub(lambda found: "".join(f"~{byte:02X}" for byte in found[0].encode()), model)
    if len(name) > MAX_NAME_LENGTH:
        raise ValueError(
            f"takes {len(name)} characters as a directory name, and may take {MAX_NAME_LENGTH}; choose a "
            "shorter one (all but ASCII letters, digits, '.', '_' and '-' take three for each byte)"
        )
    return name


def _is_text(model: object) -> bool:
    return isinstance(model, str)


def model_id_of(name: str) -> str | None:
    """Return the id whose `directory_name` this is; `None` if there is none."""
    if len(name) > MAX_NAME_LENGTH or not _NAME.fullmatch(name):
        return None
    try:
        model = re.sub(
            r"(?:~[0-9A-F]{2})+", lambda found: bytes.fromhex(found[0].replace("~", "")).decode(), name
        )
        return model if directory_name(model) == name else None
    except ValueError:
        return None
