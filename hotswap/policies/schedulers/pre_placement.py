"""Placement ahead of loads: models that are loaded often come to the memory of more nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, log
from typing import NamedTuple

from hotswap.action import Action, Prefetch
from hotswap.argument_kinds import check_arguments
from hotswap.checks import check_counts
from hotswap.errors import ConfigError
from hotswap.policies.prediction import assume
from hotswap.policies.schedulers.startup_time import StartupTimePlacement
from hotswap.request import ModelId
from hotswap.scheduler import Scheduler
from hotswap.view import FleetView, InstanceId, StoreView

__all__ = ["PrePlacement"]


# What a model counts that was not loaded yet, so that it comes last, and not never.
_UNSEEN = 0.01


@check_arguments
class PrePlacement(Scheduler):
    """Prefetches models that are loaded often to the fastest tier of more nodes; `inner` plans all else.

    A load is quick on a node that has the model in memory, if an instance there has no request. The more
    often a model is loaded and the busier nodes are, the more copies of it are worth their memory. From the
    views that it plans with, it learns how often each model is loaded, and how often a node has no idle
    instance (*p*, of late); with *S* the seconds that a load from memory saves on the node:

        uses(m, k)    = loads a second of m * p^k     of a copy beside k others, when their nodes are busy
        worth(m, k)   = uses(m, k) S
        prefetch m    on a node without it, to be copy k + 1 <= max_copies, the one that is worth most,
                      if the tier has room, or else
                      if uses(m, k) half_life_s >= least_uses
                      and worth(m, k) >= least_gain worth(v, k_v - 1) of the v on it that is worth least

    So memory that is free is filled, the models that are loaded most often first. Where it is full, a model
    that is loaded often takes the place of one that is not. Popularity that stays is told by the loads of
    minutes, bursts by those of seconds; minutes (`half_life_s`) were better or no worse where we measured.

    **Bounds.** A plan has one prefetch more than the inner one at most, and `at_once` are under way. A node
    is left alone while one of its instances loads or its disk is read, and rests afterwards: reading ahead
    takes at most `share` of the time of the tier that is read. No model has more than `max_copies` by this.

    **What it leaves alone.** It adds to the inner plan and changes nothing of it. Which model makes room is
    up to the store; *v* stands for it. A store whose tiers belong to no nodes, or that has one tier a node,
    gets no prefetches.

    It keeps what it has learned, so give each fleet one of its own. Asked again with the same view it plans
    the same.

    Source: the question is what ServerlessLLM (Fu et al., OSDI 2024) leaves open: models are put on the nodes
    that will need them by past loads alone. The rule is ours, measured in `docs/papers.md`.

    Args:
        inner: The scheduler whose plans it adds to; `StartupTimePlacement()` if not given.
        half_life_s: After so long a load counts half.
        max_copies: The most copies of a model in the memory of nodes; `None` for all nodes.
        at_once: The most prefetches under way.
        share: The share of its time that a node's slower tier may read ahead, over 0 to 1.
        least_uses: How many loads a copy must be expected to serve in a half-life.
        least_gain: How many times as much as what it replaces a copy must be worth, 1 or more.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        inner: Scheduler | None = None,
        *,
        half_life_s: float = 600.0,
        max_copies: int | None = None,
        at_once: int = 4,
        share: float = 0.5,
        least_uses: float = 1.0,
        least_gain: float = 2.0,
    ) -> None:
        if not (half_life_s > 0 and isfinite(half_life_s)):
            raise ConfigError(f"half_life_s is {half_life_s!r}; give a finite number of seconds over 0.")
        if not 0 < share <= 1:
            raise ConfigError(f"share is {share!r}; give a share over 0, at most 1.")
        if not (least_uses >= 0 and least_gain >= 1):
            raise ConfigError(
                f"least_uses is {least_uses!r} and least_gain {least_gain!r}; give 0 or more, and 1 or more."
            )
        check_counts(ConfigError, 1, at_once=at_once, max_copies=1 if max_copies is None else max_copies)
        self._inner = StartupTimePlacement() if inner is None else inner
        self._half_life_s, self._max_copies, self._at_once = half_life_s, max_copies, at_once
        self._share, self._least_uses, self._least_gain = share, least_uses, least_gain
        self._learned = _Learned()
        self._asked: dict[str, _Asked] = {}

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        self._learned.learn(fleet, self._half_life_s)
        planned = self._inner.plan(fleet)
        prefetch = self._prefetch(assume(fleet, planned))
        return planned if prefetch is None else (*planned, prefetch)

    def _prefetch(self, fleet: FleetView) -> Prefetch | None:
        now_s = fleet.now_s
        self._asked = {node: asked for node, asked in self._asked.items() if asked.is_paced(now_s)}
        if sum(asked.ready_s > now_s for asked in self._asked.values()) >= self._at_once:
            return None
        memories = list(_memories(fleet, {n: a.model for n, a in self._asked.items() if a.ready_s > now_s}))
        best = max(self._candidates(fleet, memories), default=None)
        if best is None:
            return None
        self._asked[best.node] = _Asked(
            best.model, now_s, now_s + best.load_s, now_s + best.load_s / self._share
        )
        many = f"{best.copies} nodes have it" if best.copies != 1 else "1 node has it"
        reason = f"{best.model} is loaded {3600 * best.loads_per_s:.3g} times an hour, and {many}"
        return Prefetch(model=best.model, node=best.node, reason=reason)

    def _candidates(self, fleet: FleetView, memories: Sequence[_Memory]) -> Iterator[_Candidate]:
        copies: dict[ModelId, int] = {}
        for memory in memories:
            for model in memory.held:
                copies[model] = copies.get(model, 0) + 1
        known = {model.id for model in fleet.models}
        most = inf if self._max_copies is None else self._max_copies
        for memory in memories:
            if memory.node in self._asked or memory.is_busy:
                continue
            least = min((self._worth(m, copies[m] - 1, memory) for m in memory.held), default=0.0)
            for model, size_bytes in memory.sizes.items():
                already = copies.get(model, 0)
                if model not in known or model in memory.held or already >= most:
                    continue
                loads_per_s = self._learned.loads_per_s(model, self._half_life_s)
                uses = loads_per_s * self._learned.busy**already * self._half_life_s
                worth = self._worth(model, already, memory)
                replaces = uses >= self._least_uses and worth >= self._least_gain * least
                if worth > 0 and (memory.free_bytes >= size_bytes or replaces):
                    yield _Candidate(worth, memory.node, model, already, loads_per_s, memory.load_s[model])

    def _worth(self, model: ModelId, others: int, memory: _Memory) -> float:
        loads_per_s = self._learned.loads_per_s(model, self._half_life_s)
        return loads_per_s * self._learned.busy**others * memory.saved_s.get(model, 0.0)

    def __repr__(self) -> str:
        return (
            f"PrePlacement({self._inner!r}, half_life_s={self._half_life_s:g}, "
            f"max_copies={self._max_copies}, at_once={self._at_once}, share={self._share:g}, "
            f"least_uses={self._least_uses:g}, least_gain={self._least_gain:g})"
        )


