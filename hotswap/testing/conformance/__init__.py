"""Public conformance suites: inherit from one, write its `make_*` hooks, and pytest runs it.

Each checks what the docstrings of its interface promise, so classes that pass are interchangeable.
"""

from hotswap.testing.conformance.channel import ChannelConformance
from hotswap.testing.conformance.engine import EngineConformance
from hotswap.testing.conformance.kv_store import KVStoreConformance
from hotswap.testing.conformance.policies import RouterConformance, SchedulerConformance
from hotswap.testing.conformance.store import WeightStoreConformance

__all__ = [
    "ChannelConformance",
    "EngineConformance",
    "KVStoreConformance",
    "RouterConformance",
    "SchedulerConformance",
    "WeightStoreConformance",
]
