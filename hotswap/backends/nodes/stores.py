"""`NodeStores`: the stores of several nodes as one, with a view that tells whose the tiers are."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import chain
from math import inf
from typing import Self, TypeVar

import anyio
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskGroup, TaskStatus

from hotswap.backends.stores.loading import more_specific
from hotswap.backends.stores.reading import background
from hotswap.errors import ConfigError, ShardMissing, StoreError
from hotswap.model import Adapter, HostChunk, Manifest, Model, Shard
from hotswap.request import ModelId
from hotswap.store import (
    SupportsImport,
    SupportsPrefetch,
    SupportsSideFiles,
    SupportsTextSettings,
    SupportsTokenizer,
    WeightStore,
)
from hotswap.text import TextSettings, Tokenizer
from hotswap.view import Residency, StoreView, TierView

__all__ = ["NodeStores"]

_S = TypeVar("_S", bound=WeightStore)

_log = logging.getLogger("hotswap.stores")


class NodeStores(WeightStore):
    """A store for each node: `NodeStores({"n0": store, "n1": LinkedStore("n1", ...)})`.

    An engine whose `InstanceView.node` is `"n1"` loads from the store of `"n1"` (`SupportsNodes`). The view
    has the tiers of all nodes, each with its `node`, so that placement and routers decide by node. Nodes come
    and go while it is open: `add` and `remove`. The tiers of a node whose store fails or whose link is broken
    vanish from the view until it is back, and the log tells.

    `manifest` and the small files are read from the first node that has them, `open` from the one that would
    be done soonest.

    Args:
        nodes: Stores by the names of their nodes. They are opened and closed with this store.
        shared: Names of tiers that all nodes share, such as a `RemoteStore`'s; the view has them once.

    Raises:
        ConfigError: a node has no name.
    """

    def __init__(
        self, nodes: Mapping[str, WeightStore] | None = None, *, shared: Collection[str] = ("remote",)
    ) -> None:
        self._initial = dict(nodes or {})
        for name in self._initial:
            _check_name(name)
        self._shared = frozenset(shared)
        self._nodes: dict[str, _Node] = {}
        self._tasks: TaskGroup | None = None

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        """Open the stores of the first nodes; close those of all nodes at the end."""
        async with background() as self._tasks:
            try:
                for name, store in self._initial.items():
                    await self.add(name, store)
                yield self
            finally:
                for name in tuple(self._nodes):
                    with anyio.CancelScope(shield=True):
                        await self.remove(name)
                self._tasks = None

    # ------------------------------------------------------------------ nodes

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes, in the order in which they came."""
        return tuple(self._nodes)

    async def add(self, node: str, store: WeightStore) -> None:
        """Open the store of a node that has come, and show its tiers from now on.

        Raises:
            ConfigError: the node has no name, or is there already.
            StoreError: this store is not open, or that of the node cannot be opened.
        """
        _check_name(node)
        if self._tasks is None:
            raise StoreError(f"{self!r} is not open; use it inside `async with`.")
        if node in self._nodes:
            raise ConfigError(f"There is a node {node!r} already; remove it first.")
        await self._tasks.start(self._keep, node, store)

    async def remove(self, node: str) -> None:
        """Take a node's tiers out of the view at once, and return when its store is closed.

        Raises:
            ConfigError: there is no such node.
        """
        if (entry := self._nodes.pop(node, None)) is None:
            raise ConfigError(f"There is no node {node!r} to remove; there are {self._names()}.")
        entry.ended.set()
        await entry.closed.wait()

    def on(self, node: str) -> WeightStore:
        """Return the store of a node; see `SupportsNodes`."""
        if (entry := self._nodes.get(node)) is None:
            raise ShardMissing(
                f"There is no node {node!r}; weights lie on {self._names()}. Add the node, or give the "
                "engine the name of its own."
            )
        return entry.store

    async def _keep(
        self, node: str, store: WeightStore, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED
    ) -> None:
        """Hold the store of a node open until it is removed."""
        entry = _Node(store)
        is_open = False
        try:
            async with store:
                if node in self._nodes:
                    raise ConfigError(f"There is a node {node!r} already; remove it first.")
                self._nodes[node], is_open = entry, True
                task_status.started()
                await entry.ended.wait()
        except Exception as exc:
            if not is_open:
                raise
            _log.warning("The store of node %r failed, and its tiers are gone: %s", node, exc)
        finally:
            if self._nodes.get(node) is entry:
                del self._nodes[node]
            entry.closed.set()

    # ------------------------------------------------------------------ weights

    async def manifest(self, model: ModelId) -> Manifest:
        failure: StoreError | None = None
        for store in self._stores():
            try:
                return await store.manifest(model)
            except StoreError as exc:
                failure = more_specific(failure, exc)
        raise failure or self._no_node()

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        if not (stores := self._stores()):
            raise self._no_node()
        async with _soonest(stores, shard.model).open(shard) as chunks:
            yield chunks

    async def prefetch(self, model: ModelId) -> None:
        """Load the model into the fastest tier of the node that would be done soonest.

        To choose the node ask its store, as a `Prefetch` with a node does: `stores.on(node).prefetch(model)`.
        """
        able = [store for store in self._stores() if isinstance(store, SupportsPrefetch)]
        if not able:
            raise StoreError(f"No node can prefetch model {model!r}: the store of each has a single tier.")
        await _soonest(able, model).prefetch(model)

    async def drop(self, model: ModelId) -> None:
        """Drop the model from the fastest tier of every node."""
        for store in self._stores():
            if isinstance(store, SupportsPrefetch):
                await store.drop(model)

    async def import_model(self, model: Model) -> None:
        """Import a model on every node whose store can; see `SupportsImport`."""
        able = [store for store in self._stores() if isinstance(store, SupportsImport)]
        if not able:
            raise ConfigError(
                f"No node can import model {model.id!r}; push it to the store that the nodes share, and "
                "register it without a source."
            )
        for store in able:
            await store.import_model(model)

    # ------------------------------------------------------------------ the files beside them

    async def tokenizer(self, model: ModelId) -> Tokenizer | None:
        for store in self._stores():
            if isinstance(store, SupportsTokenizer) and (found := await store.tokenizer(model)) is not None:
                return found
        return None

    async def side_files(self, model: ModelId) -> dict[str, bytes]:
        """Return the small files beside a model's weights, from the first node that has any."""
        for store in self._stores():
            if isinstance(store, SupportsSideFiles) and (found := await store.side_files(model)):
                return found
        return {}

    async def text_settings(self, model: ModelId) -> TextSettings | None:
        for store in self._stores():
            if isinstance(store, SupportsTextSettings):
                found = await store.text_settings(model)
                if found is not None:
                    return found
        return None

    async def adapter_settings(self, adapter: Adapter) -> TextSettings:
        failure: StoreError | None = None
        for store in self._stores():
            if isinstance(store, SupportsTextSettings):
                try:
                    return await store.adapter_settings(adapter)
                except StoreError as exc:
                    failure = more_specific(failure, exc)
        if failure is not None:
            raise failure
        return TextSettings()

    # ------------------------------------------------------------------ the view

    def view(self) -> StoreView:
        """The tiers of all nodes by name, the fastest of each node first, and those that they share last."""
        views = [entry.view(name, self._shared) for name, entry in self._nodes.items()]
        return StoreView(
            tiers=tuple(_tiers(views)),
            residency=tuple(_once(chain.from_iterable(view.residency for view in views))),
            loading=tuple(chain.from_iterable(view.loading for view in views)),
        )

    @property
    def num_lent(self) -> int:
        """How many buffers the stores here have lent; 0 when nothing is open."""
        return sum(getattr(store, "num_lent", 0) for store in self._stores())

    def __repr__(self) -> str:
        return f"<NodeStores [{', '.join(f'{name}: {e.store!r}' for name, e in self._nodes.items())}]>"

    def _stores(self) -> list[WeightStore]:
        return [entry.store for entry in self._nodes.values()]

    def _no_node(self) -> ShardMissing:
        return ShardMissing("There is no node to read weights from; add one by `NodeStores.add`.")

    def _names(self) -> str:
        return ", ".join(map(repr, self._nodes)) or "no node"


