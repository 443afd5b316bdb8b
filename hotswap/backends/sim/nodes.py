"""`SimNodes`: one store made of a simulated store for each node."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from itertools import chain

from hotswap.backends.sim.store import SimStore
from hotswap.errors import ConfigError, ShardMissing
from hotswap.model import HostChunk, Manifest, Shard
from hotswap.request import ModelId
from hotswap.store import WeightStore
from hotswap.view import StoreView

__all__ = ["SimNodes"]


class SimNodes(WeightStore):
    """One `SimStore` for each node: weights that an engine reads are cached on the host tier of its own node.

    The view has the tiers of all nodes, fastest first. `manifest` and `open` are those of the first node. It
    offers no prefetch, which would have to name a node.

    Args:
        nodes: Stores by the names of their nodes, over the same models; the tiers of each have its name as
            their `node`.

    Raises:
        ConfigError: there is no node, or a tier has another `node` than its store.
    """

    def __init__(self, nodes: Mapping[str, SimStore]) -> None:
        if not nodes:
            raise ConfigError("There are no nodes; give a store for each, or use one SimStore.")
        for name, store in nodes.items():
            if wrong := [tier.name for tier in store.view().tiers if tier.node != name]:
                raise ConfigError(f"Tier {wrong[0]!r} of node {name!r} names another; have it name this one.")
        self._nodes = dict(nodes)
        self._first = next(iter(self._nodes.values()))

    def on(self, node: str) -> SimStore:
        """Return the store of a node; see `SupportsNodes`."""
        try:
            return self._nodes[node]
        except KeyError:
            raise ShardMissing(
                f"There is no node {node!r}; weights lie on {', '.join(map(repr, self._nodes))}. Give the "
                "engine the name of its node."
            ) from None

    async def manifest(self, model: ModelId) -> Manifest:
        return await self._first.manifest(model)

    def open(self, shard: Shard) -> AbstractAsyncContextManager[AsyncIterator[HostChunk]]:
        return self._first.open(shard)

    def view(self) -> StoreView:
        views = [store.view() for store in self._nodes.values()]
        tiers = chain.from_iterable(view.tiers for view in views)
        return StoreView(
            tiers=tuple(sorted(tiers, key=lambda tier: -tier.bytes_per_s)),
            residency=tuple(chain.from_iterable(view.residency for view in views)),
            loading=tuple(chain.from_iterable(view.loading for view in views)),
        )

    def __repr__(self) -> str:
        return f"<SimNodes [{', '.join(f'{name}: {store!r}' for name, store in self._nodes.items())}]>"
