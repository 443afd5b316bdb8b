"""`EngineActor`: the process of one engine on a node of a Ray cluster, and how it reaches others."""

from __future__ import annotations

import logging
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, cast

import anyio
from anyio.abc import TaskGroup

from hotswap.backends.nodes import StoreHost
from hotswap.backends.nodes.peers import peer_stores
from hotswap.backends.ray.address import Address
from hotswap.backends.ray.cluster import RayError, find_actor, own_address, reason_of
from hotswap.backends.ray.peer_nodes import PeerNodes
from hotswap.backends.remote import EngineHost, PeerLinks
from hotswap.backends.transports import ChannelHandler, LinkSecret, serve_tcp
from hotswap.engine import Engine
from hotswap.errors import MigrationAborted
from hotswap.store import WeightStore
from hotswap.transport import Channel

__all__ = ["EngineActor", "EngineMaker", "HostActor", "ServedEngine", "StoreMaker"]

log = logging.getLogger("hotswap")

_ASK_S = 5.0

EngineMaker: TypeAlias = Callable[[], Engine]
StoreMaker: TypeAlias = Callable[[], WeightStore]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEngine:
    """What an actor serves.

    Attributes:
        id: The engine's name.
        make_engine: Makes the engine.
        make_store: Makes the store that it reads.
        actor: The actor's name in Ray.
        namespace: That of the actor's name.
        silence_s: The limit of links.
    """

    id: str
    make_engine: EngineMaker
    make_store: StoreMaker
    actor: str
    namespace: str
    silence_s: float


class HostActor(ABC):
    """What the classes of actors share: `run` serves for as long as the actor lives.

    `run` is one task from its start to its end, because task groups and scopes of an engine belong to the
    task that has entered them; every controller calls it, and the first call runs.

    Args:
        what: What it serves, for its log.
    """

    def __init__(self, what: str) -> None:
        self._what, self._key = what, secrets.token_bytes(32)
        self._address: object = None
        self._runs = False
        self._told, self._stopping, self._ended = anyio.Event(), anyio.Event(), anyio.Event()

    async def run(self) -> None:
        """Serve until `stop` is called."""
        if self._runs:
            return
        self._runs = True
        try:
            await self._serve()
        except (Exception, SystemExit) as exc:  # of a library that calls `sys.exit`: Ray would tell nothing
            log.exception("%s has ended.", self._what)
            self._tell(f"{type(exc).__name__}: {exc}")
        finally:
            self._ended.set()

    async def address(self) -> object:
        """Return where the actor serves, once it does; or why it has ended, as text."""
        await self._told.wait()
        return self._address

    async def stop(self) -> None:
        """End what is served, and return when its resources are released."""
        self._stopping.set()
        await self._ended.wait()

    @abstractmethod
    async def _serve(self) -> None:
        """Make what is served, and `_serve_links`."""

    async def _serve_links(
        self, serve: ChannelHandler, store: WeightStore, actor: str, namespace: str
    ) -> None:
        """Serve links to what the actor has, and to its store, until `stop` is called.

        Args:
            serve: Serves one link to what it has.
            store: Its store. Peer stores in it read from the nodes of other actors.
            actor: The name of this actor.
            namespace: Of the names of actors.
        """
        node, secret = own_address(), LinkSecret(self._key)
        async with anyio.create_task_group() as links:
            links.start_soon(PeerNodes(peer_stores(store), actor, namespace).follow)
            served = partial(serve_tcp, secret=secret)
            port = await links.start(served, serve, node)
            store_port = await links.start(served, StoreHost(node, store).serve, node)
            self._tell(Address(node=node, port=port, store_port=store_port, key=self._key, pid=os.getpid()))
            await self._stopping.wait()
            links.cancel_scope.cancel()

    def _tell(self, address: object) -> None:
        self._address = address
        self._told.set()


