"""Planning tools for people: how to share devices, how large adapters and caches are, when to scale.

A fleet runs without them. They advise; routers and schedulers decide.
"""

from hotswap.policies.planning.advisor import MethodReport, SharingAdvisor, SharingReport
from hotswap.policies.planning.monitor import Recommendation, ScalingMonitor, ScalingStep
from hotswap.policies.planning.shapes import ModelShape
from hotswap.policies.planning.sharing import SharedModel, SharingMethod

__all__ = [
    "MethodReport",
    "ModelShape",
    "Recommendation",
    "ScalingMonitor",
    "ScalingStep",
    "SharedModel",
    "SharingAdvisor",
    "SharingMethod",
    "SharingReport",
]
