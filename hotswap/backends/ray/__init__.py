"""Engines on the nodes of a Ray cluster, each in an actor, over links of hotswap's own.

Ray places, starts, finds and ends the processes of engines. Tokens, status and KV blocks go over links of
`hotswap.backends.remote`. Tested with Ray 2.60. Page `docs/remote.md` shows how.
"""

from __future__ import annotations

from importlib import import_module

from hotswap.errors import BackendMissing

try:
    import_module("ray")
except ModuleNotFoundError as exc:
    raise BackendMissing(
        f"RayEngine needs {exc.name!r}, which is not installed: pip install 'hotswap[ray]'."
    ) from exc

from hotswap.backends.ray.cluster import RayNode, own_address
from hotswap.backends.ray.engine import RayEngine
from hotswap.backends.ray.engines import EngineFleet, EngineSettings, NodeChange, RayEngines
from hotswap.backends.ray.host import EngineMaker, StoreMaker
from hotswap.backends.ray.stage import RayStage

__all__ = [
    "EngineFleet",
    "EngineMaker",
    "EngineSettings",
    "NodeChange",
    "RayEngine",
    "RayEngines",
    "RayNode",
    "RayStage",
    "StoreMaker",
    "own_address",
]
