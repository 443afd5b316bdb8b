"""Engines and a store without hardware: their tokens are exact, and their times follow a latency model.

For tests, for trying policies on fleets of any size, and for simulations in virtual time
(`hotswap.offline.virtual_time`), where an hour of a fleet takes seconds. Times are as good as the
`DeviceProfile`.
"""

from hotswap.backends.sim.batcher import Batching
from hotswap.backends.sim.content import sim_bytes
from hotswap.backends.sim.engine import SimEngine
from hotswap.backends.sim.kv_store import SimKVStore
from hotswap.backends.sim.load import Reporting
from hotswap.backends.sim.nodes import SimNodes
from hotswap.backends.sim.store import SimStore, sim_manifest
from hotswap.backends.sim.tokens import expected_tokens
from hotswap.hardware import DeviceProfile

__all__ = [
    "Batching",
    "DeviceProfile",
    "Reporting",
    "SimEngine",
    "SimKVStore",
    "SimNodes",
    "SimStore",
    "expected_tokens",
    "sim_bytes",
    "sim_manifest",
]