class _Candidate(NamedTuple):
    """A prefetch that may be planned; the greatest is worth most."""

    worth: float
    node: str
    model: ModelId
    copies: int
    loads_per_s: float
    load_s: float


class _Asked(NamedTuple):
    """A prefetch that was planned: when, when it should be done, and until when its node rests."""

    model: ModelId
    asked_s: float
    ready_s: float
    rests_until_s: float

    def is_paced(self, now_s: float) -> bool:
        """Whether it counts; one of this very moment is planned again."""
        return self.asked_s < now_s < self.rests_until_s


@dataclass(slots=True)
class _Memory:
    """The fastest tier of a node: what is on it or on its way, and what could be.

    Attributes:
        node: The name of the node.
        free_bytes: Room on the tier.
        held: The models on it, and one on its way.
        sizes: The bytes of each model that a slower tier has.
        load_s: Seconds to read each of them from there.
        saved_s: How much of that a load from the fastest tier takes less.
        is_busy: Whether an instance of the node loads, or a slower tier is read.
    """

    node: str
    free_bytes: float
    held: set[ModelId]
    is_busy: bool
    sizes: dict[ModelId, int] = field(default_factory=dict[ModelId, int])
    load_s: dict[ModelId, float] = field(default_factory=dict[ModelId, float])
    saved_s: dict[ModelId, float] = field(default_factory=dict[ModelId, float])

    def learn(self, view: StoreView, measured: Mapping[str, float]) -> None:
        """Take over what the slower tiers have, the fastest of them first."""
        rates = {tier.name: measured.get(tier.name) or tier.bytes_per_s for tier in view.tiers}
        for tier in view.tiers[1:]:
            for entry in view.residency:
                if entry.tier == tier.name and entry.model not in self.sizes:
                    self.sizes[entry.model] = entry.size_bytes
                    self.load_s[entry.model] = load_s = entry.size_bytes / rates[tier.name]
                    self.saved_s[entry.model] = load_s - entry.size_bytes / rates[view.tiers[0].name]


