"""`/v1/models`: what requests may ask for, and whether it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from hotswap import FleetView, ModelId
from hotswap.door.errors import Refusal
from hotswap.door.generation import Door
from hotswap.door.keys import use_of
from hotswap.door.served import Name, resolve
from hotswap.door.wire import to_json

__all__ = ["ModelListing", "load_status"]

LoadState: TypeAlias = Literal["loaded", "loading", "unloading", "failed", "unloaded"]


class ModelListing:
    """Lists models, other names of them, and adapters as `model:adapter`."""

    def __init__(self, door: Door) -> None:
        self._door, self._created = door, door.now()

    async def all(self, request: Request) -> Response:
        """List what the key of a request may name."""
        view, use = self._door.fleet.view(), use_of(request.scope)
        data = [self._entry(name, view) for name in self._names() if use.may_name(name.model)]
        return Response(to_json({"object": "list", "data": data}), media_type="application/json")

    async def one(self, request: Request) -> Response:
        """Tell of one model.

        Raises:
            UnknownModel: there is none of that name.
            Refusal: the model has no such adapter, or the key may not name it.
        """
        fleet = self._door.fleet
        asked: str = request.path_params["model"]
        name = resolve(fleet, asked)
        use_of(request.scope).check_model(name.model)
        if name.adapter is not None and not any(
            (adapter.model, adapter.id) == (name.id, name.adapter) for adapter in fleet.adapters
        ):
            raise Refusal(404, f"There is no model {asked!r}.", "model_not_found", param="model")
        return Response(to_json(self._entry(name, fleet.view())), media_type="application/json")

    def _names(self) -> Iterator[Name]:
        fleet = self._door.fleet
        for model in fleet.models:
            yield Name(model.id, fleet.models.card(model.id).id, None)
        for alias, model_id in fleet.models.aliases.items():
            if alias not in {model.id for model in fleet.models}:
                yield Name(alias, model_id, None)
        for adapter in fleet.adapters:
            yield Name(adapter.model, fleet.models.card(adapter.model).id, adapter.id)

    def _entry(self, name: Name, view: FleetView) -> dict[str, Any]:
        card = self._door.fleet.models.card(name.id)
        model = view.model(card.id)
        is_other = name.model != card.id
        return {
            "id": name.model if name.adapter is None else f"{name.model}:{name.adapter}",
            "object": "model",
            "created": self._created,
            "owned_by": "hotswap",
            "root": card.id,
            "parent": name.model if name.adapter is not None else (card.id if is_other else None),
            "max_model_len": card.max_context_tokens,
            "status": load_status(card.id, view),
            "hotswap": {
                "replicas": len(view.serving(card.id)),
                "running": model.num_running,
                "waiting": model.num_waiting,
                "tier": view.store.tier_of(card.id),
                "weight_bytes": card.weight_bytes,
                "architecture": card.architecture,
            },
        }


def load_status(model: ModelId, view: FleetView) -> dict[str, Any]:
    """Return whether a model is loaded anywhere, and the progress of a load that is under way."""
    loading = [i for i in view.instances if i.swapping and i.target == model]
    if view.serving(model):
        return {"value": "loaded"}
    if loading:
        return {
            "value": "loading",
            "progress": max(one.phase.share if one.phase is not None else 0.0 for one in loading),
        }
    if any(instance.model == model for instance in view.instances):
        return {"value": "unloading"}
    return {"value": "failed" if view.model(model).num_failed_loads else "unloaded"}