def _soonest(stores: Sequence[_S], model: ModelId) -> _S:
    """The store that would have loaded the model first; of several the one with most room for it."""

    def cost(store: _S) -> tuple[float, float]:
        view = store.view()
        return view.load_s(model), -view.tiers[0].free_bytes if view.tiers else inf

    return min(stores, key=cost)


class _Node:
    """The store of one node, and its view with the node's name."""

    def __init__(self, store: WeightStore) -> None:
        self.store = store
        self.ended, self.closed = anyio.Event(), anyio.Event()
        self._residency: tuple[Residency, ...] = ()
        self._named: tuple[Residency, ...] = ()

    def view(self, node: str, shared: frozenset[str]) -> StoreView:
        """The view of the store, with tiers of the node."""
        view = self.store.view()
        if view.residency != self._residency:  # kept as long as it is the same: it may be long
            self._residency = view.residency
            self._named = tuple(_named(view.residency, node, shared))
        return StoreView(
            tiers=tuple(tier if tier.name in shared else replace(tier, node=node) for tier in view.tiers),
            residency=self._named,
            loading=tuple(_named(view.loading, node, shared)),
        )


def _named(entries: tuple[Residency, ...], node: str, shared: frozenset[str]) -> Iterator[Residency]:
    return (entry if entry.tier in shared else replace(entry, node=node) for entry in entries)


def _tiers(views: list[StoreView]) -> list[TierView]:
    """The tiers of several views, by their place in each, and those that are shared last and once."""
    places: dict[str, int] = {}
    tiers: dict[tuple[str, str], TierView] = {}
    for view in views:
        for place, tier in enumerate(view.tiers):
            places[tier.name] = max(place, places.get(tier.name, 0))
            tiers.setdefault((tier.name, tier.node), tier)
    return sorted(tiers.values(), key=lambda tier: (not tier.node, places[tier.name]))


def _once(entries: Iterator[Residency]) -> Iterator[Residency]:
    """Leave out what several nodes tell of a tier that they share."""
    shared = set[tuple[str, ModelId]]()
    for entry in entries:
        if entry.node:
            yield entry
        elif (entry.tier, entry.model) not in shared:
            shared.add((entry.tier, entry.model))
            yield entry


def _check_name(node: str) -> None:
    if not node:
        raise ConfigError("A node has no name; give each that of its engines (`InstanceView.node`).")
