"""Stores of weights on several nodes: as one for a controller, and as sources of weights for each other.

`NodeStores` joins the stores of nodes, those of other machines as a `LinkedStore` each. A `StoreHost` serves
the store of a node to both a controller and other nodes, which read weights from it by a `PeerStore`.
"""

from __future__ import annotations

from hotswap.backends.nodes.host import StoreHost
from hotswap.backends.nodes.linked import LinkedStore
from hotswap.backends.nodes.peers import PeerStore
from hotswap.backends.nodes.stores import NodeStores

__all__ = ["LinkedStore", "NodeStores", "PeerStore", "StoreHost"]
