"""`/admin/summary`: a fleet as people watch it; a reader gets what has changed since it last asked."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import Response

from hotswap import Fleet, FleetView, InstanceView, ModelId
from hotswap.door.wire import to_json

__all__ = ["Summaries", "Summary"]

# The fleet is not looked at more often, however many watch it.
INTERVAL_S = 0.25
# A reader that is told of as many rows that went gets all rows anew.
MAX_GONE = 1000

_INSTANCE = (
    *("id", "state", "model", "node", "swapping", "target", "draining", "lost_because", "cooling_down"),
    *("serving_since_s", "num_requests", "max_requests", "num_kv_blocks", "num_free_kv_blocks"),
    *("weight_bytes", "memory_bytes", "preloaded", "num_moves"),
)
_MODEL = ("id", "weight_bytes", "min_replicas", "num_running", "num_waiting", "num_failed_loads")
_TIER = ("name", "node", "used_bytes", "capacity_bytes", "queued_bytes")
_instance_of, _model_of, _tier_of = attrgetter(*_INSTANCE), attrgetter(*_MODEL), attrgetter(*_TIER)

Row = dict[str, Any]


class Rows:
    """Rows by their ids, each with the number of the look at which it was seen to have changed."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}
        self._texts: dict[str, tuple[int, bytes]] = {}
        self._gone: dict[str, int] = {}

    def look(self, number: int, rows: Iterable[Row]) -> bool:
        """Take what there is at a look; return whether all readers must take all rows anew."""
        before, self._rows = self._rows, {row["id"]: row for row in rows}
        for key, row in self._rows.items():
            if before.get(key) != row:
                self._texts[key] = number, to_json(row)
                self._gone.pop(key, None)
        for key in before.keys() - self._rows.keys():
            del self._texts[key]
            self._gone[key] = number
        if len(self._gone) <= MAX_GONE:
            return False
        self._gone.clear()
        return True

    def since(self, number: int) -> tuple[bytes, bytes]:
        """Return the rows that changed after a look, 0 for all, and the ids of those that went, as JSON."""
        changed = b",".join(text for at, text in self._texts.values() if at > number)
        gone = [key for key, at in self._gone.items() if at > number > 0]
        return b"[" + changed + b"]", to_json(gone)


class Summary:
    """What people watch of a fleet. It is looked at once for all readers, and each row is written once.

    Args:
        fleet: An open fleet.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._instances, self._models = Rows(), Rows()
        self._epoch, self._number, self._looked_s = secrets.token_hex(4), 0, float("-inf")
        self._rest = b""

    def since(self, version: str) -> bytes:
        """Return what has changed since a version, or everything if it is none of this summary, as JSON.

        Raises:
            FleetClosed: the fleet is not open.
        """
        if anyio.current_time() - self._looked_s >= INTERVAL_S:
            self._look()
        epoch, _, number = version.partition(".")
        is_known = epoch == self._epoch and number.isdecimal() and len(number) < 16
        since = int(number) if is_known else 0
        instances, gone_instances = self._instances.since(since)
        models, gone_models = self._models.since(since)
        parts = (
            *(b'{"version":', to_json(f"{self._epoch}.{self._number}")),
            *(b',"whole":', to_json(not is_known), self._rest),
            *(b',"instances":', instances, b',"gone_instances":', gone_instances),
            *(b',"models":', models, b',"gone_models":', gone_models, b"}"),
        )
        return b"".join(parts)

    def _look(self) -> None:
        view = self._fleet.view(running=False)
        self._looked_s, self._number = view.now_s, self._number + 1
        tokens = self._fleet.num_tokens
        renewed = self._instances.look(self._number, map(_instance, view.instances))
        renewed |= self._models.look(self._number, _models(view, tokens))
        if renewed:
            self._epoch = secrets.token_hex(4)
        rest = {
            "now_s": view.now_s,
            "is_open": self._fleet.is_open,
            "num_tokens": sum(tokens.values()),
            "num_running": sum(model.num_running for model in view.models),
            "num_waiting": len(view.waiting),
            "tiers": [dict(zip(_TIER, _tier_of(tier), strict=True)) for tier in view.store.tiers],
        }
        self._rest = b"," + to_json(rest)[1:-1]


class Summaries:
    """The endpoint of a summary."""

    def __init__(self, fleet: Fleet) -> None:
        self._summary = Summary(fleet)

    async def summary(self, request: Request) -> Response:
        """Answer with what has changed since the version in `?since=`."""
        body = self._summary.since(request.query_params.get("since", ""))
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})


def _instance(view: InstanceView) -> Row:
    row: Row = dict(zip(_INSTANCE, _instance_of(view), strict=True))
    row["num_adapters"] = len(view.adapters)
    if (phase := view.phase) is not None:
        row["phase"] = {
            "name": phase.name,
            "since_s": phase.since_s,
            "loaded_bytes": phase.loaded_bytes,
            "total_bytes": phase.total_bytes,
        }
    return row


def _models(view: FleetView, tokens: Mapping[ModelId, int]) -> Iterable[Row]:
    """Yield the rows of models, with the bytes of each on every tier that has it."""
    tiers: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for entry in view.store.residency:
        tiers[entry.model][f"{entry.tier} {entry.node}".rstrip()] = entry.size_bytes
    for model in view.models:
        row: Row = dict(zip(_MODEL, _model_of(model), strict=True))
        row["tiers"] = tiers.get(model.id, {})
        row["num_tokens"] = tokens.get(model.id, 0)
        row["oldest_waiting_s"] = view.oldest_waiting_s(model.id) if model.num_waiting else None
        yield row
