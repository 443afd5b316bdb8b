"""What a door knows of models beside the fleet: how they are served to clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hotswap import Fleet
from hotswap.door.calls import ToolFormat
from hotswap.door.parsers import ReasoningFormat
from hotswap.errors import UnknownModel
from hotswap.request import ModelId

__all__ = ["Name", "Served", "resolve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """How one model is served.

    Attributes:
        tool_format: How it writes calls of tools, for requests that have some; `None` leaves them text.
        reasoning_format: How it writes reasoning, which is told apart from the answer; `None` leaves it text.
        sampling: Fields of `Sampling` that hold where a request gives none, before those of the model's
            `generation_config.json`.
    """

    tool_format: ToolFormat | None = "hermes"
    reasoning_format: ReasoningFormat | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Name:
    """What a client's name of a model stands for: a model, by this name of it, and an adapter."""

    model: str
    id: ModelId
    adapter: str | None


def resolve(fleet: Fleet, name: str, adapter: str | None = None) -> Name:
    """Return what a name stands for: a model, another name of one, `model:adapter`, or the one adapter of it.

    Raises:
        UnknownModel: the fleet has none of that name.
        FleetClosed: the fleet is not open.
    """
    try:
        return Name(name, fleet.models.card(name).id, adapter)
    except UnknownModel:
        if adapter is None and (found := _adapter(fleet, name)) is not None:
            return found
        raise


def _adapter(fleet: Fleet, name: str) -> Name | None:
    model, separator, named = name.rpartition(":")
    if separator and any(model == one.id for one in fleet.models) | (model in fleet.models.aliases):
        return Name(model, fleet.models.card(model).id, named)
    owners = [one.model for one in fleet.adapters if one.id == name]
    return Name(owners[0], fleet.models.card(owners[0]).id, name) if len(owners) == 1 else None