class EngineActor(HostActor):
    """The class of the actors of engines, which `RayEngine` makes."""

    def __init__(self, served: ServedEngine) -> None:
        super().__init__(f"Engine {served.id!r}")
        self._served = served
        self._host: EngineHost | None = None
        self._links: dict[anyio.CancelScope, anyio.Event] = {}  # to the engine, with their ends
        self._leaving, self._left, self._up = anyio.Event(), anyio.Event(), anyio.Event()

    async def renew(self, end_s: float) -> str:
        """End the engine and make another one beside the same store.

        Args:
            end_s: The time that the engine has to end.

        Returns:
            Why there is no other one; "" if there is.
        """
        if self._stopping.is_set() or self._ended.is_set():
            return "it has ended"
        self._left, self._up = anyio.Event(), anyio.Event()
        self._leaving.set()
        with anyio.move_on_after(end_s):
            await self._left.wait()
        if not self._left.is_set():
            return f"its engine did not end in {end_s:g} s"
        await self._up.wait()
        return "" if isinstance(self._address, Address) else str(self._address)

    async def stop(self) -> None:
        self._stopping.set()
        self._leaving.set()
        await super().stop()

    async def _serve(self) -> None:
        served, store = self._served, self._served.make_store()
        first = served.make_engine()
        try:
            async with store, anyio.create_task_group() as tasks:
                await self._serve_engine(first, store, tasks)
                while not self._stopping.is_set():
                    await self._serve_engine(served.make_engine(), store, None)
        except ExceptionGroup as errors:
            raise _first_in(errors) from errors
        finally:
            self._left.set()
            self._up.set()

    async def _serve_engine(self, engine: Engine, store: WeightStore, tasks: TaskGroup | None) -> None:
        """Have an engine until `renew` or `stop` is called; its links have ended then.

        Args:
            engine: The engine.
            store: What it reads.
            tasks: Where links are served from now on; `None` if they are already.
        """
        served = self._served
        async with engine:
            self._host = EngineHost(engine, store, silence_s=served.silence_s)
            self._host.peers = _ActorPeers(served.actor, served.namespace)
            if tasks is not None:
                tasks.start_soon(self._serve_links, self._link, store, served.actor, served.namespace)
            self._up.set()
            await self._leaving.wait()
            self._leaving, self._host = anyio.Event(), None
            links = list(self._links.items())
            for scope, _ in links:
                scope.cancel()
            for _, ended in links:
                await ended.wait()
        self._left.set()

    async def _link(self, channel: Channel) -> None:
        """Serve a link to the engine of now, or the one to come."""
        await self._up.wait()
        scope, ended = anyio.CancelScope(), anyio.Event()
        self._links[scope] = ended
        try:
            with scope:
                if self._host is not None:
                    await self._host.serve(channel)
        finally:
            del self._links[scope]
            ended.set()


def _first_in(errors: ExceptionGroup[Exception]) -> Exception:
    first = errors.exceptions[0]
    return _first_in(cast("ExceptionGroup[Exception]", first)) if isinstance(first, ExceptionGroup) else first


class _ActorPeers(PeerLinks):
    """Hosts that are actors reach each other by the names of these; Ray tells the rest."""

    def __init__(self, actor: str, namespace: str) -> None:
        self.address, self._namespace = actor, namespace
        self._known: dict[str, Address] = {}

    async def connect(self, address: str) -> Channel:
        known = self._known.get(address)
        if known is None:
            known = self._known[address] = await self._ask(address)
        try:
            return await known.link()
        except MigrationAborted:
            self._known.pop(address, None)  # it may have started anew; a move beside may have found so first
            raise

    async def _ask(self, name: str) -> Address:
        try:
            with anyio.fail_after(_ASK_S):
                actor = await find_actor(name, self._namespace)
                address = await actor.address.remote()
        except TimeoutError as exc:
            message = f"Ray did not say within {_ASK_S:g} s where host {name!r} is; its head may be lost."
            raise MigrationAborted(message, stage="link") from exc
        except (ValueError, RayError) as exc:
            raise MigrationAborted(f"Host {name!r} cannot be found; {reason_of(exc)}.", stage="link") from exc
        if not isinstance(address, Address):
            raise MigrationAborted(f"Host {name!r} has ended: {address}", stage="link")
        return address
