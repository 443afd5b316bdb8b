"""The `Router` interface: which instance a request goes to."""

from __future__ import annotations

from abc import ABC, abstractmethod

from hotswap.request import Request
from hotswap.view import FleetView, InstanceId

__all__ = ["Router"]


class Router(ABC):
    """Chooses which instance serves a request. Pure: must not await, block or mutate."""

    @abstractmethod
    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        """Return the instance to try, or `None` to leave the request waiting.

        Asked again whenever an instance changes state or a place becomes free, so `None` is an answer, not
        an error. Requests of one model and adapter are asked about in order: while the first of them waits,
        so do those behind it. Samples of one request go where one of them has computed the prompt, without a
        question; the router is asked about one of them where none has, or no such instance has room. An
        instance that does not serve the request's model, or is not open, counts as `None`.
        """
