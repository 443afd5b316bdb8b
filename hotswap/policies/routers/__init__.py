"""The routers: each sends a request to an open replica of its model, or leaves it waiting."""

from hotswap.policies.routers.affinity import AffinityRouter
from hotswap.policies.routers.consistent_hash import ConsistentHashRouter, RoutingKey
from hotswap.policies.routers.first_of import FirstOfRouters
from hotswap.policies.routers.freeness import FreenessRouter, infaas_router
from hotswap.policies.routers.least_loaded import LeastLoadedRouter
from hotswap.policies.routers.least_time import LeastTimeRouter
from hotswap.policies.routers.prefix import PrefixRouter
from hotswap.policies.routers.round_robin import RoundRobinRouter

__all__ = [
    "AffinityRouter",
    "ConsistentHashRouter",
    "FirstOfRouters",
    "FreenessRouter",
    "LeastLoadedRouter",
    "LeastTimeRouter",
    "PrefixRouter",
    "RoundRobinRouter",
    "RoutingKey",
    "infaas_router",
]
