"""The policies of a fleet that names none."""

from __future__ import annotations

from hotswap.policies.routers import LeastTimeRouter
from hotswap.policies.schedulers import CostSwap
from hotswap.router import Router
from hotswap.scheduler import Scheduler

__all__ = ["default_router", "default_scheduler"]


def default_router() -> Router:
    """Return the router by the least expected time to first token."""
    return LeastTimeRouter()


def default_scheduler() -> Scheduler:
    """Return the scheduler by what waiting and swapping cost, which has no settings."""
    return CostSwap()
