"""Views as text: record the input of a decision, and repeat the decision elsewhere."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING

from hotswap.view import FleetView

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = ["dump_view", "load_view"]


def dump_view(view: FleetView) -> str:
    """Return a view as one line of JSON, `Infinity` included where a number is infinite."""
    return json.dumps(_adapter().dump_python(view, mode="json"))


def load_view(text: str) -> FleetView:
    """Return the view that `dump_view` wrote, equal to the one it was given.

    Raises:
        ValueError: the text is not JSON, or not a fleet view.
    """
    return _adapter().validate_python(json.loads(text))


@functools.cache
def _adapter() -> TypeAdapter[FleetView]:
    from pydantic import TypeAdapter  # here, so that virtual time and workloads load without it

    return TypeAdapter(FleetView)
