"""ServerlessLLM's scheduler: a model starts on the instance that is ready soonest."""

from hotswap.policies.schedulers.startup_time.placement import StartupTimePlacement
from hotswap.policies.schedulers.startup_time.plan import Victims

__all__ = ["StartupTimePlacement", "Victims"]
