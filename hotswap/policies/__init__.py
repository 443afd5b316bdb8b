"""Routers and schedulers, and the means to combine them: pure decisions over a `FleetView`.

Each is an object with frozen settings; none names the runtime or a backend.
"""

from hotswap.policies.adapter_pool import AdapterPool
from hotswap.policies.advisor import SharingAdvisor, SharingReport, WayReport
from hotswap.policies.affinity import AffinityRouter
from hotswap.policies.autoscale import FreenessAutoscaler
from hotswap.policies.combine import Cooldown, FirstOf, FirstOfRouters, InOrder
from hotswap.policies.consistent_hash import ConsistentHashRouter
from hotswap.policies.cost import MoveCosts
from hotswap.policies.floors import RestoreFloors
from hotswap.policies.freeness import Freeness, FreenessRouter, VirtualUsage, infaas_router
from hotswap.policies.horizontal import HorizontalAutoscaler
from hotswap.policies.keep_alive import KeepAliveSwap
from hotswap.policies.least_loaded import LeastLoadedRouter
from hotswap.policies.least_time import LeastTimeRouter
from hotswap.policies.monitor import Recommendation, ScalingMonitor, ScalingStep
from hotswap.policies.pinning import StaticPinning
from hotswap.policies.placement import StartupTimePlacement
from hotswap.policies.predict import accepted, assume
from hotswap.policies.prefix import PrefixRouter
from hotswap.policies.quota import ElasticQuota, Quotas, quotas
from hotswap.policies.reschedule import VirtualUsageRescheduler
from hotswap.policies.round_robin import RoundRobinRouter
from hotswap.policies.shapes import ModelShape
from hotswap.policies.sharing import SharedModel, SharingWay
from hotswap.policies.shepherd import ShepherdSwap
from hotswap.policies.startup_cost import LoadCosts, StartupCosts
from hotswap.policies.swap import WeightedLoadSwap

__all__ = [
    "AdapterPool",
    "AffinityRouter",
    "ConsistentHashRouter",
    "Cooldown",
    "ElasticQuota",
    "FirstOf",
    "FirstOfRouters",
    "Freeness",
    "FreenessAutoscaler",
    "FreenessRouter",
    "HorizontalAutoscaler",
    "InOrder",
    "KeepAliveSwap",
    "LeastLoadedRouter",
    "LeastTimeRouter",
    "LoadCosts",
    "ModelShape",
    "MoveCosts",
    "PrefixRouter",
    "Quotas",
    "Recommendation",
    "RestoreFloors",
    "RoundRobinRouter",
    "ScalingMonitor",
    "ScalingStep",
    "SharedModel",
    "SharingAdvisor",
    "SharingReport",
    "SharingWay",
    "ShepherdSwap",
    "StartupCosts",
    "StartupTimePlacement",
    "StaticPinning",
    "VirtualUsage",
    "VirtualUsageRescheduler",
    "WayReport",
    "WeightedLoadSwap",
    "accepted",
    "assume",
    "infaas_router",
    "quotas",
]
