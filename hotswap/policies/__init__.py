"""Routers and schedulers: pure decisions over a `FleetView`.

Each is an object with frozen settings; none imports the runtime or a backend. `hotswap.policies.planning` has
tools that advise people, and `hotswap.policies.by_name` makes policies from text.
"""

from hotswap.policies.forecasts import SeasonalRates
from hotswap.policies.freeness import Freeness, FreenessReading, VirtualUsage
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
    RoutingKey,
    infaas_router,
)
from hotswap.policies.schedulers import (
    AdapterPool,
    Allocation,
    Chain,
    Cooldown,
    CostSwap,
    ElasticQuota,
    FirstOf,
    Forecast,
    FreenessAutoscaler,
    HorizontalAutoscaler,
    KeepAliveSwap,
    KeepAsIs,
    Quotas,
    RestoreMinReplicas,
    ShepherdSwap,
    Spare,
    StartupTimePlacement,
    StaticPinning,
    Victims,
    VirtualUsageRescheduler,
    WeightedLoadSwap,
    quotas,
    restore_min_replicas,
)
from hotswap.policies.startup_costs import LoadCosts, StartupCosts

__all__ = [
    "AdapterPool",
    "AffinityRouter",
    "Allocation",
    "Chain",
    "ConsistentHashRouter",
    "Cooldown",
    "CostSwap",
    "ElasticQuota",
    "FirstOf",
    "FirstOfRouters",
    "Forecast",
    "Freeness",
    "FreenessAutoscaler",
    "FreenessReading",
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
    "RoutingKey",
    "SeasonalRates",
    "ShepherdSwap",
    "Spare",
    "StartupCosts",
    "StartupTimePlacement",
    "StaticPinning",
    "Victims",
    "VirtualUsage",
    "VirtualUsageRescheduler",
    "WeightedLoadSwap",
    "accepted",
    "assume",
    "infaas_router",
    "quotas",
    "restore_min_replicas",
]
