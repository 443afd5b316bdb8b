"""Has the stores of actors read from each other: finds the actors of other nodes as they come and go."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import anyio

from hotswap.backends.nodes import PeerStore
from hotswap.backends.ray.address import Address
from hotswap.backends.ray.cluster import RayError, actor_names, find_actor, reason_of

__all__ = ["PeerNodes"]

log = logging.getLogger("hotswap")

_LOOK_S = 2.0  # between questions to Ray
_ASK_S = 5.0


class PeerNodes:
    """Gives peer stores a link to the store of one actor of each other node.

    Ray tells which actors there are, and each actor where its store is served. A node is asked no more once
    none of its actors is left.

    Args:
        stores: Those of this actor.
        actor: The name of this actor, and of its namespace.
        namespace: The namespace of all.
    """

    def __init__(self, stores: Sequence[PeerStore], actor: str, namespace: str) -> None:
        self._stores, self._actor, self._namespace = stores, actor, namespace
        self._known: dict[str, Address] = {}
        self._asked: dict[str, Address] = {}  # by node

    async def follow(self) -> None:
        """Look for actors until cancelled; returns at once if there are no peer stores."""
        while self._stores:
            try:
                names = await actor_names(self._namespace)
            except RayError as exc:
                log.debug("The peers of %r are not known; %s.", self._actor, reason_of(exc))
            else:
                await self._learn({name for name in names if name != self._actor})
                self._compare()
            await anyio.sleep(_LOOK_S)

    async def _learn(self, names: set[str]) -> None:
        for name in self._known.keys() - names:
            del self._known[name]
        for name in names - self._known.keys():
            with anyio.move_on_after(_ASK_S):  # one that is starting is asked again
                try:
                    address = await (await find_actor(name, self._namespace)).address.remote()
                except (ValueError, AttributeError, RayError):  # it has ended, or is no engine
                    continue
                if isinstance(address, Address):
                    self._known[name] = address

    def _compare(self) -> None:
        """Ask one actor of each node, the same for as long as it lives."""
        alive = {address.node: address for address in self._known.values()}
        for node, address in tuple(self._asked.items()):
            if node not in alive:
                del self._asked[node]
                for store in self._stores:
                    store.remove_peer(node)
            elif address in self._known.values():
                del alive[node]
        for node, address in alive.items():
            self._asked[node] = address
            for store in self._stores:
                store.add_peer(node, address.link_to_store)

    def __repr__(self) -> str:
        return f"<PeerNodes of {self._actor!r} [{', '.join(sorted(self._asked)) or 'none'}]>"
