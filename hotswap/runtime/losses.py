"""Tells of each instance that is lost: once in the metrics, and in the log with its reason."""

from __future__ import annotations

import logging

from hotswap import telemetry as tm
from hotswap.runtime.instance import Instance
from hotswap.runtime.state import FleetState
from hotswap.telemetry import Telemetry

__all__ = ["Losses"]

log = logging.getLogger("hotswap")


class Losses:
    """Notes losses that begin and end. Requests tell the reason, the control loop the rest.

    Args:
        state: Keeps why instances are lost.
        telemetry: Counts losses.
    """

    def __init__(self, state: FleetState, telemetry: Telemetry) -> None:
        self._state, self._telemetry = state, telemetry

    def note(self, instance: Instance, reason: object = "") -> None:
        """Note that an instance is lost; what is known already is told once."""
        known, text = instance.lost_because, str(reason)
        if known is None:
            self._telemetry.losses.add(1, {tm.INSTANCE: instance.id})
            self._state.events.note("instance_lost", instance=instance.id, reason=text)
        if known is None or (text and not known):
            log.warning("Instance %r was lost%s", instance.id, f": {text}" if text else ".")
        if known != (known or text):
            self._state.set_lost(instance, known or text)

    def reason(self, instance: Instance) -> str:
        """Return why it was lost, as far as that is known."""
        return instance.lost_because or "a swap or an unload that failed half way"

    def over(self, instance: Instance) -> None:
        """Note that it is not lost any more."""
        if instance.lost_because is not None:
            self._state.set_lost(instance, None)
            self._state.events.note("instance_restarted", instance=instance.id)
