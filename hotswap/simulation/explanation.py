"""One decision again, with what each candidate would have cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import inf

from hotswap.action import Action, Migrate, PinAdapters, Prefetch, Resize, Swap, Unload
from hotswap.request import ModelId
from hotswap.scheduler import Scheduler
from hotswap.view import FleetView, InstanceView, ModelView

__all__ = ["Candidate", "Demand", "Explanation", "explain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a model asks for: `load` is its requests times its weight for each replica."""

    model: ModelId
    num_requests: int
    num_waiting: int
    num_replicas: int
    load: float
    waited_s: float
    tier: str
    load_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An instance that a swap could have taken, what that would have cost, or why it was `impossible`.

    `swap_s` is by the times that the fleet had measured (`FleetView.swap_s`).
    """

    instance: str
    model: str
    num_evicted: int
    num_recomputed: int
    swap_s: float
    impossible: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a scheduler plans for a view, and between what it could choose; `str` gives it as text."""

    scheduler: str
    actions: tuple[Action, ...]
    demands: tuple[Demand, ...]
    candidates: dict[ModelId, tuple[Candidate, ...]]

    def __str__(self) -> str:
        lines = [f"{self.scheduler} plans {len(self.actions)} action(s):"]
        lines += [f"  {number}. {_told(action)}" for number, action in enumerate(self.actions, start=1)]
        lines += ["", "Models, those of the plan first in its order, then the most loaded:"]
        lines += [
            f"  {d.model}: load {d.load:.3g} ({d.num_requests} requests, {d.num_waiting} of them waiting, "
            f"up to {d.waited_s:.3g} s; {d.num_replicas} replicas); {_where(d)}"
            for d in self.demands
        ]
        for model, candidates in self.candidates.items():
            lines += ["", f"What {model} would have cost:"]
            lines += [f"  {_priced(candidate)}" for candidate in candidates]
        return "\n".join(lines)


def explain(view: FleetView, scheduler: Scheduler) -> Explanation:
    """Plan again from a view and say what was there to choose from.

    Candidates are listed for every model that a planned swap loads, or, if none does, for every model that
    has requests waiting and no replica: cheapest first by requests evicted, then by tokens computed again.
    """
    actions = tuple(scheduler.plan(view))
    waited: dict[ModelId, float] = {}
    for request in view.waiting:
        since_s = view.now_s - request.waiting_since_s
        waited[request.model] = max(since_s, waited.get(request.model, 0.0))
    demands = sorted(
        (_demand(view, model, waited.get(model.id, 0.0)) for model in view.models),
        key=lambda demand: (-demand.load, -demand.waited_s, demand.model),
    )
    asked = [action.model for action in actions if isinstance(action, Swap)]
    demands.sort(key=lambda demand: asked.index(demand.model) if demand.model in asked else len(asked))
    asked = asked or [d.model for d in demands if d.num_waiting and not d.num_replicas]
    tokens = Counter[str]()
    for running in view.running:
        tokens[running.instance] += running.num_tokens
    return Explanation(
        scheduler=repr(scheduler),
        actions=actions,
        demands=tuple(demands),
        candidates={model: _candidates(view, model, tokens) for model in dict.fromkeys(asked)},
    )


def _demand(view: FleetView, model: ModelView, waited_s: float) -> Demand:
    num_replicas = len(view.replicas(model.id))
    work = model.num_requests * model.weight
    return Demand(
        model=model.id,
        num_requests=model.num_requests,
        num_waiting=model.num_waiting,
        num_replicas=num_replicas,
        load=work / num_replicas if num_replicas else inf if work else 0.0,
        waited_s=waited_s,
        tier=view.store.tier_of(model.id) or "",
        load_s=view.times.load_s(view.store, model.id),
    )


def _candidates(view: FleetView, model: ModelId, tokens: Counter[str]) -> tuple[Candidate, ...]:
    wanted = view.model(model)
    priced = [
        Candidate(
            instance=instance.id,
            model=instance.model or "",
            num_evicted=instance.num_requests,
            num_recomputed=tokens[instance.id],
            swap_s=view.swap_s(model, instance),
            impossible=_impossible(wanted, instance),
        )
        for instance in view.instances
    ]
    priced.sort(key=lambda c: (bool(c.impossible), c.num_evicted, c.num_recomputed, c.swap_s, c.instance))
    return tuple(priced)


def _impossible(model: ModelView, instance: InstanceView) -> str:
    if instance.model == model.id and not instance.swapping:
        return "serves it already"
    if not instance.free:
        return (
            "is swapping" if instance.swapping else "drains" if instance.draining else f"is {instance.state}"
        )
    if instance.memory_bytes and model.weight_bytes > instance.memory_bytes:
        return "is too small"
    return "failed to load it a moment ago" if model.id in instance.cooling_down else ""


def _told(action: Action) -> str:
    match action:
        case Swap(instance=instance, model=model, reason=reason):
            told = f"swap {instance} to {model}"
        case Unload(instance=instance, reason=reason):
            told = f"unload {instance}"
        case Prefetch(model=model, node=node, reason=reason):
            told = f"prefetch {model} on {node}" if node else f"prefetch {model}"
        case PinAdapters(instance=instance, adapters=adapters, reason=reason):
            told = f"have {instance} hold {', '.join(adapters)}"
        case Migrate(request=request, destination=destination, reason=reason):
            told = f"move request {request} to {destination}"
        case Resize(instance=instance, kv_blocks=kv_blocks, reason=reason):
            told = f"give {instance} {kv_blocks} KV blocks"
    return f"{told}, since {reason}" if reason else told


def _where(demand: Demand) -> str:
    return f"on tier {demand.tier}, {demand.load_s:.3g} s to load" if demand.tier else "on no tier"


def _priced(candidate: Candidate) -> str:
    what = f"{candidate.instance} ({candidate.model or 'empty'})"
    if candidate.impossible:
        return f"{what}: {candidate.impossible}"
    return (
        f"{what}: {candidate.num_evicted} requests evicted, {candidate.num_recomputed} tokens computed "
        f"again, {candidate.swap_s:.3g} s to swap"
    )
