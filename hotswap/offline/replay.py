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
    from pydantic import ValidationError

    values = json.loads(text)
    try:
        return _adapter().validate_python(values)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise ValueError(f"it is no view of a fleet; {place}: {first['msg']}") from exc


@functools.cache
def _adapter() -> TypeAdapter[FleetView]:
    from pydantic import TypeAdapter  # here, so that virtual time and workloads load without it

    return TypeAdapter(FleetView)
