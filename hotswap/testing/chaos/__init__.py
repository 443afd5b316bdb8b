"""Faults by seed, injected into any engine and any store by a wrapper: `chaotic_engine`, `chaotic_store`.

Only faults that the interfaces allow are injected: losses, delays, a lack of memory, aborted moves of KV
blocks, slow disks, missing or damaged files. So a fleet must survive them with every token right and all
resources released. Time is that of the event loop and chance that of the `Random` that is passed in: in
virtual time a seed gives the same faults at the same moments.
"""

from hotswap.testing.chaos.engine import ChaosEngine, chaotic_engine
from hotswap.testing.chaos.injector import EngineFaults, Injector, StoreFaults
from hotswap.testing.chaos.store import ChaosStore, chaotic_store

__all__ = [
    "ChaosEngine",
    "ChaosStore",
    "EngineFaults",
    "Injector",
    "StoreFaults",
    "chaotic_engine",
    "chaotic_store",
]
