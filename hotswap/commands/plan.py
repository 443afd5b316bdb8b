"""`hotswap plan`: one decision of a scheduler again, from the file of a view."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any, cast

from hotswap.errors import ConfigError
from hotswap.offline.replay import load_view
from hotswap.policies.by_name import scheduler_named
from hotswap.simulation.explanation import Explanation, explain
from hotswap.view import FleetView

__all__ = ["explained", "plan"]

# Fields with a time at which something was; as all whose name ends in `since_s`.
_LOOP_TIMES = frozenset({"arrived_s", "asked_s", "last_evicted_s", "last_used_s", "swapped_s"})
# A remote engine's clock may have begun before this one's.
_FREE = frozenset({"kept_since_s", "now_s", "priority"})


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
        raise ValueError(f"now_s is {view.now_s}, which is no time; give the finite time of the view")
    for tier, bytes_per_s in view.times.load_bytes_per_s:
        if not bytes_per_s > 0:
            raise ValueError(f"load_bytes_per_s of {tier!r} is {bytes_per_s}; give a number over 0")
    for part in _parts(view):
        for name in (field.name for field in fields(part)):
            value = getattr(part, name)
            if isinstance(value, int | float) and (wanted := _wanted(name, value, view.now_s)):
                of = f" of {part.id!r}" if hasattr(part, "id") else ""
                raise ValueError(f"{name}{of} is {value}; give {wanted}")


def _parts(value: object) -> Iterator[Any]:
    """Yield all dataclasses that a value has, and itself if it is one."""
    if isinstance(value, tuple):
        for item in cast("tuple[object, ...]", value):
            yield from _parts(item)
    elif is_dataclass(value):
        yield value
        for field in fields(value):
            yield from _parts(getattr(value, field.name))


def _wanted(name: str, value: float, now_s: float) -> str:
    """Return what a field must be, by its name; "" if it is that already."""
    if name in _FREE:
        return ""
    if name.endswith("per_s"):
        return "" if value > 0 else "a number over 0"
    if name == "weight":
        return "" if 0 < value < inf else "a finite number over 0"
    if name in _LOOP_TIMES or name.endswith("since_s"):
        return "" if 0 <= value <= now_s else f"a time of the loop, 0 to now_s, which is {now_s:g}"
    if name.endswith("_s"):
        return "" if 0 <= value < inf else "finite seconds from 0 on"
    return "" if value >= 0 else "a number from 0 on"


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
