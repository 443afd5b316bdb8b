"""`hotswap plan`: one decision of a scheduler again, from the file of a view."""

from __future__ import annotations

from dataclasses import asdict, fields
from math import isfinite
from pathlib import Path

from hotswap.errors import ConfigError
from hotswap.offline.replay import load_view
from hotswap.policies.by_name import scheduler_named
from hotswap.simulation.explanation import Explanation, explain
from hotswap.view import FleetView, InstanceView, ModelView

__all__ = ["explained", "plan"]


def plan(view: Path, scheduler: str) -> Explanation:
    """Plan again from the file of a view, as `dump_view` writes it."""
    try:
        loaded = load_view(view.read_text(encoding="utf-8"))
        _check(loaded)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{str(view)!r} cannot be read as a view: {exc}.") from exc
    return explain(loaded, scheduler_named(scheduler))


def _check(view: FleetView) -> None:
    """Raise a ValueError if no fleet could have such a view, with which no scheduler can plan."""
    if not isfinite(view.now_s):
        raise ValueError(f"now_s is {view.now_s}, which is no time")
    parts: tuple[ModelView | InstanceView, ...] = (*view.models, *view.instances)
    for part in parts:
        for name in (field.name for field in fields(part) if field.name.startswith("num_")):
            if (count := getattr(part, name)) < 0:
                raise ValueError(f"{name} of {part.id!r} is {count}; counts are 0 or more")


def explained(explanation: Explanation) -> dict[str, object]:
    """The explanation as plain values."""
    return {
        "scheduler": explanation.scheduler,
        "actions": [{"action": type(action).__name__, **asdict(action)} for action in explanation.actions],
        "demands": [asdict(demand) for demand in explanation.demands],
        "candidates": {
            model: [asdict(candidate) for candidate in candidates]
            for model, candidates in explanation.candidates.items()
        },
    }
