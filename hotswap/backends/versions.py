"""`versions_of`: the versions of installed packages, as a name of what they compute."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version

__all__ = ["versions_of"]


@cache
def versions_of(*packages: str) -> str:
    """Return the packages that are installed, each with its version."""
    found: list[str] = []
    for package in packages:
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)
