"""The runtime of a fleet: its state, what acts on it, and `Fleet`, which users see."""

from hotswap.runtime.active import Hop
from hotswap.runtime.adapters import Adapters
from hotswap.runtime.completion import Completion, Sample, Usage
from hotswap.runtime.events import EventStream
from hotswap.runtime.fleet import Fleet
from hotswap.runtime.flow import FleetStream
from hotswap.runtime.models import Models
from hotswap.runtime.move import MigrationLimits
from hotswap.runtime.operations import RollStreams
from hotswap.runtime.swap import SwapLimits

__all__ = [
    "Adapters",
    "Completion",
    "EventStream",
    "Fleet",
    "FleetStream",
    "Hop",
    "MigrationLimits",
    "Models",
    "RollStreams",
    "Sample",
    "SwapLimits",
    "Usage",
]
