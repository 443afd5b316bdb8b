"""`StoreView` and `KVStoreView`: frozen views of a store of weights and of a store of KV blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from hotswap.request import ModelId

__all__ = ["KVStoreView", "Residency", "StoreView", "StoredKV", "TierView"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierView:
    """One tier of a store, fastest first in `StoreView.tiers`; `capacity_bytes` is `None` when unbounded.

    `queued_bytes` are still to be read from it by running loads and prefetches; waiting prefetches do not
    count, because a load overtakes them. `bytes_per_s` is measured on past reads. `node` is the node that the
    tier belongs to, "" if all nodes share it; tiers of several nodes may have one name.
    """

    name: str
    used_bytes: int = 0
    capacity_bytes: int | None = None
    bytes_per_s: float = float("inf")
    queued_bytes: int = 0
    node: str = ""

    @property
    def free_bytes(self) -> float:
        """Free bytes; infinite for an unbounded tier."""
        return float("inf") if self.capacity_bytes is None else self.capacity_bytes - self.used_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """A model that is complete on a tier; `node` is the tier's."""

    model: ModelId
    tier: str
    size_bytes: int = 0
    node: str = ""


@dataclass(frozen=True, kw_only=True)
class StoreView:
    """The tiers of a store, the models resident on them, and the models being loaded.

    An entry of `loading` names the tier that a model is being read from, and the bytes still to be read.

    Where tiers belong to nodes, `seen_from(instance.node)` is the view of an instance there; the methods of
    this view choose among all nodes.
    """

    tiers: tuple[TierView, ...] = ()
    residency: tuple[Residency, ...] = ()
    loading: tuple[Residency, ...] = ()

    def seen_from(self, node: str) -> StoreView:
        """The view of an instance on a node: the tiers of that node, and the shared ones."""
        if not any(tier.node for tier in self.tiers):
            return self
        return StoreView(
            tiers=tuple(tier for tier in self.tiers if tier.node in ("", node)),
            residency=tuple(entry for entry in self.residency if entry.node in ("", node)),
            loading=tuple(entry for entry in self.loading if entry.node in ("", node)),
        )

    def tier_of(self, model: ModelId) -> str | None:
        """The fastest tier that holds the whole model, `None` if none does."""
        held = self._held.get(model, {})
        return next((tier.name for tier in self.tiers if (tier.name, tier.node) in held), None)

    def load_s(self, model: ModelId, tier: str | None = None) -> float:
        """Seconds to load the model from a tier, by default its fastest; infinite if it is not there.

        The bytes queued on the tier, then those of the model, over the tier's bandwidth (ServerlessLLM,
        section 5.1: `q + n / b`). A model that is being loaded is among the queued bytes, and counts once.
        """
        link = self.source(model, tier)
        return float("inf") if link is None else self._bytes_from(model, link) / link.bytes_per_s

    def load_bytes(self, model: ModelId, tier: str | None = None) -> int | None:
        """Bytes to be read until the model is loaded, as in `load_s`; `None` if it is not there."""
        link = self.source(model, tier)
        return None if link is None else self._bytes_from(model, link)

    def source(self, model: ModelId, tier: str | None = None) -> TierView | None:
        """The tier that a load would read from; of several of one name the fastest; `None` without any."""
        name = self.tier_of(model) if tier is None else tier
        held = self._held.get(model, {})
        links = [link for link in self.tiers if link.name == name and (name, link.node) in held]
        if len(links) < 2:
            return links[0] if links else None
        return min(links, key=lambda link: self._bytes_from(model, link) / link.bytes_per_s)

    def _bytes_from(self, model: ModelId, link: TierView) -> int:
        if _size(self.loading, model, link) is not None:
            return link.queued_bytes
        return link.queued_bytes + self._held.get(model, {}).get((link.name, link.node), 0)

    @cached_property
    def _held(self) -> Mapping[ModelId, Mapping[tuple[str, str], int]]:
        """The bytes of each model by name and node of the tiers that hold it, gathered once for each view."""
        held: defaultdict[ModelId, dict[tuple[str, str], int]] = defaultdict(dict)
        for entry in self.residency:
            held[entry.model].setdefault((entry.tier, entry.node), entry.size_bytes)
        return held


def _size(entries: tuple[Residency, ...], model: ModelId, tier: TierView) -> int | None:
    wanted = model, tier.name, tier.node
    return next((e.size_bytes for e in entries if (e.model, e.tier, e.node) == wanted), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKV:
    """What a store has of one model; `node` is the node where it has it, "" if it is the fleet's process."""

    model: ModelId
    num_blocks: int
    size_bytes: int
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStoreView:
    """A KV store at one moment.

    Attributes:
        tier: What it is called in spans and metrics.
        capacity_bytes: The most that it holds; `None` without a bound.
        used_bytes: What it holds, memory that is kept for blocks on their way included.
        num_leases: Leases and puts that are open.
        num_evicted: Blocks that made room for others so far.
        models: What it has of each model.
    """

    tier: str
    capacity_bytes: int | None = None
    used_bytes: int = 0
    num_leases: int = 0
    num_evicted: int = 0
    models: tuple[StoredKV, ...] = ()
