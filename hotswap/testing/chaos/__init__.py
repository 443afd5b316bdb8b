"""Faults by seed, injected into any engine and any store by a wrapper: `chaotic_engine`, `chaotic_store`.

Whatever is injected is something that the interface allows: a loss, a delay, memory that runs out, a move of
KV blocks that is given up, a disk that is slow, a file that is missing or damaged. So whoever uses engines
and stores must come through it: with every token right and everything given back. Time is the event loop's
and chance the `Random` that is passed in: in virtual time a seed gives the same faults at the same moments.
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
