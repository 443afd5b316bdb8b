"""What carries decisions out: flights, the waiting room, the control loop and swaps, composed by `Fleet`."""

from hotswap.runtime.fleet import Completion, Fleet
from hotswap.runtime.flight import FleetStream, Hop
from hotswap.runtime.move import MigrationLimits
from hotswap.runtime.swap import SwapLimits

__all__ = ["Completion", "Fleet", "FleetStream", "Hop", "MigrationLimits", "SwapLimits"]
