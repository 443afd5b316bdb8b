"""What a door serves by, all of which may change while it is open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hotswap.door.keys import ApiKey
from hotswap.door.limits import Limits
from hotswap.door.served import Served
from hotswap.engine import Engine

__all__ = ["Settings", "Setup"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a door serves by.

    Attributes:
        limits: What one request may take.
        served: How models are served, by their ids or other names; `Served()` holds for others.
        keys: Those of clients and of operators.
        hosts: The names by which the server may be called; `None` for any.
        adapter_roots: The directories that operators may load adapters from; none lets them load none.
    """

    limits: Limits = field(default_factory=Limits)
    served: Mapping[str, Served] = field(default_factory=dict[str, Served])
    keys: tuple[ApiKey, ...] = ()
    hosts: tuple[str, ...] | None = None
    adapter_roots: tuple[Path, ...] = ()


class Setup(Protocol):
    """What a fleet was made by, such as a file, for operators that have it read again."""

    async def reload(self) -> Sequence[str]:
        """Apply what has changed in it, and return in words what was changed and what could not be yet.

        Raises:
            ConfigError: it is wrong, or has changed in what an open fleet cannot change; nothing was done.
        """
        ...

    def engine_for(self, instance: str) -> Engine:
        """Return a new engine, by a name of its own, as one of an instance is described.

        Raises:
            ConfigError: the instance is not described.
        """
        ...
