"""The runtime of a fleet: its state, what acts on it, and `Fleet`, which users see."""

from hotswap.runtime.active import Hop
from hotswap.runtime.fleet import Completion, Fleet
from hotswap.runtime.flow import FleetStream
from hotswap.runtime.move import MigrationLimits
from hotswap.runtime.swap import SwapLimits

__all__ = ["Completion", "Fleet", "FleetStream", "Hop", "MigrationLimits", "SwapLimits"]
