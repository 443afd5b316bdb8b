"""Routers and schedulers: pure decisions over a `FleetView`.

Each is an object with frozen settings; none imports the runtime or a backend. `hotswap.policies.planning` has
tools that advise people.
"""

from hotswap.policies.freeness import Freeness, VirtualUsage
from hotswap.policies.move_costs import MoveCosts
from hotswap.policies.prediction import accepted, assume
from hotswap.policies.routers import (
    AffinityRouter,
    ConsistentHashRouter,
    FirstOfRouters,
    FreenessRouter,
    LeastLoadedRouter,
    LeastTimeRouter,
    PrefixRouter,
    RoundRobinRouter,
    infaas_router,
)
from hotswap.policies.schedulers import (
    AdapterPool,
    Chain,
    Cooldown,
    ElasticQuota,
    FirstOf,
    FreenessAutoscaler,
    HorizontalAutoscaler,
    KeepAliveSwap,
    KeepAsIs,
    Quotas,
    RestoreMinReplicas,
    ShepherdSwap,
    StartupTimePlacement,
    StaticPinning,
    VirtualUsageRescheduler,
    WeightedLoadSwap,
    quotas,
)
from hotswap.policies.startup_costs import LoadCosts, StartupCosts

__all__ = [
    "AdapterPool",
    "AffinityRouter",
    "Chain",
    "ConsistentHashRouter",
    "Cooldown",
    "ElasticQuota",
    "FirstOf",
    "FirstOfRouters",
    "Freeness",
    "FreenessAutoscaler",
    "FreenessRouter",
    "HorizontalAutoscaler",
    "KeepAliveSwap",
    "KeepAsIs",
    "LeastLoadedRouter",
    "LeastTimeRouter",
    "LoadCosts",
    "MoveCosts",
    "PrefixRouter",
    "Quotas",
    "RestoreMinReplicas",
    "RoundRobinRouter",
    "ShepherdSwap",
    "StartupCosts",
    "StartupTimePlacement",
    "StaticPinning",
    "VirtualUsage",
    "VirtualUsageRescheduler",
    "WeightedLoadSwap",
    "accepted",
    "assume",
    "infaas_router",
    "quotas",
]
