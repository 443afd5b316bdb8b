"""The driver for scale: an engine is visited when its batch changes, and tokens are counted."""

from hotswap.simulation.events.engine import EventEngine
from hotswap.simulation.events.fleet import EventFleet
from hotswap.simulation.events.rider import Rider

__all__ = ["EventEngine", "EventFleet", "Rider"]
