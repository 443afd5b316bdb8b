"""The schedulers: each turns one view of a fleet into swaps, unloads, moves and adapter loads."""

from hotswap.policies.schedulers.adapter_pool import AdapterPool
from hotswap.policies.schedulers.allocation import Allocation, Spare
from hotswap.policies.schedulers.chain import Chain, Cooldown, FirstOf, KeepAsIs
from hotswap.policies.schedulers.cost import CostSwap
from hotswap.policies.schedulers.elastic_memory import ElasticMemory
from hotswap.policies.schedulers.elastic_quota import ElasticQuota, Quotas, quotas
from hotswap.policies.schedulers.forecast import Forecast
from hotswap.policies.schedulers.freeness_autoscaler import FreenessAutoscaler
from hotswap.policies.schedulers.horizontal_autoscaler import HorizontalAutoscaler
from hotswap.policies.schedulers.keep_alive import KeepAliveSwap
from hotswap.policies.schedulers.min_replicas import RestoreMinReplicas, restore_min_replicas
from hotswap.policies.schedulers.pre_placement import PrePlacement
from hotswap.policies.schedulers.rescheduler import VirtualUsageRescheduler
from hotswap.policies.schedulers.shepherd import ShepherdSwap
from hotswap.policies.schedulers.startup_time import StartupTimePlacement, Victims
from hotswap.policies.schedulers.static_pinning import StaticPinning
from hotswap.policies.schedulers.weighted_load import WeightedLoadSwap

__all__ = [
    "AdapterPool",
    "Allocation",
    "Chain",
    "Cooldown",
    "CostSwap",
    "ElasticMemory",
    "ElasticQuota",
    "FirstOf",
    "Forecast",
    "FreenessAutoscaler",
    "HorizontalAutoscaler",
    "KeepAliveSwap",
    "KeepAsIs",
    "PrePlacement",
    "Quotas",
    "RestoreMinReplicas",
    "ShepherdSwap",
    "Spare",
    "StartupTimePlacement",
    "StaticPinning",
    "Victims",
    "VirtualUsageRescheduler",
    "WeightedLoadSwap",
    "quotas",
    "restore_min_replicas",
]
