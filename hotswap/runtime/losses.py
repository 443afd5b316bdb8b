"""Tells of each instance that is lost: once in the metrics, and in the log with its reason."""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary

from hotswap import telemetry as tm
from hotswap.runtime.instance import Instance
from hotswap.telemetry import Telemetry

__all__ = ["Losses"]

log = logging.getLogger("hotswap")


class Losses:
    """The losses that were noted and are not over. Requests tell the reason, the control loop the rest.

    Args:
        telemetry: Counts losses.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._reasons = WeakKeyDictionary[Instance, str]()

    def note(self, instance: Instance, reason: object = "") -> None:
        """Note that an instance is lost; what is known already is told once."""
        known, text = self._reasons.get(instance), str(reason)
        if known is None:
            self._telemetry.losses.add(1, {tm.INSTANCE: instance.id})
        if known is None or (text and not known):
            log.warning("Instance %r was lost%s", instance.id, f": {text}" if text else ".")
        self._reasons[instance] = known or text

    def reason(self, instance: Instance) -> str:
        """Return why it was lost, as far as that is known."""
        return self._reasons.get(instance) or "a swap or an unload that failed half way"

    def over(self, instance: Instance) -> None:
        """Note that it is not lost any more."""
        self._reasons.pop(instance, None)