def _memories(fleet: FleetView, coming: Mapping[str, ModelId]) -> Iterator[_Memory]:
    """The fastest tiers of all nodes that have a slower one, too."""
    measured = dict(fleet.times.load_bytes_per_s)
    for node in sorted({instance.node for instance in fleet.instances if instance.node}):
        view = fleet.store.seen_from(node)
        if len(view.tiers) < 2 or view.tiers[0].node != node:
            continue
        fastest = view.tiers[0]
        held = {entry.model for entry in view.residency if entry.tier == fastest.name}
        if node in coming:
            held.add(coming[node])
        is_loading = any(i.swapping and i.target for i in fleet.instances if i.node == node)
        is_read = any(tier.queued_bytes for tier in view.tiers[1:]) or bool(view.loading)
        memory = _Memory(node, fastest.free_bytes, held, is_loading or is_read)
        memory.learn(view, measured)
        yield memory


@dataclass(slots=True)
class _Learned:
    """How often each model is loaded, and how often a node has no idle instance; older ones count less."""

    seen_s: float | None = None
    busy: float = 0.5
    counts: dict[ModelId, float] = field(default_factory=dict[ModelId, float])
    targets: dict[InstanceId, ModelId | None] = field(default_factory=dict[InstanceId, "ModelId | None"])

    def learn(self, fleet: FleetView, half_life_s: float) -> None:
        """Take a view over that is later than the last one; what the first one shows was loaded before."""
        if self.seen_s is not None and fleet.now_s <= self.seen_s:
            return
        kept = 1.0 if self.seen_s is None else 0.5 ** ((fleet.now_s - self.seen_s) / half_life_s)
        known = {model.id for model in fleet.models}
        self.counts = {model: kept * count for model, count in self.counts.items() if model in known}
        for instance in fleet.instances if self.seen_s is not None else ():
            target = instance.next_model
            if target is not None and target in known and target != self.targets.get(instance.id):
                self.counts[target] = self.counts.get(target, 0.0) + 1.0
        self.targets = {instance.id: instance.next_model for instance in fleet.instances}
        nodes = {instance.node for instance in fleet.instances}
        idle = {i.node for i in fleet.instances if i.free and not i.num_requests}
        self.busy = kept * self.busy + (1.0 - kept) * (1.0 - len(idle) / max(1, len(nodes)))
        self.seen_s = fleet.now_s

    def loads_per_s(self, model: ModelId, half_life_s: float) -> float:
        """Loads of a model a second."""
        return (self.counts.get(model, 0.0) + _UNSEEN) * log(2) / half_life_s
