"""Views of a fleet over some days, as a scheduler is shown them, for what learns from views."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from hotswap import FleetView, InstanceId, ModelId, RequestId, RunningView
from tests.policies.views import fleet, model

# A day of ten slots, each of which is seen ten times.
DAY_S, SLOTS, STEP_S = 1000.0, 10, 10.0


def at(now_s: float, models: Iterable[str], came: Iterable[tuple[str, float]] = ()) -> FleetView:
    """A view with requests of these models that came at these times, and still run."""
    running = [
        RunningView(
            id=RequestId(f"{name}@{at_s}"), model=ModelId(name), instance=InstanceId("e"), arrived_s=at_s
        )
        for name, at_s in came
    ]
    view = fleet([], [model(name) for name in models], now_s=now_s)
    return FleetView(now_s=now_s, models=view.models, running=tuple(running))


def days(
    rates: Mapping[str, Mapping[int, int]], until_s: float, *, from_s: float = 0.0
) -> Iterator[FleetView]:
    """Views from one time to another: so many requests of a model at each step of some slots of the day."""
    now_s = from_s
    while now_s <= until_s:
        slot = int((now_s - STEP_S) % DAY_S / (DAY_S / SLOTS))
        came = [
            (name, now_s - STEP_S + 1.0 + number / 100)
            for name, by_slot in rates.items()
            for number in range(by_slot.get(slot, 0) if now_s > from_s else 0)
        ]
        yield at(now_s, rates, came)
        now_s += STEP_S
