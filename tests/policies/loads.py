"""Instances with KV blocks and the requests that fill them: what policies by freeness look at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from hotswap import (
    FleetView,
    InstanceId,
    InstanceState,
    InstanceView,
    ModelId,
    ModelView,
    RequestId,
    RunningView,
)
from hotswap.abc import Action, Migrate

BLOCK = 16


def loaded(
    name: str,
    requests: int = 0,
    *,
    of: str = "a",
    free: int = 100,
    total: int = 100,
    waiting: int = 0,
    next_blocks: int = 0,
    prefill: int = 0,
    high: int = 0,
    moves: int = 0,
    since_s: float | None = 0.0,
    preempted: tuple[str, ...] = (),
) -> InstanceView:
    """An instance that serves `of`, `waiting` of its `requests` in its queue."""
    return InstanceView(
        id=InstanceId(name),
        state=InstanceState.SERVING,
        model=ModelId(of),
        num_requests=requests,
        num_running=requests - waiting,
        num_waiting=waiting,
        num_prefill_tokens=prefill,
        num_kv_blocks=total,
        num_free_kv_blocks=free,
        num_next_kv_blocks=next_blocks,
        num_high_priority=high,
        num_moves=moves,
        serving_since_s=since_s,
        preempted=tuple(map(RequestId, preempted)),
    )


def terminating(instance: InstanceView) -> InstanceView:
    """The same, unloading after a deadline."""
    return replace(instance, state=InstanceState.DRAINING, swapping=True, target=None)


def running(
    name: str,
    on: str,
    tokens: int = 15,
    *,
    of: str = "a",
    priority: int = 0,
    arrived_s: float = 0.0,
    begun: bool = True,
    moving: bool = False,
    remaining: int = 10,
    since_s: float = 0.0,
) -> RunningView:
    return RunningView(
        id=RequestId(name),
        model=ModelId(of),
        instance=InstanceId(on),
        num_tokens=tokens,
        num_remaining=remaining,
        priority=priority,
        arrived_s=arrived_s,
        begun=begun,
        moving=moving,
        since_s=since_s,
    )


def fleet_of(
    instances: Iterable[InstanceView],
    requests: Iterable[RunningView] = (),
    *,
    models: Sequence[ModelView] = (),
    now_s: float = 100.0,
) -> FleetView:
    instances = tuple(instances)
    held = sorted({instance.model for instance in instances if instance.model is not None})
    return FleetView(
        now_s=now_s,
        instances=instances,
        models=tuple(models) or tuple(ModelView(id=model) for model in held),
        running=tuple(requests),
    )


def moves(actions: Iterable[Action]) -> list[tuple[RequestId, InstanceId]]:
    """The plan as `(request, destination)` pairs."""
    return [(action.request, action.destination) for action in actions if isinstance(action, Migrate)]


def blocks_of(request: RunningView) -> int:
    """KV blocks of a request with its next token."""
    return request.num_tokens // BLOCK + 1


@dataclass(frozen=True)
class Cluster:
    """Instances and what runs on them, from which views are made anew after every change.

    `pools` has the KV blocks and the model of each, `leaving` those that terminate, `heads` the blocks that
    the first of a queue needs.
    """

    pools: dict[str, tuple[int, str]]
    requests: tuple[RunningView, ...]
    leaving: frozenset[str] = frozenset()
    heads: tuple[tuple[str, int], ...] = ()

    def view(self) -> FleetView:
        return fleet_of(map(self._instance, self.pools), self.requests)

    def after(self, actions: Iterable[Action]) -> Cluster:
        """The cluster once the planned moves are done."""
        destinations = {
            action.request: action.destination for action in actions if isinstance(action, Migrate)
        }
        return replace(
            self,
            requests=tuple(replace(r, instance=destinations.get(r.id, r.instance)) for r in self.requests),
        )

    def _instance(self, name: str) -> InstanceView:
        total, of = self.pools[name]
        here = [request for request in self.requests if request.instance == name]
        head = dict(self.heads).get(name, 0)
        instance = loaded(
            name,
            len(here) + (head > 0),
            of=of,
            total=total,
            free=total - sum(map(blocks_of, here)),
            waiting=int(head > 0),
            next_blocks=head,
            prefill=head * BLOCK,
            high=sum(request.priority > 0 for request in here),
        )
        return terminating(instance) if name in self.leaving else instance


@st.composite
def clusters(draw: st.DrawFn, *, models: str = "ab", priorities: int = 0) -> Cluster:
    """Instances of two models and sizes, none of them fuller than full, some leaving, some with queues."""
    names = [f"e{n}" for n in range(draw(st.integers(1, 6)))]
    pools = {name: (draw(st.sampled_from([20, 60])), draw(st.sampled_from(models))) for name in names}
    requests: list[RunningView] = []
    for name, (total, of) in pools.items():
        left = total
        for number, tokens in enumerate(draw(st.lists(st.integers(1, 300), max_size=8))):
            request = running(
                f"{name}.{number}",
                name,
                tokens,
                of=of,
                priority=draw(st.integers(0, priorities)),
                arrived_s=draw(st.integers(0, 3)),
            )
            if blocks_of(request) <= left:
                left -= blocks_of(request)
                requests.append(request)
    leaving = draw(st.frozensets(st.sampled_from(names), max_size=1))
    heads = draw(st.lists(st.tuples(st.sampled_from(names), st.integers(1, 30)), max_size=2))
    return Cluster(pools, tuple(requests), leaving, tuple(heads))
