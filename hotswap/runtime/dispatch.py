"""Who goes where: the router's answer, checked, and the count of requests at each instance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import replace

from hotswap.request import AdapterId, ModelId, Request
from hotswap.router import Router
from hotswap.runtime.instance import Instance
from hotswap.runtime.observe import ask
from hotswap.view import FleetView, InstanceId, InstanceView

__all__ = ["Dispatcher"]


class Dispatcher:
    """Asks the router, and charges the instance it names with the request.

    Attributes:
        num_running: Requests by model that instances are charged with.
        num_adapted: The same by model and adapter, of those that have one.
    """

    def __init__(
        self,
        router: Router,
        instances: Mapping[InstanceId, Instance],
        served: Callable[[], Container[ModelId]],
        observe: Callable[[], FleetView],
        look: Callable[[InstanceId], InstanceView | None],
        on_release: Callable[[], None],
    ) -> None:
        self.num_running: Counter[ModelId] = Counter()
        self.num_adapted: Counter[tuple[ModelId, AdapterId]] = Counter()
        self._num_assigned = 0
        self._router, self._instances = router, instances
        self._served, self._observe, self._look = served, observe, look
        self._on_release = on_release

    def route(self, request: Request) -> Instance | None:
        """Return the instance that the request may go to, charged with it; `None` if it has to wait."""
        instance = self.choose(request)
        if instance is not None:
            self.charge(request, instance)
        return instance

    def choose(self, request: Request) -> Instance | None:
        """Return where the request would go, charging nobody; no router is asked while nobody serves it."""
        if request.model not in self._served():
            return None
        chosen = ask(self._observe, lambda fleet: self._router.route(request, _seen_by(request, fleet)))
        view = None if chosen is None else self._look(chosen)
        if view is None or not view.open or view.model != request.model:
            return None
        return self._instances[view.id] if request.adapter is None or view.max_adapters else None

    def charge(self, request: Request, instance: Instance) -> None:
        """Count a request to an instance."""
        self._num_assigned += 1
        instance.charge(self._num_assigned, high=request.priority > 0)
        self.num_running[request.model] += 1
        if request.adapter is not None:
            self.num_adapted[request.model, request.adapter] += 1

    def release(self, request: Request, instance: Instance) -> None:
        """Count it out again."""
        instance.release(high=request.priority > 0)
        self.num_running[request.model] -= 1
        if request.adapter is not None:
            lane = request.model, request.adapter
            self.num_adapted[lane] -= 1
            if not self.num_adapted[lane]:  # versions come and go
                del self.num_adapted[lane]
        self._on_release()


def _seen_by(request: Request, fleet: FleetView) -> FleetView:
    """Return what a router may see for a request: one with an adapter goes where adapters can be held."""
    if request.adapter is None or all(instance.max_adapters for instance in fleet.hosts(request.model)):
        return fleet
    return replace(fleet, instances=tuple(i for i in fleet.instances if i.max_adapters))
