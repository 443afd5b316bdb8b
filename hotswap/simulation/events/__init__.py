"""The driver for scale: an engine is visited when its batch changes, and tokens are counted."""

from hotswap.simulation.events.engine import EventEngine
from hotswap.simulation.events.fleet import EventFleet
from hotswap.simulation.events.request import SimulatedRequest

__all__ = ["EventEngine", "EventFleet", "SimulatedRequest"]
