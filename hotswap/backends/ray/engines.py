"""`RayEngines`: an engine for each GPU or each node of a Ray cluster, as nodes come and go."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self, TypedDict, Unpack

import anyio
from anyio import AsyncContextManagerMixin

from hotswap.backends.nodes import LinkedStore, NodeStores
from hotswap.backends.ray.cluster import RayError, RayNode, alive_nodes, check_connected, on_node, reason_of
from hotswap.backends.ray.engine import NAMESPACE, RayEngine, options_of
from hotswap.backends.ray.host import StoreMaker
from hotswap.checks import check_callables, check_positive, check_positive_seconds
from hotswap.engine import Engine
from hotswap.errors import ConfigError, FleetClosed, HotswapError, InstanceLost, MigrationAborted
from hotswap.transport import Channel

__all__ = ["EngineFleet", "EngineSettings", "NodeChange", "RayEngines"]

log = logging.getLogger("hotswap")

_LONGEST_PAUSE_S = 60.0


class EngineFleet(Protocol):
    """What takes engines and lets them go while it is open, as `hotswap.Fleet` does."""

    async def add(self, engine: Engine) -> None:
        """Start an engine and take it in."""
        ...

    async def remove(
        self, instance: str, *, deadline_s: float | None = None, reason: str = "by hand"
    ) -> object:
        """Let an engine go."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChange:
    """A node that came or is gone.

    Attributes:
        node: The node.
        came: Whether it came; else it is gone, for good.
        engines: Its engines: those of a node that came have not been started.
    """

    node: RayNode
    came: bool
    engines: tuple[RayEngine, ...]


class EngineSettings(TypedDict, total=False):
    """Keyword arguments of `RayEngines`, and so of `per_gpu` and `per_node`; see there."""

    labels: Mapping[str, str] | None
    options: Mapping[str, object] | None
    detached: bool
    namespace: str
    silence_s: float
    start_s: float
    poll_s: float


