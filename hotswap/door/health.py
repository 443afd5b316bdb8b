"""`/live`, `/health`, `/ready` and `/metrics`: for what watches a server from outside."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from hotswap import FleetView
from hotswap.door.errors import Refusal
from hotswap.door.generation import Door
from hotswap.door.keys import KeyUse, use_of
from hotswap.door.metrics import Metrics
from hotswap.door.served import resolve
from hotswap.door.wire import to_json

__all__ = ["Health"]


class Health:
    """Answers of a few words, by their status."""

    def __init__(self, door: Door, metrics: Metrics | None) -> None:
        self._door, self._metrics = door, metrics

    async def live(self, _: Request) -> Response:
        """Say that the process answers: it need not be restarted."""
        return _answer(200, {"status": "ok"})

    async def health(self, _: Request) -> Response:
        """Say whether the fleet is open, as it is until its block is left."""
        self._door.fleet.view()
        return _answer(200, {"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Say whether requests should come here: all `min_replicas` serve, or those of `?model=`, any.

        Where clients need a key, models are named to those alone that have one.

        Raises:
            UnknownModel: the fleet has no such model.
            Refusal: the request has no key to ask for it.
        """
        fleet, reasons, use = self._door.fleet, list[str](), use_of(request.scope)
        asked = request.query_params.get("model")
        view = fleet.view()
        if not fleet.is_open:
            reasons.append("the fleet is closing")
        if (quiet_s := fleet.seconds_since_plan()) > self._door.limits.stale_s:
            reasons.append(f"the fleet has decided nothing for {quiet_s:.0f} s")
        if asked is not None:
            self._door.ring.check_client(use)
            name = resolve(fleet, asked)
            use.check_model(name.model)
            if not view.serving(name.id):
                reasons.append(f"no instance takes requests for {asked}")
        else:
            reasons += self._lacking(view, use)
        return _answer(
            503 if reasons else 200, {"status": "not ready" if reasons else "ok", "reasons": reasons}
        )

    def _lacking(self, view: FleetView, use: KeyUse) -> list[str]:
        """Return which models have too few replicas, and how many others whose names are not told."""
        lacking = [model for model in view.models if len(view.hosts(model.id)) < model.min_replicas]
        is_told = use.key is not None or not self._door.ring.has_clients
        told = [model for model in lacking if is_told and use.may_name(model.id)]
        reasons = [
            f"{model.id} has {len(view.hosts(model.id))} of {model.min_replicas} replicas" for model in told
        ]
        others = len(lacking) - len(told)
        return [*reasons, f"models with too few replicas: {others}"] if others else reasons

    async def metrics(self, _: Request) -> Response:
        """Give the metrics as Prometheus reads them."""
        if self._metrics is None:
            raise Refusal(404, "This server keeps no metrics; give create_app some.", "no_metrics")
        return Response(self._metrics.text(self._door.fleet), media_type=self._metrics.media_type)


def _answer(status: int, value: object) -> Response:
    return Response(to_json(value), status, media_type="application/json")
