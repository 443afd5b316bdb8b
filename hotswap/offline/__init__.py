"""Running a fleet away from production: virtual time, generated workloads, and views saved as text.

The simulator and the test tools both build on it. `run` and `virtual_time`, which run a coroutine or a test
in virtual time, are in `hotswap.offline.virtual_time`.
"""

from __future__ import annotations

from hotswap.offline.replay import dump_view, load_view
from hotswap.offline.virtual_time import VirtualTimeDeadlock, VirtualTimeLoop
from hotswap.offline.workloads import Arrival, Lengths, play, workload

__all__ = [
    "Arrival",
    "Lengths",
    "VirtualTimeDeadlock",
    "VirtualTimeLoop",
    "dump_view",
    "load_view",
    "play",
    "workload",
]
