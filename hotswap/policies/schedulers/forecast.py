"""A forecast beside any scheduler: weights come to memory, and models to idle instances, before requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, inf, isfinite
from typing import NamedTuple

from hotswap.action import Action, Prefetch, Swap
from hotswap.argument_kinds import check_arguments
from hotswap.errors import ConfigError
from hotswap.policies.forecasts import SeasonalRates
from hotswap.policies.prediction import assume
from hotswap.policies.schedulers.allocation import Allocation
from hotswap.policies.schedulers.cost import CostSwap
from hotswap.policies.schedulers.instances import used_s
from hotswap.request import ModelId
from hotswap.scheduler import Scheduler
from hotswap.view import FleetView, InstanceId, InstanceState, InstanceView, ModelView

__all__ = ["Forecast"]

# One swap may be under way for so many instances, requests' own included, when a model is loaded ahead.
_INSTANCES_A_SWAP = 8
# So many instances without a request are left to the inner scheduler.
_LEFT_IDLE = 1
# Of the models that are worth most so many are tried.
_MOST_TRIED = 8


@check_arguments
class Forecast(Scheduler):
    """Loads models that will soon be asked for to idle instances and to memory; `inner` plans all else.

    It learns at which time of the day each model is asked for, from the views that it plans with
    (`SeasonalRates`). With *S* the seconds of a load and of a swap that the fleet has measured:

        chance(m)   = 1 - exp(-requests for m expected in horizon_s)
        worth(m, i) = w(m) chance(m) load_s(m, i)
        swap i from v to m   for m without a replica, on an idle instance i,
                             if worth(m, i) - worth(v, i) >= least_gain w(m) swap_s(m, i)
        prefetch m           if chance(m) within a slot >= least_gain, and the fastest tier has room, or has
                             a model whose chance is less by least_gain

    So a second for which an instance swaps ahead must save requests `least_gain` seconds of waiting.

    **What it leaves alone.** It acts beside the inner plan and changes nothing of it. An instance that it
    takes has no request; none waits for its model, which is no likelier to be asked for than the new one. A
    model without a forecast keeps its instances. One idle instance is left to the
    inner scheduler, and nothing is swapped while a request waits in the fleet. `min_replicas`, sizes, failed
    loads and first tokens are heeded as by all shipped schedulers (`Allocation`).

    **Bounds.** A plan has one swap and one prefetch more than the inner one at most; the swap only if fewer
    than one in eight instances are swapping (one of fewer than eight), the prefetch only if the store tells
    of no other load. Memory is three numbers a slot and model.

    **Until a period was seen** there is no forecast, and the plan is the inner one's. A model that comes
    later has none for as long.

    It keeps what it has learned, so give each fleet one of its own. A plan depends on the views before;
    asked again with the same one it plans the same.

    Source: the idea is WarmServe's (Lou et al., arXiv:2512.09472, 2025): loads of language models repeat by
    the day, so weights can be on devices before requests. There parts of several models share a device; here
    an idle instance holds one. The rule is ours, measured in `docs/papers.md`.

    Args:
        inner: The scheduler whose plans it adds to; `CostSwap()` if not given.
        horizon_s: How far it looks ahead.
        period_s: Seconds after which the load repeats.
        num_slots: Parts of the period with a rate each.
        least_gain: Seconds of waiting to be saved by a second of swapping, over 0 to 1.
    """

    def __init__(
        self,
        inner: Scheduler | None = None,
        *,
        horizon_s: float = 60.0,
        period_s: float = 86_400.0,
        num_slots: int = 48,
        least_gain: float = 0.2,
    ) -> None:
        if not (horizon_s > 0 and isfinite(horizon_s)):
            raise ConfigError(f"horizon_s is {horizon_s!r}; give a finite number of seconds over 0.")
        if not 0 < least_gain <= 1:
            raise ConfigError(f"least_gain is {least_gain!r}; give a share over 0, at most 1.")
        self._inner = CostSwap() if inner is None else inner
        self._horizon_s, self._least_gain = horizon_s, least_gain
        self._rates = SeasonalRates(period_s=period_s, num_slots=num_slots)

    @property
    def rates(self) -> SeasonalRates:
        """What it has learned."""
        return self._rates

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        self._rates.learn(fleet)
        planned = self._inner.plan(fleet)
        if not self._rates.is_ready:
            return planned
        view = assume(fleet, planned)
        outlook = _Outlook(view, self._rates, self._horizon_s)
        swap = _swap_ahead(view, outlook, self._least_gain)
        prefetch = _prefetch_ahead(view, outlook, self._least_gain)
        more = tuple(action for action in (swap, prefetch) if action is not None)
        return (*planned, *more) if more else planned

    def __repr__(self) -> str:
        rates = self._rates
        return (
            f"Forecast({self._inner!r}, horizon_s={self._horizon_s:g}, period_s={rates.period_s:g}, "
            f"num_slots={rates.num_slots}, least_gain={self._least_gain:g})"
        )


class _Outlook:
    """The chances that models are asked for in the seconds ahead, and what their requests would wait."""

    def __init__(self, fleet: FleetView, rates: SeasonalRates, horizon_s: float) -> None:
        self._fleet = fleet
        expected = {m.id: rates.expected(m.id, fleet.now_s, horizon_s) for m in fleet.models}
        self.chances: Mapping[ModelId, float] = {
            name: 1.0 - exp(-number) for name, number in expected.items() if number is not None
        }
        self._loads_s: dict[tuple[ModelId, str], float] = {}

    def worth_s(self, model: ModelView, node: str = "") -> float:
        """Return the seconds that a load of the model on a node would save, by the chance of a request."""
        key = model.id, node
        if key not in self._loads_s:
            store = self._fleet.store.seen_from(node) if node else self._fleet.store
            self._loads_s[key] = self._fleet.times.load_s(store, model.id)
        return model.weight * self.chances[model.id] * self._loads_s[key]


class _Idle(NamedTuple):
    """An instance without a request, and what is lost if it swaps; the smallest goes first."""

    lost_s: float
    used_s: float
    id: InstanceId
    chance: float


def _swap_ahead(fleet: FleetView, outlook: _Outlook, least_gain: float) -> Swap | None:
    """Return the swap of an idle instance that is worth most, if any is worth its time."""
    idle = [instance for instance in fleet.instances if instance.free and not instance.num_requests]
    swapping = sum(instance.swapping for instance in fleet.instances)
    most_swapping = max(1, len(fleet.instances) // _INSTANCES_A_SWAP)
    if len(idle) <= _LEFT_IDLE or swapping >= most_swapping or fleet.waiting:
        return None
    allocation = Allocation(fleet)
    wanted = [m for m in fleet.models if m.id in outlook.chances and not allocation.num_replicas(m)]
    wanted.sort(key=lambda model: (-outlook.worth_s(model), model.id))
    found = [_idle(instance, allocation, outlook) for instance in idle] if wanted else []
    spare = sorted(one for one in found if one.lost_s < inf)
    for model in wanted[:_MOST_TRIED]:
        chance = outlook.chances[model.id]
        for one in spare:
            instance = fleet.instance(one.id)
            if one.chance > chance or not allocation.can_swap(instance, model):
                continue
            saved_s = outlook.worth_s(model, instance.node) - one.lost_s
            if saved_s >= least_gain * fleet.swap_s(model.id, instance) * model.weight:
                return Swap(instance=one.id, model=model.id, reason=_reason(model.id, chance, one))
    return None


def _idle(instance: InstanceView, allocation: Allocation, outlook: _Outlook) -> _Idle:
    """Return what is lost if an idle instance swaps: infinite where its model is wanted, or not forecast."""
    held = None if instance.state is InstanceState.EMPTY else instance.model
    if held is None:
        return _Idle(0.0, used_s(instance), instance.id, 0.0)
    model, chance = allocation.models.get(held), outlook.chances.get(held)
    if model is None or chance is None or model.num_waiting:
        return _Idle(inf, used_s(instance), instance.id, 1.0)
    return _Idle(outlook.worth_s(model, instance.node), used_s(instance), instance.id, chance)


def _reason(model: ModelId, chance: float, one: _Idle) -> str:
    return f"{model} is asked for soon by a chance of {chance:.2f}, what {one.id} has by {one.chance:.2f}"


def _prefetch_ahead(fleet: FleetView, outlook: _Outlook, least_gain: float) -> Prefetch | None:
    """Return the prefetch of the likeliest model that no instance and no memory has, if there is room."""
    store = fleet.store
    if len(store.tiers) < 2 or store.tiers[0].node or store.loading:
        return None
    fastest = store.tiers[0]
    sizes = {entry.model: entry.size_bytes for entry in store.residency}
    held = {instance.next_model for instance in fleet.instances}
    resident = {entry.model for entry in store.residency if entry.tier == fastest.name}
    absent = [
        (chance, model.id)
        for model in fleet.models
        if model.id in sizes and model.id not in resident and model.id not in held and not model.num_waiting
        if (chance := outlook.chances.get(model.id)) is not None
    ]
    chance, name = max(absent, default=(0.0, None))
    if name is None or chance < least_gain:
        return None
    least = min((outlook.chances.get(model, 1.0) for model in resident - held), default=1.0)
    if fastest.free_bytes < sizes[name] and chance - least < least_gain:
        return None
    return Prefetch(model=name, reason=f"{name} is asked for soon by a chance of {chance:.2f}")
