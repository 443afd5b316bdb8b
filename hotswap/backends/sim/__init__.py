"""Engines and a store without hardware: true to the interfaces, exact in tokens, modelled in times.

For tests, for trying policies on fleets that nobody owns, and for simulations in virtual time
(`hotswap.offline.virtual_time`), where an hour of a fleet takes seconds. Times are as good as the
`DeviceProfile`.
"""

from hotswap.backends.sim.content import sim_bytes
from hotswap.backends.sim.engine import SimEngine
from hotswap.backends.sim.nodes import SimNodes
from hotswap.backends.sim.store import SimStore, sim_manifest
from hotswap.backends.sim.tokens import expected_tokens

__all__ = ["SimEngine", "SimNodes", "SimStore", "expected_tokens", "sim_bytes", "sim_manifest"]
