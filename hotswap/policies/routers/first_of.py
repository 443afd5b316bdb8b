"""A router made of other routers."""

from __future__ import annotations

from hotswap.checks import check_kind
from hotswap.errors import ConfigError
from hotswap.request import Request
from hotswap.router import Router
from hotswap.view import FleetView, InstanceId

__all__ = ["FirstOfRouters"]


class FirstOfRouters(Router):
    """Asks routers in order and returns the first answer that is an open replica of the request's model.

    Any other answer counts as `None`, as the fleet would treat it.
    """

    def __init__(self, *routers: Router) -> None:
        for number, router in enumerate(routers, start=1):
            check_kind(ConfigError, f"Router {number}", router, Router)
        self._routers = routers

    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        serving = {instance.id for instance in fleet.serving(request.model)}
        answers = (router.route(request, fleet) for router in self._routers)
        return next((answer for answer in answers if answer in serving), None)

    def __repr__(self) -> str:
        return f"FirstOfRouters({', '.join(map(repr, self._routers))})"
