"""Engines in other processes and on other machines, over links of `hotswap.backends.transports`.

`RemoteEngine` is the engine that a fleet has; `EngineHost` serves the one behind it. Page `docs/remote.md`
shows how.
"""

from __future__ import annotations

from hotswap.backends.remote.engine import RemoteEngine
from hotswap.backends.remote.host import EngineHost, serve_engine
from hotswap.backends.remote.peers import PeerLinks, SharedPeers, TcpPeers

__all__ = [
    "EngineHost",
    "PeerLinks",
    "RemoteEngine",
    "SharedPeers",
    "TcpPeers",
    "serve_engine",
]
