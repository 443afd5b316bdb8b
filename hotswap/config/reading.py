"""Reading a file, with every error by its place."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from pydantic import ValidationError

from hotswap.config.schema import FleetConfig
from hotswap.errors import ConfigError

__all__ = ["read_config", "secret_of"]


def read_config(path: Path) -> FleetConfig:
    """Return what a file of TOML describes.

    Raises:
        ConfigError: it cannot be read, is no TOML, or says something wrong; all of that, each by its place.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}.") from exc
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{path} is no TOML: {exc}.") from exc
    try:
        return FleetConfig.model_validate(values)
    except ValidationError as exc:
        found = exc.errors(include_url=False, include_context=False, include_input=False)
        wrong = "\n".join(
            f"  {_place(error['loc'])}: {error['msg'].removeprefix('Value error, ')}" for error in found
        )
        raise ConfigError(f"{path} says what it may not:\n{wrong}") from exc


def _place(parts: tuple[int | str, ...]) -> str:
    """Return a place as one would write it: `models[1].source`."""
    place = ""
    for part in parts:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else part
    return place or "the file"


def secret_of(reference: str, place: str) -> str:
    """Return the secret that `env:NAME` or `file:PATH` refers to.

    Raises:
        ConfigError: there is none.
    """
    kind, _, name = reference.partition(":")
    if kind == "env":
        if not (secret := os.environ.get(name, "")):
            raise ConfigError(f"{place} is {reference!r}, and no variable {name} has a value; set it.")
        return secret
    try:
        return Path(name).read_text(encoding="utf-8").strip()
    except OSError as exc:
        raise ConfigError(f"{place} is {reference!r}, which cannot be read: {exc}.") from exc
