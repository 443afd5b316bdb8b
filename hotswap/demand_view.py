"""`ModelView`, `WaitingView` and `AdapterView`: what is asked of a fleet at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from hotswap.request import AdapterId, InstanceId, ModelId, RequestId

__all__ = ["AdapterView", "ModelView", "WaitingView"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """One registered model at one moment.

    `num_running` requests are assigned to instances, `num_waiting` are in the queue; their sum is the
    *p* of the swap policy. `num_failed_loads` counts failures since the last load that succeeded.
    `last_evicted_s` is the loop time at which a swap or unload of one of its replicas last ended; `None` if
    none did. `unserved_since_s` is the loop time since which requests have waited for the model while no
    instance serves it or is swapping to it; `None` if none waits or an instance does.
    """

    id: ModelId
    weight_bytes: int = 0
    min_replicas: int = 0
    weight: float = 1.0
    num_running: int = 0
    num_waiting: int = 0
    num_failed_loads: int = 0
    last_evicted_s: float | None = None
    unserved_since_s: float | None = None

    @property
    def num_requests(self) -> int:
        """Running and waiting."""
        return self.num_running + self.num_waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingView:
    """One request of the queue, in the order in which the router is asked about them.

    Of its `num_tokens` it was given `num_generated` before, elsewhere. It was evicted `num_evicted` times so
    far, and left instances `num_stalls` times since its latest token, for whatever reason but a move. The
    KV blocks of its first `stored_tokens` tokens are in the fleet's KV store, so that they are copied in
    place of computed; 0 without a store. They are on `stored_node`, from which other nodes are sent them; ""
    if they are equally near to all. `last_instance` is the one that it left last, if it got a token there.
    """

    id: RequestId
    model: ModelId
    adapter: AdapterId | None = None
    num_tokens: int = 0
    num_generated: int = 0
    priority: int = 0
    arrived_s: float = 0.0
    waiting_since_s: float = 0.0
    num_evicted: int = 0
    num_stalls: int = 0
    stored_tokens: int = 0
    stored_node: str = ""
    last_instance: InstanceId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterView:
    """One adapter that has been asked for, at one moment; `id` is its latest version, as engines hold it.

    `num_running` requests with this version are assigned to instances, `num_waiting` are in the queue.
    `popularity` is how much it was asked for of late: a request counts for one when it comes, and for half as
    much after every minute. `asked_s` is the loop time at which the last one came, `gap_s` what lies between
    two of them, later ones counting for more; `None` before there were two.
    """

    id: AdapterId
    model: ModelId
    num_running: int = 0
    num_waiting: int = 0
    popularity: float = 0.0
    asked_s: float = 0.0
    gap_s: float | None = None

    @property
    def num_requests(self) -> int:
        """Running and waiting."""
        return self.num_running + self.num_waiting
