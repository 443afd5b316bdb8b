"""The fleet of production with simulated requests in place of clients."""

from __future__ import annotations

from hotswap.loop_time import current_time
from hotswap.request import ModelId
from hotswap.runtime.core import Core
from hotswap.sampling import Sampling
from hotswap.simulation.events.request import RequestListener, SimulatedRequest

__all__ = ["EventFleet"]


class EventFleet(Core):
    """A fleet on `EventEngine`s that takes simulated requests.

    They meet the same admission, control loop, swaps, moves and adapters as clients do, and have no task and
    no queue of tokens of their own.
    """

    def submit(
        self,
        model: str,
        prompt: tuple[int, ...],
        sampling: Sampling,
        *,
        adapter: str | None = None,
        priority: int = 0,
        number: int,
        listener: RequestListener,
    ) -> SimulatedRequest:
        """Start a request, and have its end told.

        The listener knows it by its `number`; other arguments, and errors, are those of `Fleet.stream`.
        """
        self.lifetime.check_open()
        now_s = current_time()
        new = self.new_request(
            ModelId(model), prompt, sampling, adapter=adapter, priority=priority, arrived_s=now_s
        )
        request = SimulatedRequest(new, self, number, listener)
        self.state.begin(request)
        request.begin()
        return request
