"""What several schedulers ask about one instance."""

from __future__ import annotations

from math import inf

from hotswap.view import InstanceState, InstanceView

__all__ = ["is_leaving", "used_s"]


def is_leaving(instance: InstanceView) -> bool:
    """Return whether an instance is swapping to another model than it has, or is being unloaded.

    One that is shown as swapping to its own model, as `Cooldown` does, goes on serving it.
    """
    return instance.swapping and instance.target != instance.model


def used_s(instance: InstanceView) -> float:
    """Return the loop time at which an instance was last used: loaded, assigned a request or left by one.

    Minus infinity if it is EMPTY, or the view does not say.
    """
    if instance.state is InstanceState.EMPTY:
        return -inf
    since_s, last_s = instance.serving_since_s, instance.last_used_s
    return max(-inf if since_s is None else since_s, -inf if last_s is None else last_s)