class RayEngines(AsyncContextManagerMixin):
    """Engines for the nodes of the cluster: make one by `per_gpu` or `per_node`.

    ```python
    ray.init(address="auto")
    cluster = RayEngines.per_gpu(partial(TorchEngine, device="cuda:0"), make_store)
    async with (
        cluster,
        Fleet(engines=cluster.engines, store=cluster.stores(), models=models) as fleet,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(cluster.follow, fleet)
    ```

    Entering it starts the engines of all nodes at once, and leaving it stops those that no fleet has stopped.
    Engines that do not start are left out, which is logged, and `follow` tries them again. An engine stays on
    its node: it is restarted there, and removed with it. It is called by the address of its node and a
    number, `"10.0.0.7-0"`.

    Args:
        make_engine: Makes an engine from its name, in its actor: `partial(TorchEngine, device="cuda:0")`.
            It is pickled as Ray does.
        make_store: Makes the store of an actor, likewise. Engines of a node share what their stores share,
            such as a `SharedStore`.
        num_engines: How many engines a node gets.
        resources: What each takes of the node, as options of its actor.
        labels: Only nodes with these labels have engines.
        options: More options of the actors, as of `RayEngine`.
        detached: As of `RayEngine`, and so are `namespace`, `silence_s` and `start_s`.
        poll_s: How often Ray is asked for its nodes.

    Raises:
        ConfigError: an argument cannot be used.
    """

    def __init__(
        self,
        make_engine: Callable[[str], Engine],
        make_store: StoreMaker,
        num_engines: Callable[[RayNode], int],
        resources: Mapping[str, float],
        *,
        labels: Mapping[str, str] | None = None,
        options: Mapping[str, object] | None = None,
        detached: bool = False,
        namespace: str = NAMESPACE,
        silence_s: float = 8.0,
        start_s: float = 120.0,
        poll_s: float = 1.0,
    ) -> None:
        check_callables(ConfigError, make_engine=make_engine, make_store=make_store)
        check_positive_seconds(ConfigError, poll_s=poll_s)
        self._num_engines, self._labels = num_engines, dict(labels or {})
        self._options = {**resources, **options_of(options, "RayEngine")}
        if "scheduling_strategy" in self._options:
            raise ConfigError("options has 'scheduling_strategy', but each engine is placed on its node.")
        self._make_engine, self._make_store = make_engine, make_store
        self._detached, self._namespace = detached, namespace
        self._silence_s, self._start_s, self._poll_s = silence_s, start_s, poll_s
        self._nodes: dict[str, _Node] = {}
        self._left_out: list[tuple[_Node, RayEngine]] = []
        self._stores: NodeStores | None = None

    @classmethod
    def per_gpu(
        cls,
        make_engine: Callable[[str], Engine],
        make_store: StoreMaker,
        *,
        share: float = 1.0,
        **settings: Unpack[EngineSettings],
    ) -> Self:
        """Make engines that take a share of a GPU each: 0.5 is two engines a GPU, 2 one for two GPUs.

        Ray shows each actor its own GPUs alone, the first as `cuda:0`. It divides no memory: engines that
        share a GPU need a `memory_bytes` each.

        Raises:
            ConfigError: an argument cannot be used.
        """
        check_positive(ConfigError, share=share)
        if share > 1 and share != int(share):
            raise ConfigError(f"share is {share:g}; give a part of a GPU, or a whole number of GPUs.")
        num_engines = partial(_engines_on_gpus, share)
        return cls(make_engine, make_store, num_engines, {"num_gpus": share}, **settings)

    @classmethod
    def per_node(
        cls,
        make_engine: Callable[[str], Engine],
        make_store: StoreMaker,
        *,
        cpus: float = 1.0,
        **settings: Unpack[EngineSettings],
    ) -> Self:
        """Make an engine for each node that has `cpus` cores, which it takes.

        Raises:
            ConfigError: an argument cannot be used.
        """
        check_positive(ConfigError, cpus=cpus)
        return cls(make_engine, make_store, partial(_engine_on_cpus, cpus), {"num_cpus": cpus}, **settings)

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        check_connected()
        try:
            for change in self._compare(await alive_nodes()):
                log.info("Node %r has %d engines.", change.node.name, len(change.engines))
            await self._start_all()
            yield self
        finally:
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as tasks:
                    for node in self._nodes.values():
                        for engine in () if self._detached else node.engines:
                            tasks.start_soon(engine.stop)
            self._nodes.clear()
            self._left_out.clear()
            self._stores = None

    @property
    def engines(self) -> tuple[RayEngine, ...]:
        """The engines that have started, for a fleet to begin with."""
        left_out = {engine.id for _, engine in self._left_out}
        every = (engine for node in self._nodes.values() for engine in node.engines)
        return tuple(engine for engine in every if engine.id not in left_out)

    def stores(self, *, shared: Collection[str] = ("remote",)) -> NodeStores:
        """Return a store that joins those of all nodes; `follow` keeps it up to date.

        Args:
            shared: Names of tiers that all nodes share, as of `NodeStores`.
        """
        names = dict.fromkeys(engine.status().node for engine in self.engines)
        self._stores = NodeStores({name: self._store_on(name) for name in names}, shared=shared)
        return self._stores

    # ------------------------------------------------------------------ nodes that come and go

    async def changes(self) -> AsyncGenerator[NodeChange]:
        """Tell of nodes as they come and go, for as long as it is iterated over.

        While Ray's head does not answer there are no changes, and the log tells. Use `follow`, or this.
        """
        while True:
            await anyio.sleep(self._poll_s)
            try:
                nodes = await alive_nodes()
            except RayError as exc:
                log.warning("The nodes of the cluster are not known; %s.", reason_of(exc))
                continue
            for change in self._compare(nodes):
                yield change

    async def follow(self, fleet: EngineFleet) -> None:
        """Add and remove engines of an open fleet as nodes come and go, until this is cancelled.

        Engines that cannot be started are tried again, after pauses that double up to a minute, as long as
        their node is there. What runs on the engines of a node that is gone goes on elsewhere, if it has not
        already; engines that are lost on a node that lives are left to the fleet, which restarts them.
        """
        async with anyio.create_task_group() as tasks, aclosing(self.changes()) as changes:
            left_out, self._left_out = self._left_out, []
            for node, engine in left_out:
                tasks.start_soon(self._add, fleet, node, engine)
            async for change in changes:
                name, count = change.node.name, len(change.engines)
                if change.came:
                    log.info("Node %r has come, with %d engines.", name, count)
                    for engine in change.engines:
                        tasks.start_soon(self._add, fleet, self._nodes[change.node.id], engine)
                else:
                    log.warning("Node %r is gone, with %d engines.", name, count)
                    tasks.start_soon(self._remove, fleet, change)

    async def _add(self, fleet: EngineFleet, node: _Node, engine: RayEngine) -> None:
        """Try until the engine is in the fleet, or its node is gone, or the fleet is closed."""
        pause_s = self._poll_s
        while self._nodes.get(node.ray.id) is node:
            try:
                await self._start_on(node.ray.name, engine)
                await fleet.add(engine)
            except FleetClosed:
                break
            except HotswapError as exc:
                log.warning("Engine %r is not added, and is tried again: %s", engine.id, exc)
            else:
                break
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _start_on(self, node: str, engine: RayEngine) -> None:
        """Start an engine, and have the stores include that of its node."""
        await engine.start()
        if self._stores is not None and node not in self._stores.nodes:
            try:
                await self._stores.add(node, self._store_on(node))
            except ConfigError:
                log.debug("Another engine of node %r has added its store meanwhile.", node)

    async def _remove(self, fleet: EngineFleet, change: NodeChange) -> None:
        name = change.node.name
        if self._stores is not None and name in self._stores.nodes and not self._engines_on(name):
            await self._stores.remove(name)
        for engine in change.engines:
            try:
                await fleet.remove(engine.id, deadline_s=0.0, reason=f"node {name} is gone")
            except HotswapError as exc:
                log.warning("Engine %r of a node that is gone is not removed: %s", engine.id, exc)

    # ------------------------------------------------------------------ private

    def _compare(self, nodes: Iterable[RayNode]) -> list[NodeChange]:
        """Note which nodes came and are gone since the last time."""
        alive = {node.id: node for node in nodes if self._labels.items() <= node.labels.items()}
        changes = list[NodeChange]()
        for id in self._nodes.keys() - alive.keys():
            gone = self._nodes.pop(id)
            changes.append(NodeChange(node=gone.ray, came=False, engines=gone.engines))
        for id, node in alive.items():
            if id not in self._nodes and (count := self._num_engines(node)) > 0:
                names = self._free_names(node.name, count)
                made = self._nodes[id] = _Node(node, tuple(self._engine(node, name) for name in names))
                changes.append(NodeChange(node=node, came=True, engines=made.engines))
        return changes

    def _free_names(self, node: str, count: int) -> list[str]:
        """The first names of engines that no other node of this address has."""
        taken = {engine.id for engine in self._engines_on(node)}
        names = (f"{node}-{number}" for number in range(len(taken) + count))
        return [name for name in names if name not in taken][:count]

    def _engine(self, node: RayNode, name: str) -> RayEngine:
        return RayEngine(
            name,
            partial(self._make_engine, name),
            self._make_store,
            options={**self._options, "scheduling_strategy": on_node(node)},
            detached=self._detached,
            namespace=self._namespace,
            silence_s=self._silence_s,
            start_s=self._start_s,
        )

    async def _start_all(self) -> None:
        failures = list[InstanceLost]()

        async def start(node: _Node, engine: RayEngine) -> None:
            try:
                await engine.start()
            except InstanceLost as exc:
                log.warning("Engine %r is left out for now: %s", engine.id, exc)
                failures.append(exc)
                self._left_out.append((node, engine))

        async with anyio.create_task_group() as tasks:
            for node in self._nodes.values():
                for engine in node.engines:
                    tasks.start_soon(start, node, engine)
        if failures and not self.engines:
            raise failures[0]

    def _engines_on(self, node: str) -> list[RayEngine]:
        return [e for each in self._nodes.values() if each.ray.name == node for e in each.engines]

    def _store_on(self, node: str) -> LinkedStore:
        return LinkedStore(node, partial(self._link_to_store, node))

    async def _link_to_store(self, node: str) -> Channel:
        """Open a link to the store of the first engine of a node that has one."""
        failure = MigrationAborted(f"Node {node!r} has no engine.", stage="link")
        for engine in self._engines_on(node):
            try:
                return await engine.open_store_channel()
            except MigrationAborted as exc:
                failure = exc
        raise failure

    def __repr__(self) -> str:
        return f"<RayEngines [{len(self._nodes)} nodes, {len(self.engines)} engines]>"


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """A node and its engines."""

    ray: RayNode
    engines: tuple[RayEngine, ...]


def _engines_on_gpus(share: float, node: RayNode) -> int:
    num_gpus = int(node.resources.get("GPU", 0.0))
    return num_gpus // int(share) if share >= 1 else num_gpus * int(1 / share + 1e-9)


def _engine_on_cpus(cpus: float, node: RayNode) -> int:
    return int(node.resources.get("CPU", 0.0) >= cpus)
